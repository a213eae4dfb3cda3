"""Softmax attention on packed (jagged) sequences, and of many beams against one shared prompt.

Legend: T packed tokens, B sequences, L length of one sequence, H query heads, G key/value heads (H a multiple of G),
D head size, R requests, W beams, N own rows of all beams and steps, S steps behind a beam.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.dispatch import kernel
from semantide.kernels.fusion_plan import FusionPlan
from semantide.kernels.native_jagged_fusion import attend, native_library

_BOUNDS = "_semantide_bounds"  # an offsets tensor's attribute: its version when it was read, and its numbers


@kernel
def jagged_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor, causal: bool = True) -> Tensor:
    """Attention inside each sequence of a pack, with grouped queries; nothing is padded.

    Shapes: ``offsets_B1`` [B + 1], first 0, last T; returns [T, H, D].
    Raises: ValueError when shapes do not fit.
    """
    share = _check_packed(q_THD, k_TGD, v_TGD)
    outputs = [q_THD[:0]]
    for begin, end in pairwise(packed_bounds(offsets_B1, len(q_THD))):
        q_GgLD = q_THD[begin:end].unflatten(1, (-1, share)).permute(1, 2, 0, 3)
        k_G1LD = k_TGD[begin:end].permute(1, 0, 2).unsqueeze(1)
        v_G1LD = v_TGD[begin:end].permute(1, 0, 2).unsqueeze(1)
        scores_GgLL = q_GgLD @ k_G1LD.transpose(-1, -2) / math.sqrt(q_THD.shape[-1])
        if causal:
            scores_GgLL = scores_GgLL.masked_fill(torch.ones_like(scores_GgLL, dtype=torch.bool).triu(1), -math.inf)
        o_GgLD = scores_GgLL.softmax(-1) @ v_G1LD
        outputs.append(o_GgLD.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


@jagged_attention.register("cpu")
def jagged_attention_native(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor, causal: bool = True) -> Tensor:
    """Causal in C++, forward and backward, whatever the lengths; other types than float32, and every pair of tokens, take the torch way."""
    _check_packed(q_THD, k_TGD, v_TGD)
    if not causal or len(q_THD) != len(k_TGD) or native_library(q_THD, k_TGD, v_TGD, offsets_B1) is None:
        return jagged_attention_by_length(q_THD, k_TGD, v_TGD, offsets_B1, causal)
    packed_bounds(offsets_B1, len(q_THD))
    plan = FusionPlan(offsets_B1.long().contiguous(), None, (), "softmax", 1 / math.sqrt(q_THD.shape[-1]), q_THD.shape[1])
    return attend(q_THD, k_TGD, v_TGD, None, None, plan)


@jagged_attention.register("npu")
def jagged_attention_npu(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor, causal: bool = True) -> Tensor:
    """Causal by the device's own fused operator; float64, and every pair of tokens, take the torch way."""
    _check_packed(q_THD, k_TGD, v_TGD)
    if not causal or q_THD.dtype == torch.float64:
        return jagged_attention_by_length(q_THD, k_TGD, v_TGD, offsets_B1, causal)
    from semantide.kernels.npu import causal_attention_npu

    return causal_attention_npu(q_THD, k_TGD, v_TGD, packed_bounds(offsets_B1, len(q_THD)), 1 / math.sqrt(q_THD.shape[-1]))


@jagged_attention.register("cuda")
def jagged_attention_by_length(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, offsets_B1: Tensor, causal: bool = True) -> Tensor:
    """Batch the sequences of exactly equal length, so that each group is one dense attention without padding.

    Sequences that stand in order of length cost no gathering: a group is then a view of the pack.
    """
    share = _check_packed(q_THD, k_TGD, v_TGD)
    plan = _plan(packed_bounds(offsets_B1, len(q_THD)))
    outputs = []
    for group in plan.groups:
        q_BHLD, k_BHLD, v_BHLD = (
            (x[group.begin : group.end] if group.rows is None else x[group.rows]).unflatten(0, (-1, group.length)).transpose(1, 2)
            for x in (q_THD, k_TGD, v_TGD)
        )
        if share > 1:
            k_BHLD, v_BHLD = k_BHLD.repeat_interleave(share, 1), v_BHLD.repeat_interleave(share, 1)
        outputs.append(F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=causal).transpose(1, 2).flatten(0, 1))
    if not outputs:
        return q_THD[:0]
    o_THD = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return o_THD if plan.inverse is None else o_THD[plan.inverse]


@kernel
def beam_attention(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> Tensor:
    """Attention of each request's beams over the prompt they share and over their own few ancestors.

    The prompt is read once for all beams of a request. The two parts are merged by the logarithm of their sums of exponentials, so the result
    is that of one softmax over both.

    Shapes: prompts packed by ``offsets_R1`` [R + 1]; ``ancestors_RWS`` holds rows of ``own_k_NGD``; S may be 0; returns [R, W, H, D].
    """
    share = _check_beams(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    bounds = packed_bounds(offsets_R1, len(prompt_k_TGD))
    outputs = [q_RWHD[:0]]
    for request, (begin, end) in enumerate(pairwise(bounds)):
        q_WGgD = q_RWHD[request].unflatten(1, (-1, share)) / math.sqrt(q_RWHD.shape[-1])
        prompt_WGgT = torch.einsum("wghd,tgd->wght", q_WGgD, prompt_k_TGD[begin:end])
        own_WGgS = torch.einsum("wghd,wsgd->wghs", q_WGgD, own_k_NGD[ancestors_RWS[request]])
        prompt_WGgD = torch.einsum("wght,tgd->wghd", prompt_WGgT.softmax(-1), prompt_v_TGD[begin:end])
        own_WGgD = torch.einsum("wghs,wsgd->wghd", own_WGgS.softmax(-1), own_v_NGD[ancestors_RWS[request]])
        merged_WGgD = merge_attention(prompt_WGgD, prompt_WGgT.logsumexp(-1), own_WGgD, own_WGgS.logsumexp(-1))
        outputs.append(merged_WGgD.flatten(1, 2).unsqueeze(0))
    return torch.cat(outputs)


@beam_attention.register("cuda")
def beam_attention_cuda(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> Tensor:
    """One Triton launch for all requests; without Triton, or where gradients are wanted, batched by length."""
    _check_beams(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    tensors = (q_RWHD, prompt_k_TGD, prompt_v_TGD, own_k_NGD, own_v_NGD)
    if find_spec("triton") is None or q_RWHD.dtype == torch.float64 or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return beam_attention_by_length(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    from semantide.kernels.triton_attention import beam_attention_triton

    return beam_attention_triton(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)


@beam_attention.register("cpu")
def beam_attention_native(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> Tensor:
    """One pass over each prompt in C++: products, exponentials and sums of a block of keys stay in the processor's nearest cache.

    Other types than float32, and gradients, take the torch way.
    Raises: ValueError when shapes do not fit or an ancestor's row does not exist.
    """
    tensors = (q_RWHD, prompt_k_TGD, prompt_v_TGD, own_k_NGD, own_v_NGD)
    library = native.library_for(*tensors)
    if library is None:
        return beam_attention_by_length(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    (requests, width, heads, size), groups, steps = q_RWHD.shape, prompt_k_TGD.shape[1], ancestors_RWS.shape[-1]
    share = _check_beams(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    packed_bounds(offsets_R1, len(prompt_k_TGD))
    q_RWHD, prompt_k_TGD, prompt_v_TGD, own_k_NGD, own_v_NGD = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    offsets_R1, ancestors_RWS = offsets_R1.long().contiguous(), ancestors_RWS.long().contiguous()
    out_RWHD = q_RWHD.new_empty(q_RWHD.shape)
    arguments = native.BEAM_ATTENTION.pack(
        *(requests, width, heads, groups, share, size, steps, len(own_k_NGD)),
        *(q_RWHD.data_ptr(), *q_RWHD.stride()[:3]),
        *(prompt_k_TGD.data_ptr(), prompt_v_TGD.data_ptr(), *prompt_k_TGD.stride()[:2], *prompt_v_TGD.stride()[:2]),
        *(offsets_R1.data_ptr(), own_k_NGD.data_ptr(), own_v_NGD.data_ptr(), *own_k_NGD.stride()[:2], *own_v_NGD.stride()[:2]),
        *(ancestors_RWS.data_ptr(), out_RWHD.data_ptr(), 1 / math.sqrt(size)),
    )
    if native.call(library, "semantide_beam_attention", arguments):
        raise ValueError(f"ancestors from {int(ancestors_RWS.min())} to {int(ancestors_RWS.max())}, but there are {len(own_k_NGD)} own rows")
    return out_RWHD


def beam_attention_by_length(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> Tensor:
    """Batch the requests whose prompts have equal length; beams and heads that share keys become rows of one matrix product."""
    share = _check_beams(q_RWHD, prompt_k_TGD, prompt_v_TGD, offsets_R1, own_k_NGD, own_v_NGD, ancestors_RWS)
    plan = _plan(packed_bounds(offsets_R1, len(prompt_k_TGD)))
    width, steps = q_RWHD.shape[1], ancestors_RWS.shape[-1]
    q_RGMD = (q_RWHD / math.sqrt(q_RWHD.shape[-1])).unflatten(2, (-1, share)).transpose(1, 2).flatten(2, 3)
    outputs, sums, order = [], [], []
    for group in plan.groups:
        k_RGTD, v_RGTD = (
            (x[group.begin : group.end] if group.rows is None else x[group.rows]).unflatten(0, (-1, group.length)).transpose(1, 2)
            for x in (prompt_k_TGD, prompt_v_TGD)
        )
        scores_RGMT = q_RGMD[group.sequences] @ k_RGTD.transpose(-1, -2)
        sums.append(scores_RGMT.logsumexp(-1))
        outputs.append(scores_RGMT.softmax(-1) @ v_RGTD)
        order.append(group.sequences)
    if plan.empty.numel():
        shape = (len(plan.empty), *q_RGMD.shape[1:])
        outputs.append(q_RGMD.new_zeros(shape))
        sums.append(q_RGMD.new_full(shape[:-1], -math.inf))
        order.append(plan.empty)
    if not outputs:
        return q_RWHD
    restore = torch.cat(order).argsort()
    o_RGMD, sum_RGM = torch.cat(outputs)[restore], torch.cat(sums)[restore]
    if steps:
        q_RGWgD = q_RGMD.unflatten(2, (width, share))
        k_RGWDS = own_k_NGD[ancestors_RWS].permute(0, 3, 1, 4, 2)
        v_RGWSD = own_v_NGD[ancestors_RWS].permute(0, 3, 1, 2, 4)
        scores_RGWgS = q_RGWgD @ k_RGWDS
        own_RGMD = (scores_RGWgS.softmax(-1) @ v_RGWSD).flatten(2, 3)
        o_RGMD = merge_attention(o_RGMD, sum_RGM, own_RGMD, scores_RGWgS.logsumexp(-1).flatten(2, 3))
    o_RWHD: Tensor = o_RGMD.unflatten(2, (width, share)).transpose(1, 2).flatten(2, 3)
    return o_RWHD


def merge_attention(a_D: Tensor, a_logsum: Tensor, b_D: Tensor, b_logsum: Tensor) -> Tensor:
    """One softmax's result from the results over two disjoint sets of keys and the logarithms of their sums of exponentials.

    A part without keys has sum -inf and no weight; both without keys give 0.
    """
    top = torch.maximum(a_logsum, b_logsum).clamp_min(torch.finfo(a_logsum.dtype).min)
    a, b = (a_logsum - top).exp().unsqueeze(-1), (b_logsum - top).exp().unsqueeze(-1)
    return (a_D * a + b_D * b) / (a + b).clamp_min(torch.finfo(a.dtype).tiny)


class _Group(NamedTuple):
    """Sequences of one length: rows [begin, end) of the pack, or the listed rows where they do not lie together."""

    length: int
    begin: int
    end: int
    rows: Tensor | None
    sequences: Tensor


class _Plan(NamedTuple):
    """Groups of equal length; ``inverse`` brings the groups' rows back to the pack's order (None where they are in it)."""

    groups: tuple[_Group, ...]
    inverse: Tensor | None
    empty: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # a plan made while decoding may serve training later, which has to save its index tensors
def _plan(bounds: tuple[int, ...]) -> _Plan:
    by_length: dict[int, list[int]] = {}
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        by_length.setdefault(end - begin, []).append(sequence)
    empty = torch.tensor(by_length.pop(0, []), dtype=torch.long)
    groups, position, in_order = [], 0, True
    for length, sequences in sorted(by_length.items(), key=lambda entry: bounds[entry[1][0]]):
        begin, end = bounds[sequences[0]], bounds[sequences[-1] + 1]
        together = end - begin == length * len(sequences)
        rows = None
        if not together:
            rows = (torch.tensor([bounds[s] for s in sequences])[:, None] + torch.arange(length)).flatten()
        in_order &= together and begin == position
        position = end
        groups.append(_Group(length, begin, end, rows, torch.tensor(sequences)))
    inverse = None
    if not in_order:
        inverse = torch.cat([torch.arange(g.begin, g.end) if g.rows is None else g.rows for g in groups]).argsort()
    return _Plan(tuple(groups), inverse, empty)


def packed_offsets(lengths: Iterable[int], device: torch.device | str) -> Tensor:
    """Offsets of packed sequences of these lengths; ``packed_bounds`` never reads them back from the device, however many layers ask, unless they are changed."""
    bounds = tuple(accumulate(lengths, initial=0))
    with torch.inference_mode(False):  # tensors of that mode do not tell that they were changed
        offsets = torch.tensor(bounds, device=device)
    vars(offsets)[_BOUNDS] = offsets._version, bounds
    return offsets


def packed_bounds(offsets: Tensor, tokens: int) -> tuple[int, ...]:
    """The offsets as numbers; those of a tensor are read and checked once for all the layers that ask.

    Raises: ValueError where they do not ascend from 0 to the number of tokens.
    """
    version = None if offsets.is_inference() else offsets._version
    known: tuple[int, tuple[int, ...]] | None = vars(offsets).get(_BOUNDS)
    if known is not None and version == known[0] and known[1][-1] == tokens:
        return known[1]
    bounds = tuple(offsets.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or not _ascending(bounds):
        shown = f"{bounds[:3]}...{bounds[-2:]}"
        raise ValueError(f"offsets {shown} do not cover {tokens} tokens: give one more offset than sequences, ascending from 0 to {tokens}")
    if version is not None:
        vars(offsets)[_BOUNDS] = version, bounds
    return bounds


def _ascending(bounds: Iterable[int]) -> bool:
    return all(begin <= end for begin, end in pairwise(bounds))


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads per key/value head."""
    if k.shape != v.shape or q.ndim != 3 or k.ndim != 3 or q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}: give [rows, heads, head size], keys and values of "
            "equal shape, and query heads a multiple of key heads"
        )
    return q.shape[1] // k.shape[1]


def _check_beams(
    q_RWHD: Tensor, prompt_k_TGD: Tensor, prompt_v_TGD: Tensor, offsets_R1: Tensor, own_k_NGD: Tensor, own_v_NGD: Tensor, ancestors_RWS: Tensor
) -> int:
    """Query heads per key/value head."""
    share = _check_packed(q_RWHD.flatten(0, 1), prompt_k_TGD, prompt_v_TGD)
    (requests, width), (groups, size) = q_RWHD.shape[:2], prompt_k_TGD.shape[1:]
    own = own_k_NGD.shape == own_v_NGD.shape and own_k_NGD.shape[1:] == (groups, size)
    if not own or ancestors_RWS.shape[:2] != (requests, width) or ancestors_RWS.ndim != 3 or len(offsets_R1) != requests + 1:
        raise ValueError(
            f"own keys {tuple(own_k_NGD.shape)}, own values {tuple(own_v_NGD.shape)}, ancestors {tuple(ancestors_RWS.shape)}, {len(offsets_R1)} offsets: give "
            f"own rows of the prompt's {groups} heads and size {size}, ancestors of {requests} requests of {width} beams, and one offset more than requests"
        )
    return share
