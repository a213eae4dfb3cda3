"""Linear attention in Triton, forward and backward: one program walks over a sequence's chunks for one head and some channels of its values.

Decays between tokens are exponentials of sums over just the tokens between, so a small one is not the difference of two large ones, and none is positive.
Legend: as in linear_attention.py; C tokens of a chunk, D and E channels of keys and of a program's values, in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from semantide.kernels.linear_walk import Given, Gradients, Kept, Walker

_VALUES = 32  # channels of values of one program: with keys of 128 its state is 4,096 numbers
_LOWEST = tl.constexpr(-1e4)


@triton.jit
def _column(g_CD, i_C, j):  # type: ignore[no-untyped-def]
    """Decay of each channel from token j to each later one, and to the end of the chunk."""
    later_CD = tl.where(i_C[:, None] > j, g_CD, 0.0)
    return tl.where(i_C[:, None] >= j, tl.exp(tl.cumsum(later_CD, 0)), 0.0), tl.exp(tl.sum(later_CD, 0))


@triton.jit
def _row(x_CD, i_C, j):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(i_C[:, None] == j, x_CD, 0.0), 0)


@triton.jit
def _pairs(q_CD, k_CD, g_CD, g_C, each: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """What queries read of each written value and keys know of it, decay between the tokens of each pair (of heads), until each token, from it on, and of all."""
    i_C = tl.arange(0, block)
    later_CC = i_C[:, None] > i_C[None, :]
    reads_CC = tl.zeros([block, block], tl.float32)
    known_CC = tl.zeros([block, block], tl.float32)
    between_CC = tl.zeros([block, block], tl.float32)
    rest_CD = tl.zeros(g_CD.shape, tl.float32)
    if each:
        for j in range(block):
            decay_CD, rest_D = _column(g_CD, i_C, j)
            key_CD = decay_CD * _row(k_CD, i_C, j)[None, :]
            reads_CC = tl.where(i_C[None, :] == j, tl.sum(q_CD * key_CD, 1)[:, None], reads_CC)
            known_CC = tl.where(i_C[None, :] == j, tl.sum(k_CD * key_CD, 1)[:, None], known_CC)
            rest_CD = tl.where(i_C[:, None] == j, rest_D[None, :], rest_CD)
        fade_CD = tl.exp(tl.cumsum(g_CD, 0))
        last_D = tl.exp(tl.sum(g_CD, 0))
    else:
        sums_CC = tl.cumsum(tl.where(later_CC, g_C[:, None], 0.0), 0)
        between_CC = tl.where(i_C[:, None] >= i_C[None, :], tl.exp(sums_CC), 0.0)
        reads_CC = tl.dot(q_CD, tl.trans(k_CD), input_precision="ieee") * between_CC
        known_CC = tl.dot(k_CD, tl.trans(k_CD), input_precision="ieee") * between_CC
        rest_CD = tl.broadcast_to(tl.exp(tl.sum(tl.where(later_CC, g_C[:, None], 0.0), 0))[:, None], g_CD.shape)
        fade_CD = tl.broadcast_to(tl.exp(tl.cumsum(g_C, 0))[:, None], g_CD.shape)
        last_D = tl.exp(tl.sum(tl.broadcast_to(g_C[:, None], g_CD.shape), 0))
    return reads_CC, tl.where(later_CC, known_CC, 0.0), between_CC, fade_CD, rest_CD, last_D


@triton.jit
def _tokens(x, rows_C, row, head, columns, inside):  # type: ignore[no-untyped-def]
    return tl.load(x + rows_C[:, None] * row + head + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _decays(g, rows_C, head, heads, size, d_D, in_C, inside_CD, each: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of channels, and of heads; zero behind the last token."""
    if each:
        g_CD = tl.load(g + (rows_C[:, None] * heads + head) * size + d_D[None, :], mask=inside_CD, other=0.0).to(tl.float32)
        g_C = tl.zeros(rows_C.shape, tl.float32)
    else:
        g_C = tl.load(g + rows_C * heads + head, mask=in_C, other=0.0).to(tl.float32)
        g_CD = tl.broadcast_to(g_C[:, None], inside_CD.shape)
    return g_CD, g_C


@triton.jit
def forward_walk(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, state, offsets, chunks, out, end, starts, unknown, q_row, q_head, k_row, k_head, v_row, v_head,
    heads: tl.constexpr, share: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, delta: tl.constexpr, each: tl.constexpr, given: tl.constexpr,
    keep: tl.constexpr, block: tl.constexpr, block_d: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """Results, the last state, and where they are kept the states that chunks began with."""
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    begin, finish = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    i_C, d_D, e_E = tl.arange(0, block), tl.arange(0, block_d), tl.program_id(1) * block_e + tl.arange(0, block_e)
    in_D, in_E = d_D < size, e_E < value_size
    whole_DE, inside_DE = d_D[:, None] * value_size + e_E[None, :], in_D[:, None] & in_E[None, :]
    place = sequence * heads + head
    state_DE = tl.zeros([block_d, block_e], tl.float32)
    if given:
        state_DE += tl.load(state + place * size * value_size + whole_DE, mask=inside_DE, other=0.0).to(tl.float32)
    chunk = tl.load(chunks + sequence)
    for first in range(begin, finish, block):
        rows_C = first + i_C
        in_C = rows_C < finish
        inside_CD, inside_CE = in_C[:, None] & in_D[None, :], in_C[:, None] & in_E[None, :]
        q_CD = _tokens(q, rows_C, q_row, head // share * q_head, d_D, inside_CD)
        k_CD = _tokens(k, rows_C, k_row, head // share * k_head, d_D, inside_CD)
        write_CE = _tokens(v, rows_C, v_row, head * v_head, e_E, inside_CE)
        g_CD, g_C = _decays(g, rows_C, head, heads, size, d_D, in_C, inside_CD, each)
        reads_CC, known_CC, _, fade_CD, rest_CD, last_D = _pairs(q_CD, k_CD, tl.maximum(g_CD, _LOWEST), tl.maximum(g_C, _LOWEST), each, block)
        if keep:
            tl.store(starts + (chunk * heads + head) * size * value_size + whole_DE, state_DE, mask=inside_DE)
        if delta:
            beta_C = tl.load(beta + rows_C * heads + head, mask=in_C, other=0.0).to(tl.float32)
            new_CE = write_CE - tl.dot(k_CD * fade_CD, state_DE, input_precision="ieee")
            write_CE = beta_C[:, None] * new_CE
            system_CC = beta_C[:, None] * known_CC
            for r in range(1, block):
                write_CE = tl.where(i_C[:, None] == r, write_CE - tl.sum(_row(system_CC, i_C, r)[:, None] * write_CE, 0)[None, :], write_CE)
            if keep:
                new_CE -= tl.dot(known_CC, write_CE, input_precision="ieee")
                tl.store(unknown + (rows_C[:, None] * heads + head) * value_size + e_E[None, :], new_CE, mask=inside_CE)
        out_CE = tl.dot(q_CD * fade_CD, state_DE, input_precision="ieee") + tl.dot(reads_CC, write_CE, input_precision="ieee")
        tl.store(out + (rows_C[:, None] * heads + head) * value_size + e_E[None, :], out_CE.to(out.dtype.element_ty), mask=inside_CE)
        state_DE = last_D[:, None] * state_DE + tl.dot(tl.trans(k_CD * rest_CD), write_CE, input_precision="ieee")
        chunk += 1
    tl.store(end + place * size * value_size + whole_DE, state_DE, mask=inside_DE)


@triton.jit
def backward_walk(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, offsets, chunks, end, starts, unknown, grad_out, grad_end, grad_starts, grad_written,
    grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state, tokens, q_row, q_head, k_row, k_head, v_row, v_head,
    heads: tl.constexpr, share: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr, delta: tl.constexpr, each: tl.constexpr, given: tl.constexpr,
    begun: tl.constexpr, written: tl.constexpr, block: tl.constexpr, block_d: tl.constexpr, block_e: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: gradients of all that was given, of queries, keys, decays and shares of writing this program's part."""
    sequence, head, part = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    begin, finish, chunk = tl.load(offsets + sequence), tl.load(offsets + sequence + 1), tl.load(chunks + sequence)
    i_C, d_D, e_E = tl.arange(0, block), tl.arange(0, block_d), part * block_e + tl.arange(0, block_e)
    in_D, in_E = d_D < size, e_E < value_size
    whole_DE, inside_DE = d_D[:, None] * value_size + e_E[None, :], in_D[:, None] & in_E[None, :]
    place = sequence * heads + head
    state_size = size * value_size
    grad_DE = tl.zeros([block_d, block_e], tl.float32)
    if given:
        grad_DE += tl.load(grad_end + place * state_size + whole_DE, mask=inside_DE, other=0.0)
    after_DE = tl.load(end + place * state_size + whole_DE, mask=inside_DE, other=0.0)
    runs = (finish - begin + block - 1) // block
    for back in range(runs):
        run = runs - 1 - back
        rows_C = begin + run * block + i_C
        in_C = rows_C < finish
        inside_CD, inside_CE = in_C[:, None] & in_D[None, :], in_C[:, None] & in_E[None, :]
        q_CD = _tokens(q, rows_C, q_row, head // share * q_head, d_D, inside_CD)
        k_CD = _tokens(k, rows_C, k_row, head // share * k_head, d_D, inside_CD)
        given_CD, given_C = _decays(g, rows_C, head, heads, size, d_D, in_C, inside_CD, each)
        g_CD, g_C = tl.maximum(given_CD, _LOWEST), tl.maximum(given_C, _LOWEST)
        reads_CC, known_CC, between_CC, fade_CD, rest_CD, last_D = _pairs(q_CD, k_CD, g_CD, g_C, each, block)
        state_DE = tl.load(starts + ((chunk + run) * heads + head) * state_size + whole_DE, mask=inside_DE, other=0.0)
        at_CE = (rows_C[:, None] * heads + head) * value_size + e_E[None, :]
        out_CE = tl.load(grad_out + at_CE, mask=inside_CE, other=0.0).to(tl.float32)
        write_CE = tl.zeros([block, block_e], tl.float32)
        beta_C = tl.zeros([block], tl.float32)
        if delta:
            beta_C += tl.load(beta + rows_C * heads + head, mask=in_C, other=0.0).to(tl.float32)
            new_CE = tl.load(unknown + at_CE, mask=inside_CE, other=0.0)
            write_CE += beta_C[:, None] * new_CE
        else:
            write_CE += _tokens(v, rows_C, v_row, head * v_head, e_E, inside_CE)
        value_CE = tl.dot(tl.trans(reads_CC), out_CE, input_precision="ieee") + tl.dot(k_CD * rest_CD, grad_DE, input_precision="ieee")
        if written:
            value_CE += tl.load(grad_written + at_CE, mask=inside_CE, other=0.0)
        if delta:
            system_CC = beta_C[:, None] * known_CC
            for step in range(1, block):
                r = block - 1 - step
                column_C = tl.sum(tl.where(i_C[None, :] == r, system_CC, 0.0), 1)
                value_CE = tl.where(i_C[:, None] == r, value_CE - tl.sum(column_C[:, None] * value_CE, 0)[None, :], value_CE)
            tl.store(grad_beta + (part * tokens + rows_C) * heads + head, tl.sum(value_CE * new_CE, 1), mask=in_C)
            value_CE = beta_C[:, None] * value_CE
        tl.store(grad_v + at_CE, value_CE.to(grad_v.dtype.element_ty), mask=inside_CE)
        reads_CC = tl.dot(out_CE, tl.trans(write_CE), input_precision="ieee")
        known_CC = -tl.dot(value_CE, tl.trans(write_CE), input_precision="ieee")
        query_CD = fade_CD * tl.dot(out_CE, tl.trans(state_DE), input_precision="ieee")
        asked_CD = rest_CD * tl.dot(write_CE, tl.trans(grad_DE), input_precision="ieee")
        asking_CD = tl.zeros([block, block_d], tl.float32)
        if delta:
            asking_CD -= fade_CD * tl.dot(value_CE, tl.trans(state_DE), input_precision="ieee")
        if each:
            for j in range(block):
                decay_CD, _ = _column(g_CD, i_C, j)
                key_CD = decay_CD * _row(k_CD, i_C, j)[None, :]
                read_C = tl.sum(tl.where(i_C[None, :] == j, reads_CC, 0.0), 1)
                query_CD += read_C[:, None] * key_CD
                asked_D = tl.sum(read_C[:, None] * decay_CD * q_CD, 0)
                if delta:
                    knows_C = tl.where(i_C > j, tl.sum(tl.where(i_C[None, :] == j, known_CC, 0.0), 1), 0.0)
                    asking_CD += knows_C[:, None] * key_CD
                    asked_D += tl.sum(knows_C[:, None] * decay_CD * k_CD, 0)
                asked_CD += tl.where(i_C[:, None] == j, asked_D[None, :], 0.0)
        else:
            reads_CC = reads_CC * between_CC
            query_CD += tl.dot(reads_CC, k_CD, input_precision="ieee")
            asked_CD += tl.dot(tl.trans(reads_CC), q_CD, input_precision="ieee")
            if delta:
                known_CC = tl.where(i_C[:, None] > i_C[None, :], known_CC * between_CC, 0.0)
                asking_CD += tl.dot(known_CC, k_CD, input_precision="ieee")
                asked_CD += tl.dot(tl.trans(known_CC), k_CD, input_precision="ieee")
        # What a token reads and asks fades with the sum until it, what it writes with the sum's opposite, and all with the whole chunk's.
        fades_CD = q_CD * query_CD + k_CD * (asking_CD - asked_CD)
        edge_D = tl.sum(after_DE * grad_DE, 1)
        if each:
            sums_CD = tl.cumsum(fades_CD, 0, reverse=True) + edge_D[None, :]
            at_CD = ((part * tokens + rows_C[:, None]) * heads + head) * size + d_D[None, :]
            tl.store(grad_g + at_CD, tl.where(given_CD < _LOWEST, 0.0, sums_CD), mask=inside_CD)
        else:
            sums_C = tl.cumsum(tl.sum(fades_CD, 1), 0, reverse=True) + tl.sum(edge_D, 0)
            tl.store(grad_g + (part * tokens + rows_C) * heads + head, tl.where(given_C < _LOWEST, 0.0, sums_C), mask=in_C)
        keys_CD = ((part * tokens + rows_C[:, None]) * heads + head) * size + d_D[None, :]
        tl.store(grad_q + keys_CD, query_CD, mask=inside_CD)
        tl.store(grad_k + keys_CD, asking_CD + asked_CD, mask=inside_CD)
        grad_DE = last_D[:, None] * grad_DE + tl.dot(tl.trans(q_CD * fade_CD), out_CE, input_precision="ieee")
        if delta:
            grad_DE -= tl.dot(tl.trans(k_CD * fade_CD), value_CE, input_precision="ieee")
        if begun:
            grad_DE += tl.load(grad_starts + ((chunk + run) * heads + head) * state_size + whole_DE, mask=inside_DE, other=0.0)
        after_DE = state_DE
    tl.store(grad_state + place * state_size + whole_DE, grad_DE, mask=inside_DE)


def _walk(given: Given, kept: Kept, gradients: Gradients | None) -> None:
    sequences, heads, size, value_size = kept.end_BHde.shape
    if not sequences:
        return
    grid = (sequences * heads, triton.cdiv(value_size, _VALUES))
    strides = [stride for x in given[:3] for stride in x.stride()[:2]]
    shapes = {
        "heads": heads,
        "share": heads // given.q_TGd.shape[1],
        "size": size,
        "value_size": value_size,
        "delta": given.beta_TH is not None,
        "each": given.g.ndim == 3,
        "block": given.run,
        "block_d": max(16, triton.next_power_of_2(size)),
        "block_e": _VALUES,
    }

    def there(x: Tensor | None) -> Tensor:
        return given.offsets_B1 if x is None else x  # what is missing is never read

    if gradients is None:
        keep, state = kept.starts_NHde is not None, given.state_BHde is not None
        forward_walk[grid](*map(there, (*given[:8], *kept)), *strides, given=state, keep=keep, **shapes)
    else:
        read = (*given[:5], *given[6:8], *kept[1:], *gradients)
        wanted = {name: x is not None for name, x in zip(("given", "begun", "written"), gradients[1:4], strict=True)}
        backward_walk[grid](*map(there, read), len(given.v_THe), *strides, **wanted, **shapes)


TRITON = Walker(lambda size, per_channel: 16 if per_channel else 32, lambda size, value_size: triton.cdiv(value_size, _VALUES), _walk)
