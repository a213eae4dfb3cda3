"""Jagged fused attention in C++ with its own backward pass, which computes scores again instead of keeping them.

Legend: as in jagged_fusion_attention.py.
"""

from __future__ import annotations

from ctypes import CDLL
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native

_FORMS = {"silu": 0, "softmax": 1, "bias": 2}


def native_library(*tensors: Tensor | None) -> CDLL | None:
    """The library where it can take these tensors, gradients or not; None leaves them to torch."""
    given = [x.detach() for x in tensors if x is not None]
    return native.library_for(*(x for x in given if x.is_floating_point())) if all(x.is_cpu for x in given) else None


def attend(
    q_THD: Tensor | None,
    k_TGD: Tensor | None,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None,
    time_weights_HK: Tensor | None,
    position_weights_HP: Tensor | None,
    bounds: tuple[int, ...],
    form: str,
    scale: float,
) -> Tensor:
    """What was checked before, in float32 in this machine's memory; ``form`` is an activation, or ``bias`` without queries and keys."""
    extras = (offsets_B1.long().contiguous(), None if times_T is None else times_T.contiguous(), bounds, form, scale)
    output: Tensor = _Attention.apply(q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, *extras)
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
        offsets_B1: Tensor,
        times_T: Tensor | None,
        bounds: tuple[int, ...],
        form: str,
        scale: float,
    ) -> Tensor:
        q_THD, k_TGD = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TGD))
        v_TGE = v_TGE if v_TGE.stride(-1) == 1 else v_TGE.contiguous()
        time_weights_HK, position_weights_HP = (x if x is None else x.contiguous() for x in (time_weights_HK, position_weights_HP))
        heads = next(len(x) if x.ndim == 2 else x.shape[1] for x in (q_THD, time_weights_HK, position_weights_HP) if x is not None)
        out_THE = v_TGE.new_empty(len(v_TGE), heads, v_TGE.shape[2])
        sums_TH = v_TGE.new_empty((len(v_TGE), heads) if form == "softmax" else (0,))
        _run(q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, offsets_B1, times_T, bounds, form, scale, out_THE, sums_TH)
        kept_THE = out_THE if form == "softmax" else None  # the others' gradients do not need the result
        ctx.save_for_backward(q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, offsets_B1, times_T, kept_THE, sums_TH)
        ctx.rest = (bounds, form, scale)
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, offsets_B1, times_T, out_THE, sums_TH = ctx.saved_tensors
        grad_THE = grad_THE if grad_THE.stride(-1) == 1 else grad_THE.contiguous()
        bounds, form, scale = ctx.rest
        grads = [x if x is None else x.new_empty(x.shape) for x in (q_THD, k_TGD, v_TGE)]
        wanted = zip((time_weights_HK, position_weights_HP), ctx.needs_input_grad[3:5], strict=True)
        tables = [torch.zeros_like(x) if want and x is not None else None for x, want in wanted]
        out_THE = grad_THE if out_THE is None else out_THE  # whose heads are the same
        given = (offsets_B1, times_T, bounds, form, scale, out_THE, sums_TH, grad_THE, grads, tables)
        _run(q_THD, k_TGD, v_TGE, time_weights_HK, position_weights_HP, *given)
        return (*grads, *tables, None, None, None, None, None)


def _run(
    q_THD: Tensor | None,
    k_TGD: Tensor | None,
    v_TGE: Tensor,
    time_weights_HK: Tensor | None,
    position_weights_HP: Tensor | None,
    offsets_B1: Tensor,
    times_T: Tensor | None,
    bounds: tuple[int, ...],
    form: str,
    scale: float,
    out_THE: Tensor,
    sums_TH: Tensor,
    grad_THE: Tensor | None = None,
    grads: list[Tensor | None] | None = None,
    tables: list[Tensor | None] | None = None,
) -> None:
    library = native.library()
    assert library is not None, "asked for before"
    heads, groups, size = out_THE.shape[1], v_TGE.shape[1], 0 if q_THD is None else q_THD.shape[2]
    buckets, positions = (0 if x is None else x.shape[1] for x in (time_weights_HK, position_weights_HP))
    sequences, (grad_time, grad_position) = len(offsets_B1) - 1, tables or (None, None)
    time_parts = None if grad_time is None else v_TGE.new_empty(sequences, heads, buckets)
    position_parts = None if grad_position is None else v_TGE.new_empty(len(v_TGE) * heads)
    limits = _limits(bounds)
    arguments = native.JAGGED_FUSION.pack(
        *(sequences, heads, heads // groups, size, v_TGE.shape[2], buckets, positions, _FORMS[form]),
        *(_at(q_THD), _at(k_TGD), v_TGE.data_ptr(), *_strides(q_THD), *_strides(k_TGD), *_strides(v_TGE)),
        *(offsets_B1.data_ptr(), _at(times_T), limits.data_ptr(), _at(time_weights_HK), _at(position_weights_HP)),
        *(out_THE.data_ptr(), sums_TH.data_ptr(), _at(grad_THE), *_strides(grad_THE), *(map(_at, grads) if grads else (0, 0, 0))),
        *(_at(grad_time), _at(grad_position), _at(time_parts), _at(position_parts), scale),
    )
    native.call(library, "semantide_jagged_fusion", arguments)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


@cache
def _limits(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor(bounds)
