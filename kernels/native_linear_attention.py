"""Linear attention in C++ with its own backward pass, which keeps the states that chunks began with and makes the rest again.

Legend: as in linear_attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native

_SMALL = 32  # size of a key up to which chunks are short: what is inside of them then costs as much as their states do


def walk(
    q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, state_BHde: Tensor | None, offsets_B1: Tensor
) -> tuple[Tensor, Tensor]:
    """What was checked before, in float32 in this machine's memory; decays per channel have three dimensions."""
    found: tuple[Tensor, Tensor] = _Walk.apply(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1)
    return found


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, state_BHde: Tensor | None, offsets_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        q_TGd, k_TGd, v_THe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TGd, k_TGd, v_THe))
        g, beta_TH, state_BHde = (x if x is None else x.contiguous() for x in (g, beta_TH, state_BHde))
        offsets_B1 = offsets_B1.long().contiguous()
        run = 32 if q_TGd.shape[2] <= _SMALL else 64
        chunks_B1 = torch.zeros_like(offsets_B1)
        chunks_B1[1:] = ((offsets_B1.diff() + run - 1) // run).cumsum(0)
        heads, sizes = v_THe.shape[1], (q_TGd.shape[2], v_THe.shape[2])
        wanted = any(ctx.needs_input_grad)
        out_THe, end_BHde = v_THe.new_empty(v_THe.shape), v_THe.new_empty(len(offsets_B1) - 1, heads, *sizes)
        starts_NHde = v_THe.new_empty(int(chunks_B1[-1]) if wanted else 0, heads, *sizes)
        unknown_THe = v_THe.new_empty(v_THe.shape if wanted and beta_TH is not None else (0,))
        given = (q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1)
        _run(given, run, (out_THe, end_BHde, starts_NHde if wanted else None, unknown_THe if wanted else None))
        ctx.save_for_backward(*given, end_BHde, starts_NHde, unknown_THe)
        ctx.run = run
        return out_THe, end_BHde

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THe: Tensor | None, grad_BHde: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, end_BHde, starts_NHde, unknown_THe = ctx.saved_tensors
        q_TGd, _, v_THe, g, beta_TH, state_BHde = given[:6]
        (tokens, heads, _), (groups, size) = v_THe.shape, q_TGd.shape[1:]
        grad_THe = v_THe.new_zeros(v_THe.shape) if grad_THe is None else grad_THe.contiguous()
        grad_BHde = grad_BHde if grad_BHde is None else grad_BHde.contiguous()
        grad_q, grad_k = (v_THe.new_empty(tokens, heads, size) for _ in range(2))
        grad_v, grad_g, grad_state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (v_THe, g, end_BHde))
        grad_beta = None if beta_TH is None else torch.empty_like(beta_TH)
        _run(given, ctx.run, (None, end_BHde, starts_NHde, unknown_THe), (grad_THe, grad_BHde, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state))
        if groups != heads:
            grad_q, grad_k = (x.view(tokens, groups, heads // groups, size).sum(2) for x in (grad_q, grad_k))
        return grad_q, grad_k, grad_v, grad_g, grad_beta, None if state_BHde is None else grad_state, None


def _run(given: Sequence[Tensor | None], run: int, kept: Sequence[Tensor | None], gradients: Sequence[Tensor | None] = (None,) * 8) -> None:
    q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1 = given
    library = native.library()
    assert library is not None and q_TGd is not None and k_TGd is not None and v_THe is not None and g is not None and offsets_B1 is not None
    heads, (groups, size) = v_THe.shape[1], q_TGd.shape[1:]
    arguments = native.LINEAR_ATTENTION.pack(
        *(len(offsets_B1) - 1, heads, heads // groups, size, v_THe.shape[2], g.ndim == 3, run),
        *(entry for x in (q_TGd, k_TGd, v_THe) for entry in (x.data_ptr(), *x.stride()[:2])),
        *map(_at, (g, beta_TH, state_BHde, offsets_B1, chunks_B1)),
        *map(_at, kept),
        *map(_at, gradients),
    )
    native.call(library, "semantide_linear_attention", arguments)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
