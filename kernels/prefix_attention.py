"""Attention of the last few places of packed sequences over all places before them: what extending a cached prompt takes.

Legend: N new places of all sequences, T places of all sequences, B sequences, n new places and t places of one sequence, H query heads,
G key/value heads (H a multiple of G), g query heads per key/value head, D head size.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.dispatch import kernel


@kernel
def prefix_attention(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> Tensor:
    """Causal attention whose queries are the last places of each sequence; a sequence that is new as a whole is one of its cases.

    Shapes: ``new_offsets_B1`` packs the queries and ``offsets_B1`` keys and values, both [B + 1]; returns [N, H, D].
    Raises: ValueError when a sequence has more queries than keys.
    """
    outputs = [q_NHD[:0]]
    share = q_NHD.shape[1] // k_TGD.shape[1]
    for (new_begin, new_end), (begin, end) in zip(*_bounds(new_offsets_B1, offsets_B1), strict=True):
        q_GgnD = q_NHD[new_begin:new_end].unflatten(1, (-1, share)).permute(1, 2, 0, 3)
        k_G1tD, v_G1tD = (x[begin:end].permute(1, 0, 2).unsqueeze(1) for x in (k_TGD, v_TGD))
        scores_Ggnt = q_GgnD @ k_G1tD.transpose(-1, -2) / math.sqrt(q_NHD.shape[-1])
        scores_Ggnt = scores_Ggnt.masked_fill(~_visible(new_end - new_begin, end - begin, q_NHD.device), -math.inf)
        outputs.append((scores_Ggnt.softmax(-1) @ v_G1tD).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


@prefix_attention.register("cuda")
@prefix_attention.register("cpu")
def prefix_attention_fused(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> Tensor:
    """One fused attention per sequence; the heads that share keys are rows of one product, so keys are not repeated."""
    outputs = [q_NHD[:0]]
    share = q_NHD.shape[1] // k_TGD.shape[1]
    for (new_begin, new_end), (begin, end) in zip(*_bounds(new_offsets_B1, offsets_B1), strict=True):
        new, whole = new_end - new_begin, end - begin
        k_1GtD, v_1GtD = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (k_TGD, v_TGD))
        if new == whole:  # knowing that it is causal saves half the products
            q_1HnD = q_NHD[new_begin:new_end].transpose(0, 1).unsqueeze(0)
            if share > 1:
                k_1GtD, v_1GtD = k_1GtD.repeat_interleave(share, 1), v_1GtD.repeat_interleave(share, 1)
            outputs.append(F.scaled_dot_product_attention(q_1HnD, k_1GtD, v_1GtD, is_causal=True)[0].transpose(0, 1))
            continue
        q_1GmD = q_NHD[new_begin:new_end].unflatten(1, (-1, share)).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)
        mask_mt = _visible(new, whole, q_NHD.device).repeat(share, 1) if new > 1 else None
        o_1GmD = F.scaled_dot_product_attention(q_1GmD, k_1GtD, v_1GtD, attn_mask=mask_mt)
        outputs.append(o_1GmD[0].unflatten(1, (share, new)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


def _visible(new: int, whole: int, device: torch.device) -> Tensor:
    """Which of ``whole`` places each of the ``new`` last ones may see: bool [n, t]."""
    return torch.ones(new, whole, dtype=torch.bool, device=device).tril(whole - new)


def _bounds(new_offsets_B1: Tensor, offsets_B1: Tensor) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    new, whole = list(pairwise(new_offsets_B1.tolist())), list(pairwise(offsets_B1.tolist()))
    if len(new) != len(whole) or any(end - begin > last - first for (begin, end), (first, last) in zip(new, whole, strict=True)):
        raise ValueError(
            f"{len(new)} sequences of queries and {len(whole)} of keys: give for each sequence at most as many queries, its last places, as it has keys"
        )
    return new, whole
