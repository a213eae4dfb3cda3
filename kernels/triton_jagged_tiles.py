"""The programs of jagged fused attention in Triton: a tile of queries against the keys before them, or a tile of keys against the queries after them.

The bias is made inside each tile. Gradients of its tables are summed in a tile and added to the table in the order in which tiles end, so their last digits
may differ from run to run; all other results are the same each time.
Legend: as in jagged_fusion_attention.py; M queries and N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LONGEST = tl.constexpr(2**52)
_BUCKET_LOG = tl.constexpr(0.301)


@triton.jit
def _buckets(times, bounds, rows_M, keys_N, in_rows, in_keys, num_bounds: tl.constexpr):  # type: ignore[no-untyped-def]
    """Buckets of a tile's pairs: a first guess by logarithm, put right by the bounds."""
    query_M = tl.load(times + rows_M, mask=in_rows, other=0)
    key_N = tl.load(times + keys_N, mask=in_keys, other=0)
    apart_MN = tl.abs(query_M[:, None] - key_N[None, :])
    apart_MN = tl.minimum(tl.maximum(apart_MN, 1), _LONGEST)
    bucket_MN = tl.floor(tl.log(apart_MN.to(tl.float32)) / _BUCKET_LOG).to(tl.int32)
    bucket_MN = tl.minimum(tl.maximum(bucket_MN, 0), num_bounds)
    above_MN = tl.load(bounds + bucket_MN, mask=bucket_MN < num_bounds, other=_LONGEST + 1)
    bucket_MN += (apart_MN >= above_MN).to(tl.int32)
    least_MN = tl.load(bounds + bucket_MN - 1, mask=bucket_MN > 0, other=0)
    return bucket_MN - (apart_MN < least_MN).to(tl.int32)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q_MD,
    k_ND,
    times,
    bounds,
    time_weights,
    position_weights,
    head,
    rows_M,
    keys_N,
    end,
    scale,
    buckets: tl.constexpr,
    positions: tl.constexpr,
    num_bounds: tl.constexpr,
    form: tl.constexpr,
):
    """Scores of a tile with their bias, the buckets of its pairs, and which pairs see each other."""
    in_rows, in_keys = rows_M < end, keys_N < end
    seen_MN = (rows_M[:, None] >= keys_N[None, :]) & in_rows[:, None]
    scores_MN = tl.zeros(seen_MN.shape, tl.float32)
    bucket_MN = tl.zeros(seen_MN.shape, tl.int32)
    if form != 2:
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if form == 1:
        scores_MN = scores_MN * scale
    if buckets > 0:
        bucket_MN = _buckets(times, bounds, rows_M, keys_N, in_rows, in_keys, num_bounds)
        scores_MN += tl.load(time_weights + head * buckets + bucket_MN, mask=seen_MN, other=0.0).to(tl.float32)
    if positions > 0:
        distance_MN = tl.minimum(tl.maximum(rows_M[:, None] - keys_N[None, :], 0), positions - 1)
        scores_MN += tl.load(position_weights + head * positions + distance_MN, mask=seen_MN, other=0.0).to(tl.float32)
    return scores_MN, bucket_MN, seen_MN


@triton.jit
def _gradients(scores_MN, grad_MN, seen_MN, sums_M, delta_M, form: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of a tile, and the gradient of its scores from that of the weights."""
    if form == 0:
        gate_MN = tl.sigmoid(scores_MN)
        p_MN = scores_MN * gate_MN
        grad_MN = grad_MN * (gate_MN + p_MN * (1 - gate_MN))
    elif form == 1:
        p_MN = tl.exp(scores_MN - sums_M[:, None])
        grad_MN = p_MN * (grad_MN - delta_M[:, None])
    else:
        p_MN = scores_MN
    return tl.where(seen_MN, p_MN, 0.0), tl.where(seen_MN, grad_MN, 0.0)


@triton.jit
def forward_tiles(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    offsets,
    times,
    bounds,
    time_weights,
    position_weights,
    out,
    sums,
    scale,
    heads: tl.constexpr,
    share: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    buckets: tl.constexpr,
    positions: tl.constexpr,
    num_bounds: tl.constexpr,
    form: tl.constexpr,
    per_length: tl.constexpr,
    block: tl.constexpr,
    block_d: tl.constexpr,
    block_e: tl.constexpr,
):
    """A tile of queries of one head: the result, and with a softmax the logarithm of its sum of exponentials."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group, groups = head // share, heads // share
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    first = begin + tl.program_id(1) * block
    if first < end:
        rows_M, features_D, features_E = first + tl.arange(0, block), tl.arange(0, block_d), tl.arange(0, block_e)
        in_rows, in_d, in_e = rows_M < end, features_D < size, features_E < value_size
        q_MD = tl.zeros((block, block_d), v.dtype.element_ty)
        k_ND = q_MD
        if form != 2:
            q_MD = tl.load(q + (rows_M[:, None] * heads + head) * size + features_D[None, :], mask=in_rows[:, None] & in_d[None, :], other=0.0)
        o_ME = tl.zeros((block, block_e), tl.float32)
        top_M = tl.full((block,), float("-inf"), tl.float32)
        sum_M = tl.zeros((block,), tl.float32)
        for start in range(begin, first + block, block):
            keys_N = start + tl.arange(0, block)
            in_keys = keys_N < end
            if form != 2:
                k_ND = tl.load(k + (keys_N[:, None] * groups + group) * size + features_D[None, :], mask=in_keys[:, None] & in_d[None, :], other=0.0)
            v_NE = tl.load(v + (keys_N[:, None] * groups + group) * value_size + features_E[None, :], mask=in_keys[:, None] & in_e[None, :], other=0.0)
            scores_MN, _bucket_MN, seen_MN = _scores(
                q_MD, k_ND, times, bounds, time_weights, position_weights, head, rows_M, keys_N, end, scale, buckets, positions, num_bounds, form
            )
            if form == 1:
                scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
                higher_M = tl.maximum(top_M, tl.max(scores_MN, 1))
                shift_M = tl.where(in_rows, higher_M, 0.0)
                p_MN = tl.exp(scores_MN - shift_M[:, None])
                shrink_M = tl.exp(top_M - shift_M)
                sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
                o_ME = o_ME * shrink_M[:, None]
                top_M = higher_M
            elif form == 0:
                p_MN = tl.where(seen_MN, scores_MN * tl.sigmoid(scores_MN), 0.0)
            else:
                p_MN = tl.where(seen_MN, scores_MN, 0.0)
            o_ME += tl.dot(p_MN.to(v_NE.dtype), v_NE, input_precision="ieee")
        if form == 1:
            sum_M = tl.where(in_rows, sum_M, 1.0)
            o_ME = o_ME / sum_M[:, None]
            tl.store(sums + rows_M * heads + head, top_M + tl.log(sum_M), mask=in_rows)
        elif form == 0:
            o_ME = o_ME / (end - begin).to(tl.float32) if per_length else o_ME * scale
        to_ME = (rows_M[:, None] * heads + head) * value_size + features_E[None, :]
        tl.store(out + to_ME, o_ME.to(out.dtype.element_ty), mask=in_rows[:, None] & in_e[None, :])


@triton.jit
def query_gradient_tiles(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    offsets,
    times,
    bounds,
    time_weights,
    position_weights,
    sums,
    delta,
    grad_out,
    grad_q,
    scale,
    heads: tl.constexpr,
    share: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    buckets: tl.constexpr,
    positions: tl.constexpr,
    num_bounds: tl.constexpr,
    form: tl.constexpr,
    per_length: tl.constexpr,
    block: tl.constexpr,
    block_d: tl.constexpr,
    block_e: tl.constexpr,
):
    """A tile of queries of one head: the gradient of the queries."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group, groups = head // share, heads // share
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    first = begin + tl.program_id(1) * block
    if first < end:
        rows_M, features_D, features_E = first + tl.arange(0, block), tl.arange(0, block_d), tl.arange(0, block_e)
        in_rows, in_d, in_e = rows_M < end, features_D < size, features_E < value_size
        at_MD = (rows_M[:, None] * heads + head) * size + features_D[None, :]
        at_ME = (rows_M[:, None] * heads + head) * value_size + features_E[None, :]
        q_MD = tl.load(q + at_MD, mask=in_rows[:, None] & in_d[None, :], other=0.0)
        given_ME = tl.load(grad_out + at_ME, mask=in_rows[:, None] & in_e[None, :], other=0.0)
        sums_M = tl.zeros((block,), tl.float32)
        delta_M = sums_M
        if form == 1:
            sums_M = tl.load(sums + rows_M * heads + head, mask=in_rows, other=0.0)
            delta_M = tl.load(delta + rows_M * heads + head, mask=in_rows, other=0.0)
        factor = 1.0 / (end - begin).to(tl.float32) if per_length else scale
        grad_MD = tl.zeros((block, block_d), tl.float32)
        for start in range(begin, first + block, block):
            keys_N = start + tl.arange(0, block)
            in_keys = keys_N < end
            k_ND = tl.load(k + (keys_N[:, None] * groups + group) * size + features_D[None, :], mask=in_keys[:, None] & in_d[None, :], other=0.0)
            v_NE = tl.load(v + (keys_N[:, None] * groups + group) * value_size + features_E[None, :], mask=in_keys[:, None] & in_e[None, :], other=0.0)
            scores_MN, _bucket_MN, seen_MN = _scores(
                q_MD, k_ND, times, bounds, time_weights, position_weights, head, rows_M, keys_N, end, scale, buckets, positions, num_bounds, form
            )
            to_p_MN = tl.dot(given_ME, tl.trans(v_NE), input_precision="ieee")
            _p_MN, to_scores_MN = _gradients(scores_MN, to_p_MN, seen_MN, sums_M, delta_M, form)
            grad_MD += tl.dot((to_scores_MN * factor).to(k_ND.dtype), k_ND, input_precision="ieee")
        tl.store(grad_q + at_MD, grad_MD.to(grad_q.dtype.element_ty), mask=in_rows[:, None] & in_d[None, :])


@triton.jit
def key_gradient_tiles(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    offsets,
    times,
    bounds,
    time_weights,
    position_weights,
    sums,
    delta,
    grad_out,
    grad_k,
    grad_v,
    grad_time,
    grad_position,
    scale,
    heads: tl.constexpr,
    share: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    buckets: tl.constexpr,
    positions: tl.constexpr,
    num_bounds: tl.constexpr,
    form: tl.constexpr,
    per_length: tl.constexpr,
    block: tl.constexpr,
    block_d: tl.constexpr,
    block_e: tl.constexpr,
):
    """A tile of keys of one key head: the gradients of keys, values and both tables."""
    groups: tl.constexpr = heads // share
    sequence, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    first = begin + tl.program_id(1) * block
    if first < end:
        keys_N, features_D, features_E = first + tl.arange(0, block), tl.arange(0, block_d), tl.arange(0, block_e)
        in_keys, in_d, in_e = keys_N < end, features_D < size, features_E < value_size
        at_ND = (keys_N[:, None] * groups + group) * size + features_D[None, :]
        at_NE = (keys_N[:, None] * groups + group) * value_size + features_E[None, :]
        v_NE = tl.load(v + at_NE, mask=in_keys[:, None] & in_e[None, :], other=0.0)
        k_ND = tl.zeros((block, block_d), v.dtype.element_ty)
        q_MD = k_ND
        if form != 2:
            k_ND = tl.load(k + at_ND, mask=in_keys[:, None] & in_d[None, :], other=0.0)
        factor = 1.0 / (end - begin).to(tl.float32) if per_length else scale  # of the scores with a softmax, else of the weights
        grad_k_ND = tl.zeros((block, block_d), tl.float32)
        grad_v_NE = tl.zeros((block, block_e), tl.float32)
        sums_M = tl.zeros((block,), tl.float32)
        delta_M = sums_M
        for head in range(group * share, group * share + share):
            for start in range(first, end, block):
                rows_M = start + tl.arange(0, block)
                in_rows = rows_M < end
                if form != 2:
                    q_MD = tl.load(q + (rows_M[:, None] * heads + head) * size + features_D[None, :], mask=in_rows[:, None] & in_d[None, :], other=0.0)
                if form == 1:
                    sums_M = tl.load(sums + rows_M * heads + head, mask=in_rows, other=0.0)
                    delta_M = tl.load(delta + rows_M * heads + head, mask=in_rows, other=0.0)
                given_ME = tl.load(
                    grad_out + (rows_M[:, None] * heads + head) * value_size + features_E[None, :], mask=in_rows[:, None] & in_e[None, :], other=0.0
                )
                scores_MN, bucket_MN, seen_MN = _scores(
                    q_MD, k_ND, times, bounds, time_weights, position_weights, head, rows_M, keys_N, end, scale, buckets, positions, num_bounds, form
                )
                to_p_MN = tl.dot(given_ME, tl.trans(v_NE), input_precision="ieee")
                p_MN, to_scores_MN = _gradients(scores_MN, to_p_MN, seen_MN, sums_M, delta_M, form)
                if form == 0:
                    p_MN *= factor
                    to_scores_MN *= factor
                grad_v_NE += tl.dot(tl.trans(p_MN.to(given_ME.dtype)), given_ME, input_precision="ieee")
                if buckets > 0:
                    lowest = tl.min(tl.where(seen_MN, bucket_MN, buckets))
                    highest = tl.max(tl.where(seen_MN, bucket_MN, -1))
                    for bucket in range(lowest, highest + 1):
                        tl.atomic_add(grad_time + head * buckets + bucket, tl.sum(tl.where(bucket_MN == bucket, to_scores_MN, 0.0)))
                if positions > 0:
                    distance_MN = rows_M[:, None] - keys_N[None, :]
                    for distance in range(tl.maximum(start - first - block + 1, 0), tl.minimum(start - first + block, end - first)):
                        total = tl.sum(tl.where(distance_MN == distance, to_scores_MN, 0.0))
                        tl.atomic_add(grad_position + head * positions + tl.minimum(distance, positions - 1), total)
                if form == 1:
                    to_scores_MN *= factor
                if form != 2:
                    grad_k_ND += tl.dot(tl.trans(to_scores_MN.to(q_MD.dtype)), q_MD, input_precision="ieee")
        tl.store(grad_v + at_NE, grad_v_NE.to(grad_v.dtype.element_ty), mask=in_keys[:, None] & in_e[None, :])
        if form != 2:
            tl.store(grad_k + at_ND, grad_k_ND.to(grad_k.dtype.element_ty), mask=in_keys[:, None] & in_d[None, :])
