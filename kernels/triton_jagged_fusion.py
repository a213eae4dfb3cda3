"""Jagged fused attention in Triton, forward and backward: one launch for all sequences, whatever their lengths.

Legend: as in jagged_fusion_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels.fusion_plan import FORMS, FusionPlan
from semantide.kernels.triton_jagged_tiles import forward_tiles, key_gradient_tiles, query_gradient_tiles

_BLOCK = 64


def attend_triton(
    q_THD: Tensor | None, k_TGD: Tensor | None, v_TGE: Tensor, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None, plan: FusionPlan
) -> Tensor:
    """What was checked before, on the device; a plan of ``bias`` has no queries and keys."""
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
        tensors = [None if x is None else x.contiguous() for x in (q_THD, k_TGD, v_TGE, plan.times_T, time_weights_HK, position_weights_HP)]
        out_THE = v_TGE.new_empty(len(v_TGE), plan.heads, v_TGE.shape[2])
        sums_TH = v_TGE.new_empty((len(v_TGE), plan.heads) if plan.form == "softmax" else (0,), dtype=torch.float32)
        limits = torch.tensor(plan.bounds, device=v_TGE.device)
        shapes, blocks = _shapes(tensors, limits, plan), triton.cdiv(int(plan.offsets_B1.diff().max()) if len(plan.offsets_B1) > 1 else 0, _BLOCK)
        if out_THE.numel():
            grid = (plan.heads * (len(plan.offsets_B1) - 1), blocks)
            forward_tiles[grid](*_arguments(tensors, plan.offsets_B1, limits), out_THE, sums_TH, plan.scale or 0.0, **shapes)
        ctx.save_for_backward(*tensors, limits, out_THE if plan.form == "softmax" else None, sums_TH)
        ctx.rest = (plan, blocks, shapes)
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, limits, out_THE, sums_TH = ctx.saved_tensors
        plan, blocks, shapes = ctx.rest
        q_THD, k_TGD, v_TGE, _, time_weights_HK, position_weights_HP = tensors
        grad_THE = grad_THE.contiguous()
        delta_TH = sums_TH if out_THE is None else (out_THE.float() * grad_THE.float()).sum(-1)
        grads = [None if x is None else torch.empty_like(x) for x in (q_THD, k_TGD, v_TGE)]
        tables = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (time_weights_HK, position_weights_HP)]
        if grad_THE.numel():
            sequences = len(plan.offsets_B1) - 1
            given = (*_arguments(tensors, plan.offsets_B1, limits), sums_TH, delta_TH, grad_THE)
            if q_THD is not None:
                query_gradient_tiles[(plan.heads * sequences, blocks)](*given, grads[0], plan.scale or 0.0, **shapes)
            found = [sums_TH if x is None else x for x in (*grads[1:], *tables)]
            key_gradient_tiles[(v_TGE.shape[1] * sequences, blocks)](*given, *found, plan.scale or 0.0, **shapes)
        typed = [x if x is None else x.to(y.dtype) for x, y in zip(tables, (time_weights_HK, position_weights_HP), strict=True)]
        return (*grads, *typed, None)


def _arguments(tensors: list[Tensor | None], offsets_B1: Tensor, limits: Tensor) -> tuple[Tensor, ...]:
    """In the kernels' order; what is missing is never read, and the offsets stand in its place."""
    q_THD, k_TGD, v_TGE, times_T, time_weights_HK, position_weights_HP = (offsets_B1 if x is None else x for x in tensors)
    return q_THD, k_TGD, v_TGE, offsets_B1, times_T, limits, time_weights_HK, position_weights_HP


def _shapes(tensors: list[Tensor | None], limits: Tensor, plan: FusionPlan) -> dict[str, int | bool]:
    q_THD, _, v_TGE, _, time_weights_HK, position_weights_HP = tensors
    assert v_TGE is not None
    buckets, positions = (0 if x is None else x.shape[1] for x in (time_weights_HK, position_weights_HP))
    size, value_size = 1 if q_THD is None else q_THD.shape[2], v_TGE.shape[2]
    return {
        "heads": plan.heads,
        "share": plan.heads // v_TGE.shape[1],
        "size": size,
        "value_size": value_size,
        "buckets": buckets,
        "positions": positions,
        "num_bounds": max(0, min(buckets - 1, len(limits))),
        "form": FORMS[plan.form],
        "per_length": plan.scale is None,
        "block": _BLOCK,
        "block_d": max(16, triton.next_power_of_2(size)),
        "block_e": max(16, triton.next_power_of_2(value_size)),
    }
