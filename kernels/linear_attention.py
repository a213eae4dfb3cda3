"""Linear attention on packed (jagged) sequences: a state per head in the place of all earlier keys and values.

Each token lets the state fade, writes one outer product into it and reads it once:

    S_t = a_t S_{t-1} + k_t w_t^T,    o_t = S_t^T q_t,    a_t = e^{g_t}

``Rule`` says what is written and how it fades. Without ``delta`` it is the value itself, w_t = v_t: gated linear attention, and Mamba-2's state space. With it,
it is what the state does not know yet, w_t = beta_t (v_t - a_t S_{t-1}^T k_t): the gated delta rule. ``per_channel`` lets each row of the state fade by itself, as in
gated linear attention and KDA. Queries and keys come normalised and scaled as their model wants them.
In all of a chunk's forms only exponents that are not positive are taken, so strong decay cannot overflow; they are summed in float64, since a small difference of two
large sums would have few digits left.
Legend: T packed tokens, B sequences, H value heads, G key heads (H a multiple of G), d size of a key, e size of a value, N chunks, C tokens of a chunk.
Source: Yang et al., Gated Delta Networks (2412.06464); Dao and Gu, Transformers are SSMs (2405.21060); Kimi Linear (2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from semantide.kernels.attention import packed_bounds
from semantide.kernels.dispatch import kernel
from semantide.kernels.linear_walk import NATIVE, Walked, walk
from semantide.kernels.native_jagged_fusion import native_library

LOWEST = -1e4  # of a token's logarithm of decay: its exponential is zero in every type, and sums of it stay numbers


@dataclass(frozen=True)
class Rule:
    """What a token writes into the state, and how the state fades."""

    delta: bool
    """Whether a token writes what the state does not know of its value yet, or all of its value."""
    per_channel: bool
    """Whether each channel of a key has a decay of its own, or each head one."""


@kernel
def linear_attention(
    q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, offsets_B1: Tensor, state_BHde: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """What each token reads of the state, and the state after each sequence; a sequence begins with its row of ``state_BHde``, or with nothing.

    Shapes: ``g`` logarithms of decay, [T, H], or [T, H, d] per channel, none above 0; ``beta_TH`` with ``rule.delta`` only; returns [T, H, e] in the type of the
    values, and [B, H, d, e] in float32 or float64.
    Raises: ValueError when shapes do not fit or a decay is above 1.
    """
    share = _check(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule)
    wide = _wide(v_THe.dtype)
    q_THd, k_THd = (x.to(wide).repeat_interleave(share, 1) for x in (q_TGd, k_TGd))
    v, decay = v_THe.to(wide), g.to(wide).exp()
    decay_THd1 = decay[..., None] if rule.per_channel else decay[..., None, None]
    outputs, states = [v[:0]], [v.new_zeros(0, v.shape[1], k_THd.shape[2], v.shape[2])]
    for sequence, (begin, end) in enumerate(pairwise(packed_bounds(offsets_B1, len(v)))):
        state_Hde = v.new_zeros(states[0].shape[1:]) if state_BHde is None else state_BHde[sequence].to(wide)
        for t in range(begin, end):
            state_Hde = decay_THd1[t] * state_Hde
            write_He = v[t]
            if beta_TH is not None:
                write_He = beta_TH[t].to(wide)[:, None] * (write_He - torch.einsum("hde,hd->he", state_Hde, k_THd[t]))
            state_Hde = state_Hde + k_THd[t][:, :, None] * write_He[:, None, :]
            outputs.append(torch.einsum("hde,hd->he", state_Hde, q_THd[t])[None])
        states.append(state_Hde[None])
    return torch.cat(outputs).to(v_THe.dtype), torch.cat(states)


@linear_attention.register("cpu")
@linear_attention.register("cuda")
@linear_attention.register("npu")
def linear_attention_chunked(
    q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, offsets_B1: Tensor, state_BHde: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Chunk after chunk, forward and backward, whatever the lengths: see ``linear_chunks``."""
    found = linear_chunks(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule, False)
    return found.out_THe, found.end_BHde


def linear_chunks(
    q_TGd: Tensor,
    k_TGd: Tensor,
    v_THe: Tensor,
    g: Tensor,
    beta_TH: Tensor | None,
    offsets_B1: Tensor,
    state_BHde: Tensor | None,
    rule: Rule,
    chunks: bool = True,
) -> Walked:
    """Linear attention with, where asked for, what sequences leave behind on their way: the states that chunks begin with and what tokens write.

    On a CPU float32 is walked in C++; on other devices a Triton program walks for each sequence, head and some channels of its values. Other types, and machines
    without either, take the torch way.
    """
    _check(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule)
    packed_bounds(offsets_B1, len(v_THe))
    if v_THe.device.type == "cpu":
        walker = NATIVE if native_library(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde) is not None else None
    elif find_spec("triton") is None or v_THe.dtype == torch.float64:
        walker = None
    else:
        from semantide.kernels.triton_linear_attention import TRITON

        walker = TRITON
    if walker is None:
        with torch.autocast(v_THe.device.type, enabled=False):
            return _by_chunks(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule)
    return walk(q_TGd, k_TGd, v_THe, g, beta_TH, state_BHde, offsets_B1, walker, chunks)


def linear_attention_by_chunks(
    q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, offsets_B1: Tensor, state_BHde: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """The torch way, of all types: what Triton and C++ are compared with."""
    found = _by_chunks(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule)
    return found.out_THe, found.end_BHde


def _by_chunks(
    q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, offsets_B1: Tensor, state_BHde: Tensor | None, rule: Rule
) -> Walked:
    """Chunks of tokens at once: inside a chunk matrix products and one triangular system, from chunk to chunk the state.

    Chunks that do not need one another are one batch: what is inside of all of them, and then the first of each sequence, the second of each, and so on.
    """
    share = _check(q_TGd, k_TGd, v_THe, g, beta_TH, offsets_B1, state_BHde, rule)
    wide, device = _wide(v_THe.dtype), v_THe.device
    heads, key_size, value_size = v_THe.shape[1], k_TGd.shape[2], v_THe.shape[2]
    run = 16 if rule.per_channel else 64
    plan = _plan(packed_bounds(offsets_B1, len(v_THe)), run)
    state_BHde = v_THe.new_zeros(len(offsets_B1) - 1, heads, key_size, value_size, dtype=wide) if state_BHde is None else state_BHde.to(wide)
    if not plan.widths:
        return Walked(v_THe, state_BHde, state_BHde[:0], None if beta_TH is None else v_THe.to(wide), run)
    rows_NC, places_T, order_B = plan.rows_NC.to(device), plan.places_T.to(device), plan.order_B.to(device)

    def chunked(x: Tensor) -> Tensor:
        """[T, heads, ...] -> [N, heads, C, ...], with zeros behind the last token of a sequence."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows_NC].transpose(1, 2)

    q, k = (chunked(x.to(wide)).repeat_interleave(share, 1) for x in (q_TGd, k_TGd))
    v = chunked(v_THe.to(wide))
    sums = chunked(g.double().clamp(min=LOWEST)).cumsum(2)
    if not rule.per_channel:
        sums = sums.unsqueeze(-1)
    fade, rest, last = sums.exp().to(wide), (sums[:, :, -1:] - sums).exp().to(wide), sums[:, :, -1].exp().to(wide).unsqueeze(-1)
    future = torch.ones(rows_NC.shape[1], rows_NC.shape[1], dtype=torch.bool, device=device).triu(1)
    if rule.per_channel:
        between = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(future[:, :, None], -torch.inf).exp().to(wide)
        reads, known = (torch.einsum("nhid,nhjd,nhijd->nhij", x, k, between) for x in (q, k))
    else:
        between = (sums - sums.transpose(-1, -2)).masked_fill(future, -torch.inf).exp().to(wide)
        reads, known = (x @ k.transpose(-1, -2) * between for x in (q, k))
    from_state, to_state = q * fade, (k * rest).transpose(-1, -2)
    erased = None
    if beta_TH is not None:
        beta = chunked(beta_TH.to(wide)).unsqueeze(-1)
        solved = torch.linalg.solve_triangular(beta * known, beta * torch.cat([v, k * fade], -1), upper=False, unitriangular=True)
        v, erased = solved.split([value_size, key_size], -1)
    state = state_BHde[order_B]
    outputs, ended, started, written, begin = [], [], [], [], 0
    for width in plan.widths:
        ended.append(state[width:])
        state, now = state[:width], slice(begin, begin + width)
        write = v[now] if erased is None else v[now] - erased[now] @ state
        started.append(state)
        written.append(write)
        outputs.append(from_state[now] @ state + reads[now] @ write)
        state = last[now] * state + to_state[now] @ write
        begin += width
    ended.append(state)
    states = torch.cat(ended[::-1])[order_B.argsort()]

    def packed(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).transpose(1, 2).flatten(0, 1)[places_T]

    starts_NHde = torch.cat(started)[plan.chunks_N.to(device)]
    return Walked(packed(outputs).to(v_THe.dtype), states, starts_NHde, None if beta_TH is None else packed(written), run)


class _Plan(NamedTuple):
    """Tokens of each chunk (the number of tokens where there is none), first chunks of all sequences first; how many sequences have a first, second, ... chunk.

    ``places_T`` is where each token went, ``order_B`` the sequences from the longest to the shortest, ``chunks_N`` where the chunks of sequence after sequence went.
    """

    rows_NC: Tensor
    places_T: Tensor
    order_B: Tensor
    chunks_N: Tensor
    widths: tuple[int, ...]


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _plan(bounds: tuple[int, ...], size: int) -> _Plan:
    lengths_B = torch.tensor(bounds).diff()
    order_B = lengths_B.argsort(descending=True, stable=True)
    lengths, begins = lengths_B[order_B], torch.tensor(bounds[:-1], dtype=torch.long)[order_B]
    parts, widths = [], []
    for first in range(0, int(lengths.max()) if len(lengths) else 0, size):
        width = int((lengths > first).sum())
        places_WC = first + torch.arange(size).expand(width, -1)
        parts.append(torch.where(places_WC < lengths[:width, None], begins[:width, None] + places_WC, bounds[-1]))
        widths.append(width)
    rows_NC = torch.cat(parts) if parts else torch.zeros(0, size, dtype=torch.long)
    places_T = torch.empty(bounds[-1] + 1, dtype=torch.long)
    places_T[rows_NC.flatten()] = torch.arange(rows_NC.numel())
    ranks = torch.cat([torch.arange(width) for width in widths]) if widths else order_B[:0]
    steps = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths, dtype=torch.long))
    chunks_N = (order_B[ranks] * max(len(widths), 1) + steps).argsort()
    return _Plan(rows_NC, places_T[:-1], order_B, chunks_N, tuple(widths))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: no shorter than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, offsets_B1: Tensor, state_BHde: Tensor | None, rule: Rule) -> int:
    """Value heads per key head."""
    packed = q_TGd.ndim == v_THe.ndim == 3 and q_TGd.shape == k_TGd.shape and len(q_TGd) == len(v_THe)
    if not packed or q_TGd.shape[1] < 1 or v_THe.shape[1] % q_TGd.shape[1]:
        raise ValueError(
            f"queries {tuple(q_TGd.shape)}, keys {tuple(k_TGd.shape)}, values {tuple(v_THe.shape)}: give [rows, heads, size], queries and keys of equal shape, "
            "and value heads a multiple of key heads"
        )
    (tokens, heads, value_size), key_size = v_THe.shape, k_TGd.shape[2]
    fading = (tokens, heads, key_size) if rule.per_channel else (tokens, heads)
    if g.shape != fading or (beta_TH is not None) != rule.delta or (beta_TH is not None and beta_TH.shape != (tokens, heads)):
        shares = "none" if beta_TH is None else str(tuple(beta_TH.shape))
        raise ValueError(
            f"decays {tuple(g.shape)} and shares of writing {shares} for {rule}: give decays {fading}, and shares {(tokens, heads)} with delta only"
        )
    if state_BHde is not None and state_BHde.shape != (len(offsets_B1) - 1, heads, key_size, value_size):
        raise ValueError(f"states {tuple(state_BHde.shape)}: give {(len(offsets_B1) - 1, heads, key_size, value_size)}, one for each sequence and head")
    if g.device.type == "cpu" and bool((g > 0).any()):
        raise ValueError(f"a logarithm of decay is {float(g.detach().max())}: a state may fade or stay, so give none above 0")
    return v_THe.shape[1] // q_TGd.shape[1]
