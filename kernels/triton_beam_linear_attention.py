"""Linear attention of beams in Triton: a program takes some beams of one state, one head and some channels of its values.

The state's part is read once for the program's beams, whose ancestors are replayed from registers; records and output are all that is written. Beams of
equal depth are one launch, so nodes of a tree find their ancestors' records written.
Legend: as in beam_linear_attention.py; M beams of a program, D and E channels of keys and of its values, in powers of two.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from semantide.kernels.beam_linear_attention import BeamRecords

_BEAMS, _VALUES = 32, 64


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    states,
    order,
    bases,
    bounds,
    own_k,
    own_delta,
    own_decay,
    rows,
    out,
    steps,
    behind,
    delta_rule: tl.constexpr,
    each: tl.constexpr,
    heads: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    block_m: tl.constexpr,
    block_d: tl.constexpr,
    block_e: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    group = head // (heads // groups)
    d_D, e_E = tl.arange(0, block_d), tl.program_id(2) * block_e + tl.arange(0, block_e)
    in_keys, in_values = d_D < size, e_E < value_size
    place_M = tl.load(bounds + 2 * tile) + tl.arange(0, block_m)
    live_M = place_M < tl.load(bounds + 2 * tile + 1)
    beam_M = tl.load(order + place_M, mask=live_M, other=0)
    keys_MD, values_ME = live_M[:, None] & in_keys[None, :], live_M[:, None] & in_values[None, :]
    key_at_MD = (beam_M[:, None] * groups + group) * size + d_D[None, :]
    q_MD = tl.load(q + key_at_MD, mask=keys_MD, other=0.0).to(tl.float32)
    k_MD = tl.load(k + key_at_MD, mask=keys_MD, other=0.0).to(tl.float32)
    log_MD = tl.zeros((block_m, block_d), tl.float32)
    log_M = tl.zeros((block_m,), tl.float32)
    if each:
        log_MD = tl.load(g + (beam_M[:, None] * heads + head) * size + d_D[None, :], mask=keys_MD, other=0.0)
    else:
        log_M = tl.load(g + beam_M * heads + head, mask=live_M, other=0.0)
    g_MD, g_M = log_MD, log_M
    read_ME = tl.zeros((block_m, block_e), tl.float32)
    known_ME = tl.zeros((block_m, block_e), tl.float32)
    for back in range(1, behind + 1):
        row_M = tl.load(rows + beam_M * steps + steps - 1 - back, mask=live_M, other=0)
        past_MD = tl.load(own_k + (row_M[:, None] * groups + group) * size + d_D[None, :], mask=keys_MD, other=0.0).to(tl.float32)
        delta_ME = tl.load(own_delta + (row_M[:, None] * heads + head) * value_size + e_E[None, :], mask=values_ME, other=0.0).to(tl.float32)
        if each:
            past_MD = past_MD * tl.exp(log_MD)
            log_MD += tl.load(own_decay + (row_M[:, None] * heads + head) * size + d_D[None, :], mask=keys_MD, other=0.0)
        else:
            past_MD = past_MD * tl.exp(log_M)[:, None]
            log_M += tl.load(own_decay + row_M * heads + head, mask=live_M, other=0.0)
        read_ME += tl.sum(q_MD * past_MD, 1)[:, None] * delta_ME
        known_ME += tl.sum(k_MD * past_MD, 1)[:, None] * delta_ME
    fade_MD = tl.exp(log_MD) if each else tl.broadcast_to(tl.exp(log_M)[:, None], (block_m, block_d))
    state_at_DE = ((tl.load(bases + tile) * heads + head) * size + d_D[:, None]) * value_size + e_E[None, :]
    s_DE = tl.load(states + state_at_DE, mask=in_keys[:, None] & in_values[None, :], other=0.0)
    read_ME += tl.dot(q_MD * fade_MD, s_DE, input_precision="ieee")
    value_at_ME = (beam_M[:, None] * heads + head) * value_size + e_E[None, :]
    new_ME = tl.load(v + value_at_ME, mask=values_ME, other=0.0).to(tl.float32)
    if delta_rule:
        known_ME += tl.dot(k_MD * fade_MD, s_DE, input_precision="ieee")
        new_ME = tl.load(beta + beam_M * heads + head, mask=live_M, other=0.0)[:, None] * (new_ME - known_ME)
    tl.store(out + value_at_ME, (read_ME + tl.sum(q_MD * k_MD, 1)[:, None] * new_ME).to(out.dtype.element_ty), mask=values_ME)
    if own_delta.dtype.element_ty == tl.float16:  # what is too large for it becomes its largest
        k_MD = tl.minimum(tl.maximum(k_MD, -65504.0), 65504.0)
        new_ME = tl.minimum(tl.maximum(new_ME, -65504.0), 65504.0)
    own_M = tl.load(rows + beam_M * steps + steps - 1, mask=live_M, other=-1)
    live_M, keys_MD, values_ME = live_M & (own_M >= 0), keys_MD & (own_M[:, None] >= 0), values_ME & (own_M[:, None] >= 0)  # others are not recorded
    tl.store(own_delta + (own_M[:, None] * heads + head) * value_size + e_E[None, :], new_ME.to(own_delta.dtype.element_ty), mask=values_ME)
    if tl.program_id(2) == 0:
        if each:
            tl.store(own_decay + (own_M[:, None] * heads + head) * size + d_D[None, :], g_MD, mask=keys_MD)
        else:
            tl.store(own_decay + own_M * heads + head, g_M, mask=live_M)
        if head % (heads // groups) == 0:
            tl.store(own_k + (own_M[:, None] * groups + group) * size + d_D[None, :], k_MD.to(own_k.dtype.element_ty), mask=keys_MD)


def beam_linear_attention_triton(
    q_BGd: Tensor,
    k_BGd: Tensor,
    v_BHe: Tensor,
    g_BH1: Tensor,
    beta_BH: Tensor | None,
    states_MHde: Tensor,
    bases_B: Tensor,
    records: BeamRecords,
    rows_BS: Tensor,
) -> Tensor:
    """``beam_linear_attention`` on the device, of arguments that were checked; sums are in float32."""
    (_, groups, size), (heads, value_size), steps = k_BGd.shape, v_BHe.shape[1:], rows_BS.shape[1]
    out_BHe = torch.empty_like(v_BHe, memory_format=torch.contiguous_format)
    given: tuple[Any, ...] = tuple(x.contiguous() for x in (q_BGd, k_BGd, v_BHe, g_BH1, g_BH1 if beta_BH is None else beta_BH, states_MHde))
    rows_BS, depth_B = rows_BS.contiguous(), (rows_BS[:, :-1] >= 0).sum(1)
    for depth in depth_B.unique().tolist():
        chosen_n = (depth_B == depth).nonzero().squeeze(1)
        order_n = chosen_n[bases_B[chosen_n].argsort(stable=True)]
        states, counts = bases_B[order_n].unique_consecutive(return_counts=True)
        tiles = [
            (state, first, min(first + _BEAMS, end))
            for state, (begin, end) in zip(states.tolist(), pairwise([0, *accumulate(counts.tolist())]), strict=True)
            for first in range(begin, end, _BEAMS)
        ]
        table = torch.tensor(tiles, dtype=torch.long, device=rows_BS.device)
        block_e = min(_VALUES, max(16, triton.next_power_of_2(value_size)))
        _step[len(tiles), heads, triton.cdiv(value_size, block_e)](
            *given,
            order_n,
            table[:, 0].contiguous(),
            table[:, 1:].contiguous(),
            records.k_NGd,
            records.delta_NHe,
            records.decay_NH1,
            rows_BS,
            out_BHe,
            steps,
            depth,
            delta_rule=beta_BH is not None,
            each=g_BH1.shape[-1] > 1,
            heads=heads,
            groups=groups,
            size=size,
            value_size=value_size,
            block_m=_BEAMS,
            block_d=max(16, triton.next_power_of_2(size)),
            block_e=block_e,
        )
    return out_BHe
