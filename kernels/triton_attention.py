"""Attention of beams over their prompt in Triton: one launch for all requests, whatever the lengths of their prompts.

A program takes a tile of one request's rows: its beams times the query heads that share a key head. It runs over the prompt in blocks, then over the rows'
own tokens, with a running maximum and sum, so the prompt is read once per tile and nothing of its size is written.
Legend: as in attention.py; M rows of a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    prompt_k,
    prompt_v,
    offsets,
    own_k,
    own_v,
    ancestors,
    out,
    width,
    steps,
    scale,
    heads: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
):
    share: tl.constexpr = heads // groups
    request, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    features, keys = tl.arange(0, block_d), tl.arange(0, block_t)
    beams, in_rows, in_size = rows // share, rows < width * share, features < size
    places = ((request * width + beams) * heads + group * share + rows % share)[:, None] * size + features[None, :]
    inside = in_rows[:, None] & in_size[None, :]
    q_MD = tl.load(q + places, mask=inside, other=0.0)
    top_M = tl.full((block_m,), float("-inf"), tl.float32)
    sum_M = tl.zeros((block_m,), tl.float32)
    o_MD = tl.zeros((block_m, block_d), tl.float32)
    begin, end = tl.load(offsets + request), tl.load(offsets + request + 1)
    for first in range(begin, end, block_t):
        tokens = first + keys
        in_prompt = tokens < end
        at_TD = (tokens[:, None] * groups + group) * size + features[None, :]
        mask_TD = in_prompt[:, None] & in_size[None, :]
        k_TD = tl.load(prompt_k + at_TD, mask=mask_TD, other=0.0)
        v_TD = tl.load(prompt_v + at_TD, mask=mask_TD, other=0.0)
        scores_MT = tl.dot(q_MD, tl.trans(k_TD), input_precision="ieee") * scale
        scores_MT = tl.where(in_prompt[None, :], scores_MT, float("-inf"))
        higher_M = tl.maximum(top_M, tl.max(scores_MT, 1))
        p_MT = tl.exp(scores_MT - higher_M[:, None])
        shrink_M = tl.exp(top_M - higher_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MT, 1)
        o_MD = o_MD * shrink_M[:, None] + tl.dot(p_MT.to(v_TD.dtype), v_TD, input_precision="ieee")
        top_M = higher_M
    for step in range(0, steps):
        own_M = tl.load(ancestors + (request * width + beams) * steps + step, mask=in_rows, other=0)
        at_MD = (own_M[:, None] * groups + group) * size + features[None, :]
        k_MD = tl.load(own_k + at_MD, mask=inside, other=0.0)
        v_MD = tl.load(own_v + at_MD, mask=inside, other=0.0)
        score_M = tl.sum(q_MD.to(tl.float32) * k_MD.to(tl.float32), 1) * scale
        higher_M = tl.maximum(top_M, score_M)
        p_M = tl.exp(score_M - higher_M)
        shrink_M = tl.exp(top_M - higher_M)
        sum_M = sum_M * shrink_M + p_M
        o_MD = o_MD * shrink_M[:, None] + p_M[:, None] * v_MD.to(tl.float32)
        top_M = higher_M
    o_MD = o_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    tl.store(out + places, o_MD.to(out.dtype.element_ty), mask=inside)


def beam_attention_triton(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> Tensor:
    """``attention.beam_attention`` on the device; sums are in float32 whatever the type of the keys."""
    (requests, width, heads, size), groups, steps = q_RWHD.shape, prompt_k_TGD.shape[1], ancestors_RWS.shape[-1]
    out_RWHD = torch.empty_like(q_RWHD, memory_format=torch.contiguous_format)
    if not out_RWHD.numel():
        return out_RWHD
    rows = width * (heads // groups)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(rows, block_m), requests * groups)
    tensors: tuple[Any, ...] = (q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    _attend[grid](
        *(x.contiguous() for x in tensors),
        out_RWHD,
        width,
        steps,
        1 / math.sqrt(size),
        heads=heads,
        groups=groups,
        size=size,
        block_m=block_m,
        block_t=64,
        block_d=max(16, triton.next_power_of_2(size)),
    )
    return out_RWHD
