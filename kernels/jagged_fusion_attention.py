"""Causal attention on packed sequences with its bias computed inside each tile: nothing is padded, and no [n, n] matrix is ever written.

The bias of query i and key j is a learned number for the bucket of ``|t_i - t_j|`` and one for the distance ``i - j``, so gradients reach both tables.
Legend: T packed tokens, B sequences, H query heads, G key/value heads (H a multiple of G), D head size of queries and keys, E head size of values,
K time buckets, P distances, M queries of a tile, N keys of a sequence.
Source: TurboGR (arXiv 2605.13433), jagged fusion attention; HSTU (arXiv 2402.17152), SiLU attention and its relative bias; FuXi-alpha (arXiv 2502.03036),
bias as channels of its own; FlashAttention-2 (arXiv 2307.08691), the backward pass that computes scores again.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from semantide.kernels.attention import packed_bounds
from semantide.kernels.dispatch import kernel
from semantide.kernels.fusion_plan import FusionPlan
from semantide.kernels.native_jagged_fusion import attend, native_library

Activation = Literal["silu", "softmax"]

BUCKET_LOG = 0.301
"""Natural logarithm of the ratio between the bounds of neighbouring buckets of time. Source: HSTU."""
LONGEST_SECONDS = 2**52
"""Differences of time above it count as this one, so that float64 holds every one exactly."""
_TILE = 256  # queries of the reference


@cache
def bucket_bounds() -> tuple[int, ...]:
    """Least difference of time that belongs to bucket 1, 2, ...; whole numbers, so that every device draws the same line."""
    return tuple(math.ceil(math.exp(BUCKET_LOG * bucket)) for bucket in range(1, int(math.log(LONGEST_SECONDS) / BUCKET_LOG) + 1))


def time_buckets(differences: Tensor, num_buckets: int) -> Tensor:
    """Bucket of each difference of time: ``floor(log(max(1, |difference|)) / 0.301)``, at most ``num_buckets - 1``.

    Units: seconds, or whatever whole unit the times are in.
    """
    bounds = torch.tensor(bucket_bounds()[: num_buckets - 1], dtype=torch.long, device=differences.device)
    return torch.bucketize(differences.abs(), bounds, right=True)


@kernel
def jagged_fusion_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None = None,
    time_weights_HK: Tensor | None = None,
    position_weights_HP: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float | None = None,
) -> Tensor:
    """Each token attends to itself and what stood before it in its sequence.

    ``silu`` is ``SiLU(q k + bias) * scale`` without a normaliser, ``scale`` by default one over the sequence's length; ``softmax`` is
    ``softmax(q k * scale + bias)``, ``scale`` by default one over the root of D.

    Shapes: ``offsets_B1`` [B + 1], first 0, last T; ``times_T`` int64; tables [H, K] and [H, P], or [1, K] and [1, P] for all heads alike; a distance
    of P or more takes the last entry; returns [T, H, E].
    Raises: ValueError when shapes do not fit, or only one of times and their table is given.
    """
    share = check_fusion(q_THD, k_TGD, v_TGE, times_T, time_weights_HK, position_weights_HP, activation)
    time_weights_HK, position_weights_HP = (per_head(x, q_THD.shape[1]) for x in (time_weights_HK, position_weights_HP))
    outputs = [v_TGE[:0].repeat_interleave(share, 1)]
    for begin, end in pairwise(packed_bounds(offsets_B1, len(q_THD))):
        factor = scale if scale is not None else 1 / (end - begin or 1) if activation == "silu" else 1 / math.sqrt(q_THD.shape[2])
        k_HND, v_HNE = (x[begin:end].transpose(0, 1).repeat_interleave(share, 0) for x in (k_TGD, v_TGE))
        for first in range(begin, end, _TILE):
            last = min(first + _TILE, end)

            def tile(q_MHD: Tensor, k_HND: Tensor, v_HNE: Tensor, begin: int = begin, first: int = first, last: int = last, factor: float = factor) -> Tensor:
                scores_HMN = q_MHD.transpose(0, 1) @ k_HND.transpose(1, 2)
                bias_HMN = _bias(begin, first, last, times_T, time_weights_HK, position_weights_HP)
                future_MN = _future(begin, first, last, q_MHD.device)
                if activation == "silu":
                    weights_HMN = (F.silu(scores_HMN + bias_HMN) * factor).masked_fill(future_MN, 0)
                else:
                    weights_HMN = (scores_HMN * factor + bias_HMN).masked_fill(future_MN, -math.inf).softmax(-1)
                return (weights_HMN @ v_HNE).transpose(0, 1)

            seen = last - begin
            outputs.append(checkpoint(tile, q_THD[first:last], k_HND[:, :seen], v_HNE[:, :seen], use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


@kernel
def jagged_bias_attention(
    v_TGE: Tensor, offsets_B1: Tensor, times_T: Tensor | None = None, time_weights_HK: Tensor | None = None, position_weights_HP: Tensor | None = None
) -> Tensor:
    """The bias by itself as weights of the values: a channel of FuXi, of times or of positions (or of their sum where both tables are given).

    Shapes: as in ``jagged_fusion_attention``; returns [T, H, E] with the tables' H, which must be a multiple of G, or G for tables of one row.
    Raises: ValueError when shapes do not fit, or no table is given.
    """
    heads = check_bias(v_TGE, times_T, time_weights_HK, position_weights_HP)
    time_weights_HK, position_weights_HP = (per_head(x, heads) for x in (time_weights_HK, position_weights_HP))
    outputs = [v_TGE[:0].repeat_interleave(heads // v_TGE.shape[1], 1)]
    for begin, end in pairwise(packed_bounds(offsets_B1, len(v_TGE))):
        v_HNE = v_TGE[begin:end].transpose(0, 1).repeat_interleave(heads // v_TGE.shape[1], 0)
        for first in range(begin, end, _TILE):
            last = min(first + _TILE, end)

            def tile(v_HNE: Tensor, begin: int = begin, first: int = first, last: int = last) -> Tensor:
                bias_HMN = v_HNE.new_zeros(()) + _bias(begin, first, last, times_T, time_weights_HK, position_weights_HP)
                return (bias_HMN.masked_fill(_future(begin, first, last, v_HNE.device), 0) @ v_HNE).transpose(0, 1)

            outputs.append(checkpoint(tile, v_HNE[:, : last - begin], use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs)


@jagged_fusion_attention.register("cpu")
def jagged_fusion_attention_native(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None = None,
    time_weights_HK: Tensor | None = None,
    position_weights_HP: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float | None = None,
) -> Tensor:
    """In C++, forward and backward; other types than float32 take the torch way."""
    given = (q_THD, k_TGD, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP)
    if native_library(*given) is None:
        return jagged_fusion_attention.reference(*given, activation=activation, scale=scale)
    check_fusion(q_THD, k_TGD, v_TGE, times_T, time_weights_HK, position_weights_HP, activation)
    if scale == 0:  # which stands for one over the length there
        return jagged_fusion_attention.reference(*given, activation=activation, scale=scale)
    return attend(q_THD, k_TGD, v_TGE, *_planned(q_THD, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP, activation, scale))


@jagged_bias_attention.register("cpu")
def jagged_bias_attention_native(
    v_TGE: Tensor, offsets_B1: Tensor, times_T: Tensor | None = None, time_weights_HK: Tensor | None = None, position_weights_HP: Tensor | None = None
) -> Tensor:
    """In C++, forward and backward; other types than float32 take the torch way."""
    if native_library(v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP) is None:
        return jagged_bias_attention.reference(v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP)
    return attend(None, None, v_TGE, *_planned(None, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP, "bias", 1.0))


@jagged_fusion_attention.register("cuda")
def jagged_fusion_attention_triton(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None = None,
    time_weights_HK: Tensor | None = None,
    position_weights_HP: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float | None = None,
) -> Tensor:
    """In Triton, forward and backward; float64, or a machine without Triton, takes the torch way."""
    if find_spec("triton") is None or q_THD.dtype == torch.float64:
        given = (q_THD, k_TGD, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP)
        return jagged_fusion_attention.reference(*given, activation=activation, scale=scale)
    from semantide.kernels.triton_jagged_fusion import attend_triton

    check_fusion(q_THD, k_TGD, v_TGE, times_T, time_weights_HK, position_weights_HP, activation)
    return attend_triton(q_THD, k_TGD, v_TGE, *_planned(q_THD, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP, activation, scale))


@jagged_fusion_attention.register("npu")
def jagged_fusion_attention_npu(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None = None,
    time_weights_HK: Tensor | None = None,
    position_weights_HP: Tensor | None = None,
    *,
    activation: Activation = "silu",
    scale: float | None = None,
) -> Tensor:
    """A softmax without bias by the device's own operator; SiLU and bias, which it does not have, in Triton."""
    plain = activation == "softmax" and times_T is None and time_weights_HK is None and position_weights_HP is None
    if not plain or q_THD.dtype == torch.float64 or q_THD.shape[-1] != v_TGE.shape[-1]:
        given = (q_THD, k_TGD, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP)
        return jagged_fusion_attention_triton(*given, activation=activation, scale=scale)
    from semantide.kernels.npu import causal_attention_npu

    check_fusion(q_THD, k_TGD, v_TGE, times_T, time_weights_HK, position_weights_HP, activation)
    return causal_attention_npu(q_THD, k_TGD, v_TGE, packed_bounds(offsets_B1, len(q_THD)), 1 / math.sqrt(q_THD.shape[2]) if scale is None else scale)


@jagged_bias_attention.register("npu")
@jagged_bias_attention.register("cuda")
def jagged_bias_attention_triton(
    v_TGE: Tensor, offsets_B1: Tensor, times_T: Tensor | None = None, time_weights_HK: Tensor | None = None, position_weights_HP: Tensor | None = None
) -> Tensor:
    """In Triton, forward and backward; float64, or a machine without Triton, takes the torch way."""
    if find_spec("triton") is None or v_TGE.dtype == torch.float64:
        return jagged_bias_attention.reference(v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP)
    from semantide.kernels.triton_jagged_fusion import attend_triton

    return attend_triton(None, None, v_TGE, *_planned(None, v_TGE, offsets_B1, times_T, time_weights_HK, position_weights_HP, "bias", 1.0))


def _planned(
    q_THD: Tensor | None,
    v_TGE: Tensor,
    offsets_B1: Tensor,
    times_T: Tensor | None,
    time_weights_HK: Tensor | None,
    position_weights_HP: Tensor | None,
    form: Literal["silu", "softmax", "bias"],
    scale: float | None,
) -> tuple[Tensor | None, Tensor | None, FusionPlan]:
    """Both tables for every head, and the plan; queries and keys were checked before."""
    heads = check_bias(v_TGE, times_T, time_weights_HK, position_weights_HP) if q_THD is None else q_THD.shape[1]
    packed_bounds(offsets_B1, len(v_TGE))
    if scale is None and form == "softmax" and q_THD is not None:
        scale = 1 / math.sqrt(q_THD.shape[2])
    plan = FusionPlan(offsets_B1.long().contiguous(), None if times_T is None else times_T.contiguous(), bucket_bounds(), form, scale, heads)
    return per_head(time_weights_HK, heads), per_head(position_weights_HP, heads), plan


def _future(begin: int, first: int, last: int, device: torch.device) -> Tensor:
    """Which keys [begin, last) come after each query of [first, last)."""
    return torch.arange(begin, last, device=device) > torch.arange(first, last, device=device).unsqueeze(1)


def _bias(begin: int, first: int, last: int, times_T: Tensor | None, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None) -> Tensor | float:
    """Of queries [first, last) and keys [begin, last): [H, M, N], or 0 without a table."""
    parts = []
    if times_T is not None and time_weights_HK is not None:
        parts.append(time_weights_HK[:, time_buckets(times_T[first:last, None] - times_T[None, begin:last], time_weights_HK.shape[1])])
    if position_weights_HP is not None:
        places_N = torch.arange(begin, last, device=position_weights_HP.device)
        distances_MN = (places_N[first - begin :, None] - places_N[None, :]).clamp(0, position_weights_HP.shape[1] - 1)
        parts.append(position_weights_HP[:, distances_MN])
    return sum(parts)


def per_head(table: Tensor | None, heads: int) -> Tensor | None:
    """A table of one row given to all heads."""
    return table if table is None or len(table) == heads else table.expand(heads, -1)


def check_fusion(
    q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, times_T: Tensor | None, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None, activation: str
) -> int:
    """Query heads per key/value head.

    Raises: ValueError when anything does not fit.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation {activation!r}: give one of {', '.join(get_args(Activation))}")
    fits = q_THD.ndim == k_TGD.ndim == v_TGE.ndim == 3 and q_THD.shape[0] == k_TGD.shape[0] and q_THD.shape[2] == k_TGD.shape[2]
    if not fits or k_TGD.shape[:2] != v_TGE.shape[:2] or not k_TGD.shape[1] or q_THD.shape[1] % k_TGD.shape[1]:
        raise ValueError(
            f"queries {tuple(q_THD.shape)}, keys {tuple(k_TGD.shape)}, values {tuple(v_TGE.shape)}: give [tokens, heads, head size] of as many tokens, "
            "keys of the queries' head size, as many value heads as key heads, and query heads a multiple of them"
        )
    check_tables(len(q_THD), q_THD.shape[1], times_T, time_weights_HK, position_weights_HP)
    return q_THD.shape[1] // k_TGD.shape[1]


def check_bias(v_TGE: Tensor, times_T: Tensor | None, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None) -> int:
    """Heads of the result.

    Raises: ValueError when anything does not fit.
    """
    tables = [x for x in (time_weights_HK, position_weights_HP) if x is not None]
    if v_TGE.ndim != 3 or not v_TGE.shape[1] or not tables:
        raise ValueError(f"values {tuple(v_TGE.shape)} and {len(tables)} tables: give [tokens, heads, head size], and weights of times or positions")
    heads = max(len(x) for x in tables)
    heads = v_TGE.shape[1] if heads == 1 else heads
    check_tables(len(v_TGE), heads, times_T, time_weights_HK, position_weights_HP)
    if heads % v_TGE.shape[1]:
        raise ValueError(f"tables of {heads} heads for values of {v_TGE.shape[1]}: give a multiple, or one row for all")
    return heads


def check_tables(tokens: int, heads: int, times_T: Tensor | None, time_weights_HK: Tensor | None, position_weights_HP: Tensor | None) -> None:
    """Raises: ValueError when a table or the times do not fit."""
    for name, table in (("time", time_weights_HK), ("position", position_weights_HP)):
        if table is not None and (table.ndim != 2 or len(table) not in (1, heads) or not table.shape[1]):
            raise ValueError(f"{name} weights {tuple(table.shape)} for {heads} heads: give [heads, entries] or [1, entries], at least one entry")
    if (times_T is None) != (time_weights_HK is None):
        raise ValueError("times and time weights belong together: give both or neither")
    if times_T is not None and (times_T.shape != (tokens,) or times_T.dtype != torch.long):
        raise ValueError(f"times {tuple(times_T.shape)} of {times_T.dtype} for {tokens} tokens: give one int64 for each")
