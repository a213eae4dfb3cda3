"""Attention of blocks of targets: each place sees the beginning of one prompt, and of its own block what comes before it.

Blocks do not see one another, so any number of them share a pass over their prompt and each comes out as if it alone had followed it.
Legend: T places of all prompts, S places of all blocks, C blocks, H query heads, G key/value heads (H a multiple of G), D head size, P prompts of a group,
s places of a prompt's blocks, t places of a prompt that any block sees, n places of one block, m places that it sees of its prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.attention import packed_bounds
from semantide.kernels.dispatch import kernel

_PADDING = 1.25
_SCORES = 1 << 23


@dataclass(frozen=True)
class TargetSpans:
    """Where blocks lie and what each sees: block c is rows [offsets_C1[c], offsets_C1[c + 1]) and sees the rows [begins_C[c], ends_C[c]) of the prompts.

    Shapes: ``offsets_C1`` [C + 1], int64, first 0; ``begins_C``, ``ends_C`` [C], int64. Blocks of one prompt begin alike and lie together.
    """

    offsets_C1: Tensor
    begins_C: Tensor
    ends_C: Tensor

    def __post_init__(self) -> None:
        shapes = tuple(self.begins_C.shape), tuple(self.ends_C.shape)
        if shapes != ((len(self.offsets_C1) - 1,),) * 2:
            raise ValueError(f"{len(self.offsets_C1)} offsets for spans of shapes {shapes}: give a beginning and an end of each block, and one more offset")

    @cached_property
    def groups(self) -> list[_Group]:
        """Blocks of prompts of similar size, for batched products: made once, whatever the number of layers."""
        return _groups(self)


@kernel
def target_attention(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, spans: TargetSpans) -> Tensor:
    """Softmax attention of each place over what its block sees of the prompts and over the block's own places up to itself.

    Shapes: returns [S, H, D].
    Raises: ValueError when shapes do not fit.
    """
    share = _check(q_SHD, k_SGD, v_SGD, prompt_k_TGD, prompt_v_TGD, spans)
    outputs = [q_SHD[:0]]
    for (first, last), begin, end in zip(pairwise(spans.offsets_C1.tolist()), spans.begins_C.tolist(), spans.ends_C.tolist(), strict=True):
        k_GD, v_GD = (torch.cat([prompt[begin:end], own[first:last]]) for prompt, own in ((prompt_k_TGD, k_SGD), (prompt_v_TGD, v_SGD)))
        q_GgnD = q_SHD[first:last].unflatten(1, (-1, share)).permute(1, 2, 0, 3)
        scores = q_GgnD @ k_GD.permute(1, 2, 0).unsqueeze(1) / math.sqrt(q_SHD.shape[-1])
        own = torch.ones(last - first, last - first + end - begin, dtype=torch.bool, device=q_SHD.device).tril(end - begin)
        weights = scores.masked_fill(~own, -math.inf).softmax(-1)
        outputs.append((weights @ v_GD.permute(1, 0, 2).unsqueeze(1)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


@target_attention.register("cpu")
@target_attention.register("cuda")
@target_attention.register("npu")
def target_attention_batched(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, spans: TargetSpans) -> Tensor:
    """All blocks of a prompt as the rows of one masked attention, prompts of similar size together."""
    share = _check(q_SHD, k_SGD, v_SGD, prompt_k_TGD, prompt_v_TGD, spans)
    if not len(q_SHD):
        return q_SHD
    k_NGD, v_NGD = torch.cat([prompt_k_TGD, k_SGD]), torch.cat([prompt_v_TGD, v_SGD])
    outputs = []
    for group in spans.groups:
        q_PHsD = q_SHD[group.queries_Ps].transpose(1, 2)
        keys_Pk = torch.where(group.own_Pk, group.keys_Pk + len(prompt_k_TGD), group.keys_Pk)
        k_PHkD, v_PHkD = (x[keys_Pk].transpose(1, 2) for x in (k_NGD, v_NGD))
        if share > 1:
            k_PHkD, v_PHkD = k_PHkD.repeat_interleave(share, 1), v_PHkD.repeat_interleave(share, 1)
        o_PHsD = F.scaled_dot_product_attention(q_PHsD, k_PHkD, v_PHkD, attn_mask=group.mask_Psk.unsqueeze(1))
        outputs.append(o_PHsD.transpose(1, 2)[group.real_Ps])
    rows_S = torch.cat([group.queries_Ps[group.real_Ps] for group in spans.groups])
    return torch.cat(outputs)[rows_S.argsort()]


@dataclass(frozen=True)
class _Group:
    """Some prompts' blocks, padded to rectangles; padded rows see everything and are left out of the result.

    Shapes: ``queries_Ps``, ``real_Ps`` [P, s]; ``keys_Pk``, ``own_Pk`` [P, t + s], rows of the prompts or of the blocks; ``mask_Psk`` [P, s, t + s].
    """

    queries_Ps: Tensor
    real_Ps: Tensor
    keys_Pk: Tensor
    own_Pk: Tensor
    mask_Psk: Tensor


def _groups(spans: TargetSpans) -> list[_Group]:
    device = spans.offsets_C1.device
    offsets_C1, begins_C, ends_C = spans.offsets_C1.cpu(), spans.begins_C.cpu(), spans.ends_C.cpu()
    many_C = offsets_C1.diff()
    filled = many_C > 0
    firsts_C, many_C, begins_C, ends_C = offsets_C1[:-1][filled], many_C[filled], begins_C[filled], ends_C[filled]
    begins_P, blocks_P = torch.unique_consecutive(begins_C, return_counts=True)
    prompt_C = torch.arange(len(begins_P)).repeat_interleave(blocks_P)
    rows_P = torch.zeros_like(begins_P).index_add_(0, prompt_C, many_C)
    firsts_P = firsts_C[blocks_P.cumsum(0) - blocks_P]
    seen_P = torch.zeros_like(begins_P).scatter_reduce_(0, prompt_C, ends_C - begins_C, "amax")
    # Of each row: the block's first row within its prompt's, and how much of the prompt it sees.
    block_S = torch.arange(len(many_C)).repeat_interleave(many_C)
    start_S = (firsts_C - firsts_P[prompt_C])[block_S]
    visible_S = (ends_C - begins_C)[block_S]
    place_of = torch.cat([torch.zeros(1, dtype=torch.int64), rows_P.cumsum(0)])  # where each prompt's rows lie in the two above
    groups = []
    for prompts in _alike(rows_P.tolist(), seen_P.tolist()):
        chosen_P = torch.tensor(prompts)
        rows, seen = rows_P[chosen_P, None], seen_P[chosen_P, None]
        s, t = int(rows.max()), int(seen.max())
        place_s, place_t = torch.arange(s), torch.arange(t)
        real_Ps = place_s < rows
        queries_Ps = torch.where(real_Ps, firsts_P[chosen_P, None] + place_s, firsts_P[chosen_P, None])
        within_Ps = torch.where(real_Ps, place_of[chosen_P, None] + place_s, place_of[chosen_P, None])
        prompt_Psk = place_t < visible_S[within_Ps].unsqueeze(-1)
        own_Psk = (place_s <= place_s.unsqueeze(-1)) & (place_s >= start_S[within_Ps].unsqueeze(-1))
        mask_Psk = torch.cat([prompt_Psk, own_Psk], -1) | ~real_Ps.unsqueeze(-1)
        keys_Pt = torch.where(place_t < seen, begins_P[chosen_P, None] + place_t, 0)
        own_Pk = torch.cat([torch.zeros_like(keys_Pt), torch.ones_like(queries_Ps)], 1).bool()
        groups.append(_Group(*(x.to(device) for x in (queries_Ps, real_Ps, torch.cat([keys_Pt, queries_Ps], 1), own_Pk, mask_Psk))))
    return groups


def _alike(rows: list[int], seen: list[int]) -> list[list[int]]:
    """Prompts whose rectangles are of similar size, and not too many at a time."""
    groups: list[list[int]] = []
    least = most_rows = most_seen = 0
    for prompt in sorted(range(len(rows)), key=lambda p: (seen[p] + rows[p], rows[p])):
        size = seen[prompt] + rows[prompt]
        wide, deep = max(most_rows, rows[prompt]), max(most_seen, seen[prompt])
        if not groups or size > _PADDING * least + 16 or (len(groups[-1]) + 1) * wide * (deep + wide) > _SCORES:
            groups.append([])
            least, wide, deep = size, rows[prompt], seen[prompt]
        groups[-1].append(prompt)
        most_rows, most_seen = wide, deep
    return groups


def _check(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, spans: TargetSpans) -> int:
    """Query heads per key/value head."""
    packed_bounds(spans.offsets_C1, len(q_SHD))
    shapes = {tuple(x.shape[1:]) for x in (k_SGD, v_SGD, prompt_k_TGD, prompt_v_TGD)}
    if len(shapes) != 1 or q_SHD.ndim != 3 or k_SGD.shape != v_SGD.shape or prompt_k_TGD.shape != prompt_v_TGD.shape or len(k_SGD) != len(q_SHD):
        raise ValueError(
            f"queries {tuple(q_SHD.shape)}, own keys {tuple(k_SGD.shape)}, own values {tuple(v_SGD.shape)}, prompts' {tuple(prompt_k_TGD.shape)} and "
            f"{tuple(prompt_v_TGD.shape)}: give [rows, heads, head size], as many own keys as queries, and keys and values of equal shape"
        )
    if q_SHD.shape[2] != k_SGD.shape[2] or q_SHD.shape[1] % k_SGD.shape[1]:
        raise ValueError(f"queries of {q_SHD.shape[1]} heads of {q_SHD.shape[2]}, keys of {k_SGD.shape[1]} of {k_SGD.shape[2]}: give a multiple, of one size")
    outside = (spans.begins_C < 0) | (spans.ends_C < spans.begins_C) | (spans.ends_C > len(prompt_k_TGD))
    if bool(outside.any()):
        block = int(outside.nonzero()[0])
        raise ValueError(
            f"block {block} sees rows {int(spans.begins_C[block])} to {int(spans.ends_C[block])} of {len(prompt_k_TGD)}: give ascending ends within them"
        )
    return q_SHD.shape[1] // k_SGD.shape[1]
