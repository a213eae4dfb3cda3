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

from semantide.kernels import native
from semantide.kernels.attention import jagged_attention, packed_bounds
from semantide.kernels.dispatch import kernel

Spans = list[tuple[int, int]]  # [begin, end) of each sequence


@kernel
def prefix_attention(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> Tensor:
    """Causal attention whose queries are the last places of each sequence; a sequence that is new as a whole is one of its cases.

    Shapes: ``new_offsets_B1`` packs the queries and ``offsets_B1`` keys and values, both [B + 1]; returns [N, H, D].
    Raises: ValueError when shapes do not fit, or a sequence has more queries than keys.
    """
    new, whole, share = _check(q_NHD, new_offsets_B1, k_TGD, v_TGD, offsets_B1)
    outputs = [q_NHD[:0]]
    for (new_begin, new_end), (begin, end) in zip(new, whole, strict=True):
        q_GgnD = q_NHD[new_begin:new_end].unflatten(1, (-1, share)).permute(1, 2, 0, 3)
        k_G1tD, v_G1tD = (x[begin:end].permute(1, 0, 2).unsqueeze(1) for x in (k_TGD, v_TGD))
        scores_Ggnt = q_GgnD @ k_G1tD.transpose(-1, -2) / math.sqrt(q_NHD.shape[-1])
        scores_Ggnt = scores_Ggnt.masked_fill(~_visible(new_end - new_begin, end - begin, q_NHD.device), -math.inf)
        outputs.append((scores_Ggnt.softmax(-1) @ v_G1tD).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


@prefix_attention.register("cpu")
def prefix_attention_native(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> Tensor:
    """One pass over each sequence's keys in C++; other types than float32, and gradients, take the torch way."""
    tensors = (q_NHD, k_TGD, v_TGD)
    library = native.library_for(*tensors)
    if library is None:
        return prefix_attention_fused(q_NHD, new_offsets_B1, k_TGD, v_TGD, offsets_B1)
    sequences, _, share = _check(q_NHD, new_offsets_B1, k_TGD, v_TGD, offsets_B1)
    q_NHD, k_TGD, v_TGD = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    new_offsets_B1, offsets_B1 = new_offsets_B1.long().contiguous(), offsets_B1.long().contiguous()
    (_, heads, size), groups = q_NHD.shape, k_TGD.shape[1]
    out_NHD = q_NHD.new_empty(q_NHD.shape)
    arguments = native.PREFIX_ATTENTION.pack(
        *(len(sequences), heads, groups, share, size, q_NHD.data_ptr(), *q_NHD.stride()[:2], new_offsets_B1.data_ptr()),
        *(k_TGD.data_ptr(), v_TGD.data_ptr(), *k_TGD.stride()[:2], *v_TGD.stride()[:2]),
        *(offsets_B1.data_ptr(), out_NHD.data_ptr(), 1 / math.sqrt(size)),
    )
    native.call(library, "semantide_prefix_attention", arguments)
    return out_NHD


@prefix_attention.register("cuda")
def prefix_attention_fused(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> Tensor:
    """One fused attention per sequence; the heads that share keys are rows of one product, so keys are not repeated."""
    new, whole, share = _check(q_NHD, new_offsets_B1, k_TGD, v_TGD, offsets_B1)
    if new == whole:  # knowing that it is causal saves half the products
        return jagged_attention(q_NHD, k_TGD, v_TGD, offsets_B1)
    outputs = [q_NHD[:0]]
    for (new_begin, new_end), (begin, end) in zip(new, whole, strict=True):
        asked, seen = new_end - new_begin, end - begin
        k_1GtD, v_1GtD = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (k_TGD, v_TGD))
        q_1GmD = q_NHD[new_begin:new_end].unflatten(1, (-1, share)).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)
        mask_mt = _visible(asked, seen, q_NHD.device).repeat(share, 1) if asked > 1 else None
        o_1GmD = F.scaled_dot_product_attention(q_1GmD, k_1GtD, v_1GtD, attn_mask=mask_mt)
        outputs.append(o_1GmD[0].unflatten(1, (share, asked)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


def _visible(new: int, whole: int, device: torch.device) -> Tensor:
    """Which of ``whole`` places each of the ``new`` last ones may see: bool [n, t]."""
    return torch.ones(new, whole, dtype=torch.bool, device=device).tril(whole - new)


def _check(q_NHD: Tensor, new_offsets_B1: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor) -> tuple[Spans, Spans, int]:
    """Where each sequence's queries and keys lie, and query heads per key/value head."""
    new, whole = (list(pairwise(packed_bounds(offsets, len(x)))) for offsets, x in ((new_offsets_B1, q_NHD), (offsets_B1, k_TGD)))
    if q_NHD.shape[1] % k_TGD.shape[1] or k_TGD.shape != v_TGD.shape or q_NHD.shape[2] != k_TGD.shape[2]:
        raise ValueError(f"queries {tuple(q_NHD.shape)}, keys {tuple(k_TGD.shape)}, values {tuple(v_TGD.shape)}: give query heads a multiple of key heads")
    if len(new) != len(whole) or any(end - begin > last - first for (begin, end), (first, last) in zip(new, whole, strict=True)):
        raise ValueError(
            f"{len(new)} sequences of queries and {len(whole)} of keys: give for each sequence at most as many queries, its last places, as it has keys"
        )
    return new, whole, q_NHD.shape[1] // k_TGD.shape[1]
