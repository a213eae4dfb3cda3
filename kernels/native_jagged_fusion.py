"""Jagged fused attention in C++ with its own backward pass, which computes scores again instead of keeping them.

Legend: as in jagged_fusion_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native
from semantide.kernels.fusion_plan import FORMS, FusionPlan


def native_library(*tensors: Tensor | None) -> CDLL | None:
    """The library where it can take these tensors, gradients or not; None leaves them to torch."""
    given = [x.detach() for x in tensors if x is not None]
    return native.library_for(*(x for x in given if x.is_floating_point())) if all(x.is_cpu for x in given) else None


def attend(
    q_THD: Tensor | None, k_TGD: Tensor | None, v_TGE: Tensor, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None, plan: FusionPlan
) -> Tensor:
    """What was checked before, in float32 in this machine's memory; a plan of ``bias`` has no queries and keys."""
    output: Tensor = _Attention.apply(q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, plan)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor | None,
        k_TGD: Tensor | None,
        v_TGE: Tensor,
        time_weights_HK: Tensor | None,
        position_weights_HP: Tensor | None,
        plan: FusionPlan,
    ) -> Tensor:
        rows = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TGD, v_TGE)]
        given = (*rows, *(x if x is None else x.contiguous() for x in (time_weights_HK, position_weights_HP)))
        out_THE = v_TGE.new_empty(len(v_TGE), plan.heads, v_TGE.shape[2])
        sums_TH = v_TGE.new_empty((len(v_TGE), plan.heads) if plan.form == "softmax" else (0,))
        _run(given, plan, out_THE, sums_TH)
        kept_THE = out_THE if plan.form == "softmax" else None  # the others' gradients do not need the result
        ctx.save_for_backward(*given, kept_THE, sums_TH)
        ctx.plan = plan
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        *given, out_THE, sums_TH = ctx.saved_tensors
        grad_THE = grad_THE if grad_THE.stride(-1) == 1 else grad_THE.contiguous()
        grads = [x if x is None else x.new_empty(x.shape) for x in given[:3]]
        tables = [torch.zeros_like(x) if want and x is not None else None for x, want in zip(given[3:], ctx.needs_input_grad[3:5], strict=True)]
        # Where it is not kept, the gradient stands for the result, whose heads are the same.
        _run(given, ctx.plan, grad_THE if out_THE is None else out_THE, sums_TH, grad_THE, grads, tables)
        return (*grads, *tables, None)


def _run(
    given: Sequence[Tensor | None],
    plan: FusionPlan,
    out_THE: Tensor,
    sums_TH: Tensor,
    grad_THE: Tensor | None = None,
    grads: Sequence[Tensor | None] = (None, None, None),
    tables: Sequence[Tensor | None] = (None, None),
) -> None:
    q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP = given
    library = native.library()
    assert library is not None and v_TGE is not None, "asked for before"
    heads, groups, size = out_THE.shape[1], v_TGE.shape[1], 0 if q_THD is None else q_THD.shape[2]
    buckets, positions = (0 if x is None else x.shape[1] for x in (time_weights_HK, position_weights_HP))
    sequences, (grad_time, grad_position) = len(plan.offsets_B1) - 1, tables
    time_parts = None if grad_time is None else v_TGE.new_empty(sequences, heads, buckets)
    position_parts = None if grad_position is None else v_TGE.new_empty(len(v_TGE) * heads)
    limits = _limits(plan.bounds)
    arguments = native.JAGGED_FUSION.pack(
        *(sequences, heads, heads // groups, size, v_TGE.shape[2], buckets, positions, FORMS[plan.form]),
        *(_at(q_THD), _at(k_TGD), v_TGE.data_ptr(), *_strides(q_THD), *_strides(k_TGD), *_strides(v_TGE)),
        *(plan.offsets_B1.data_ptr(), _at(plan.times_T), limits.data_ptr(), _at(time_weights_HK), _at(position_weights_HP)),
        *(out_THE.data_ptr(), sums_TH.data_ptr(), _at(grad_THE), *_strides(grad_THE), *map(_at, grads)),
        *(_at(grad_time), _at(grad_position), _at(time_parts), _at(position_parts), plan.scale or 0.0),
    )
    native.call(library, "semantide_jagged_fusion", arguments)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@cache
def _limits(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor(bounds)
