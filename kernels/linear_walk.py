"""Linear attention as a walk over the chunks of each sequence, with its own backward pass, which keeps the states that chunks began with and makes the rest again.

Who walks is one function per kind of device: the C++ here, Triton in ``triton_linear_attention.py``.
Legend: as in linear_attention.py; N chunks of all sequences, R parts whose gradients of queries and keys are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native


class Given(NamedTuple):
    """What a walk reads; ``g`` per channel has three dimensions, ``chunks_B1`` is the first chunk of each sequence, ``run`` the tokens of a chunk."""

    q_TGd: Tensor
    k_TGd: Tensor
    v_THe: Tensor
    g: Tensor
    beta_TH: Tensor | None
    state_BHde: Tensor | None
    offsets_B1: Tensor
    chunks_B1: Tensor
    run: int


class Kept(NamedTuple):
    """What the way forward writes: results, states at the end, and for the way back those that chunks began with, and what the state did not know of each value."""

    out_THe: Tensor
    end_BHde: Tensor
    starts_NHde: Tensor | None
    unknown_THe: Tensor | None


class Gradients(NamedTuple):
    """Of the results, the last states, the states that chunks began with and what was written (each of the three None where it is zero), which are read, and of all
    that was given, which are written: all but those of values and states in parts."""

    out_THe: Tensor
    end_BHde: Tensor | None
    starts_NHde: Tensor | None
    written_THe: Tensor | None
    q_RTHd: Tensor
    k_RTHd: Tensor
    v_THe: Tensor
    g_RTH: Tensor
    beta_RTH: Tensor | None
    state_BHde: Tensor


class Walker(NamedTuple):
    """Who walks: tokens of a chunk and parts of the gradients, both for sizes of keys and values and whether decay is per channel, and the walk itself."""

    run: Callable[[int, bool], int]
    parts: Callable[[int, int], int]
    walk: Callable[[Given, Kept, Gradients | None], None]


class Walked(NamedTuple):
    """What a walk gives: results in the type of the values, and in float32 the last states; where asked for, also states that chunks began with and what tokens wrote.

    Sequence after sequence has its chunks, of ``run`` tokens each but its last. Where a token writes its value, nothing is said of it.
    """

    out_THe: Tensor
    end_BHde: Tensor
    starts_NHde: Tensor | None
    written_THe: Tensor | None
    run: int


def walk(
    q_TGd: Tensor,
    k_TGd: Tensor,
    v_THe: Tensor,
    g: Tensor,
    beta_TH: Tensor | None,
    state_BHde: Tensor | None,
    offsets_B1: Tensor,
    walker: Walker,
    chunks: bool = False,
) -> Walked:
    """What was checked before; ``chunks`` asks for what branches go on from."""
    run = walker.run(q_TGd.shape[2], g.ndim == 3)
    out_THe, end_BHde, starts_NHde, written_THe = _Walk.apply(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, walker, run, chunks)
    return Walked(out_THe, end_BHde, starts_NHde, written_THe, run)


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TGd: Tensor,
        k_TGd: Tensor,
        v_THe: Tensor,
        g: Tensor,
        beta_TH: Tensor | None,
        state_BHde: Tensor | None,
        offsets_B1: Tensor,
        walker: Walker,
        run: int,
        chunks: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        q_TGd, k_TGd, v_THe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TGd, k_TGd, v_THe))
        g, (beta_TH, state_BHde) = g.contiguous(), (x if x is None else x.contiguous() for x in (beta_TH, state_BHde))
        offsets_B1 = offsets_B1.long().contiguous()
        chunks_B1 = torch.zeros_like(offsets_B1)
        chunks_B1[1:] = ((offsets_B1.diff() + run - 1) // run).cumsum(0)
        state = (v_THe.shape[1], q_TGd.shape[2], v_THe.shape[2])
        starts_NHde = unknown_THe = None
        if chunks or any(ctx.needs_input_grad):
            starts_NHde = v_THe.new_empty(int(chunks_B1[-1]), *state, dtype=torch.float32)
            unknown_THe = None if beta_TH is None else v_THe.new_empty(v_THe.shape, dtype=torch.float32)
        kept = Kept(v_THe.new_empty(v_THe.shape), v_THe.new_empty(len(offsets_B1) - 1, *state, dtype=torch.float32), starts_NHde, unknown_THe)
        walker.walk(Given(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1, run), kept, None)
        ctx.save_for_backward(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1, *kept[1:])
        ctx.walker, ctx.run = walker, run
        if not chunks:
            return kept.out_THe, kept.end_BHde, None, None
        written_THe = None if kept.unknown_THe is None or beta_TH is None else kept.unknown_THe * beta_TH.unsqueeze(-1)
        return *kept[:3], written_THe

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_THe: Tensor | None, grad_end: Tensor | None, grad_starts: Tensor | None, grad_written: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1, *kept = ctx.saved_tensors
        given = Given(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, chunks_B1, ctx.run)
        (tokens, heads, value_size), (groups, size) = v_THe.shape, q_TGd.shape[1:]
        parts = ctx.walker.parts(size, value_size)
        grad_THe = torch.zeros_like(v_THe, memory_format=torch.contiguous_format) if grad_THe is None else grad_THe.contiguous()
        grads = Gradients(
            grad_THe,
            None if grad_end is None else grad_end.contiguous(),
            None if grad_starts is None else grad_starts.contiguous(),
            None if grad_written is None else grad_written.contiguous(),
            v_THe.new_empty(parts, tokens, heads, size, dtype=torch.float32),
            v_THe.new_empty(parts, tokens, heads, size, dtype=torch.float32),
            torch.empty_like(v_THe, memory_format=torch.contiguous_format),
            g.new_empty(parts, *g.shape, dtype=torch.float32),
            None if beta_TH is None else g.new_empty(parts, tokens, heads, dtype=torch.float32),
            torch.empty_like(kept[0]),
        )
        ctx.walker.walk(given, Kept(grad_THe, *kept), grads)
        q, k = (_whole(x) for x in (grads.q_RTHd, grads.k_RTHd))
        if groups != heads:
            q, k = (x.view(tokens, groups, heads // groups, size).sum(2) for x in (q, k))
        grad_beta = None if grads.beta_RTH is None else _whole(grads.beta_RTH).to(beta_TH.dtype)
        grad_state = None if state_BHde is None else grads.state_BHde.to(state_BHde.dtype)
        return q.to(q_TGd.dtype), k.to(k_TGd.dtype), grads.v_THe, _whole(grads.g_RTH).to(g.dtype), grad_beta, grad_state, None, None, None, None


def _whole(parts_R: Tensor) -> Tensor:
    """The sum of all parts; of a single one it would be a copy."""
    return parts_R[0] if len(parts_R) == 1 else parts_R.sum(0)


def _walk_native(given: Given, kept: Kept, gradients: Gradients | None) -> None:
    library = native.library()
    assert library is not None, "asked for before"
    heads, (groups, size), value_size = given.v_THe.shape[1], given.q_TGd.shape[1:], given.v_THe.shape[2]
    arguments = native.LINEAR_ATTENTION.pack(
        *(len(given.offsets_B1) - 1, heads, heads // groups, size, value_size, given.g.ndim == 3, given.run),
        *(entry for x in given[:3] for entry in (x.data_ptr(), *x.stride()[:2])),
        *map(_at, given[3:8]),
        *map(_at, kept),
        *map(_at, gradients or (None,) * 10),
    )
    native.call(library, "semantide_linear_attention", arguments)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# Up to keys of 32 what is inside of a chunk costs as much as its state does, so chunks are short.
NATIVE = Walker(lambda size, per_channel: 32 if size <= 32 else 64, lambda size, value_size: 1, _walk_native)
