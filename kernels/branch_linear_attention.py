"""Linear attention of branches: short runs of tokens, each of which goes on from some place of a packed sequence (the trunk) and sees nothing of the others.

No branch has a state of its own, forward or backward. A token of a chunk is read off the state that the chunk began with and off the tokens since, and so may be a token
x behind place p of that chunk, with G the sum of logarithms of decay since the chunk began, along the way to x:

    U(x) = e^G S^T x + sum_(j <= p) e^(G - G_j) (k_j^T x) w_j + sum_(i of its branch, before it) e^(G - G_i) (k_i^T x) w_i

What tokens of the trunk wrote, w_j, is known; what those of a branch write solves one triangular system over the branch. Branches behind one chunk are rows of the same
products, a tile of them at a time, and what a tile needs is made again on the way back.
Legend: as in linear_attention.py; T tokens of the trunk and behind them those of branches, I the latter alone, J branches, M tiles, X rows of a tile, C tokens of a chunk,
z queries alone, or with keys.
Source: OneLA (arXiv 2609.12399), its tree of suffix tokens, with a chunk in the place of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from semantide.kernels.dispatch import kernel
from semantide.kernels.linear_attention import LOWEST, Rule, linear_attention, linear_chunks

_GROUP_BYTES = 64 * 2**20  # of tables of pairs and of states, for the tiles that are read at once


class _Tokens(NamedTuple):
    """What the operator takes of tokens."""

    q_TGd: Tensor
    k_TGd: Tensor
    v_THe: Tensor
    g: Tensor
    beta_TH: Tensor | None

    def at(self, rows: Tensor | slice) -> _Tokens:
        return _Tokens._make(None if x is None else x[rows] for x in self)

    def split(self, sizes: list[int]) -> Iterator[_Tokens]:
        return map(_Tokens._make, zip(*([None] * len(sizes) if x is None else x.split(sizes) for x in self), strict=True))


class TileGroup(NamedTuple):
    """Tiles that are read at once, and where their tokens are among the group's; what there is not has the number behind the last.

    Shapes: ``keys_MC`` tokens of each tile's chunk, ``rows_MX`` those of its branches; ``seen_MX`` how many of the chunk a row sees, ``first_MX`` the row that its branch
    begins with; ``chunk_M`` the tile's chunk; ``at_I`` each token's place among all rows.
    """

    keys_MC: Tensor
    rows_MX: Tensor
    seen_MX: Tensor
    first_MX: Tensor
    chunk_M: Tensor
    at_I: Tensor


class TilePart(NamedTuple):
    """Successive chunks and their tokens, which no other part reads, and who reads them."""

    chunks: int
    tokens: int
    groups: tuple[TileGroup, ...]


class Branches:
    """Where branches go on from, and which tokens are whose.

    Shapes: ``offsets_B1`` of the trunk's sequences, ``ends_J`` the places behind the last one that each branch sees, ``offsets_J1`` of the branches' tokens.
    Raises: ValueError where a branch sees no token.
    """

    def __init__(self, offsets_B1: Tensor, ends_J: Tensor, offsets_J1: Tensor) -> None:
        self.offsets_B1, self.ends_J, self.offsets_J1 = offsets_B1, ends_J, offsets_J1
        self.trunk, self.tokens = int(offsets_B1[-1]), int(offsets_J1[-1])
        self.longest = int(offsets_J1.diff().max()) if len(ends_J) else 0
        sequences = len(offsets_B1) - 1
        self.sequences_J = torch.searchsorted(offsets_B1, ends_J) - 1
        wrong_J = (self.sequences_J < 0) | (self.sequences_J >= sequences)
        if bool(wrong_J.any()):
            raise ValueError(
                f"{int(wrong_J.sum())} of {len(wrong_J)} branches go on from no token of {self.trunk}: name the place behind the last token that each sees"
            )
        self.begins_J = offsets_B1[self.sequences_J]
        self._tiles: dict[tuple[int, int], tuple[Tensor, tuple[TilePart, ...]]] = {}

    def inputs_before(self, x_TC: Tensor, many: int) -> Tensor:
        """The last so many rows of the trunk that each branch sees, oldest first, and zeros before a sequence's first: [T, C] -> [J, many, C]."""
        rows_JQ = self.ends_J[:, None] + torch.arange(-many, 0, device=x_TC.device)
        return x_TC[rows_JQ.clamp(min=0)].masked_fill((rows_JQ < self.begins_J[:, None]).unsqueeze(-1), 0)

    def tiles(self, run: int, most: int) -> tuple[Tensor, tuple[TilePart, ...]]:
        """The branches' tokens tile by tile, [I], and the tiles, at most so many in a group, for chunks of so many tokens; worked out once for all layers."""
        if (run, most) not in self._tiles:
            self._tiles[run, most] = self._tiled(run, most)
        return self._tiles[run, most]

    def _tiled(self, run: int, most: int) -> tuple[Tensor, tuple[TilePart, ...]]:
        device = self.ends_J.device
        offsets_B1, offsets_J1, ends_J, sequences_J = (x.cpu() for x in (self.offsets_B1, self.offsets_J1, self.ends_J, self.sequences_J))
        chunks_B = (offsets_B1.diff() + run - 1) // run
        first_B, many = chunks_B.cumsum(0) - chunks_B, int(chunks_B.sum())
        begins_N1 = torch.cat([offsets_B1[:-1].repeat_interleave(chunks_B) + run * (torch.arange(many) - first_B.repeat_interleave(chunks_B)), offsets_B1[-1:]])
        behind_J = ends_J - offsets_B1[sequences_J] - 1
        chunk_J, seen_J, lengths_J = first_B[sequences_J] + behind_J // run, behind_J % run + 1, offsets_J1.diff()
        order_J = chunk_J.argsort(stable=True)
        order_J = order_J[lengths_J[order_J] > 0]
        if not len(order_J):
            return order_J.to(device), ()
        behind_N = torch.zeros(many, dtype=torch.long).index_add_(0, chunk_J, lengths_J)
        rows = min(max(run, int(lengths_J.max())), int(behind_N.max()))
        tile_J, row_J = torch.zeros_like(order_J), torch.zeros_like(order_J)
        chunks: list[int] = []
        used = 0
        for place, (chunk, length) in enumerate(zip(chunk_J[order_J].tolist(), lengths_J[order_J].tolist(), strict=True)):
            if not chunks or chunk != chunks[-1] or used + length > rows:
                chunks.append(chunk)
                used = 0
            tile_J[place], row_J[place] = len(chunks) - 1, used
            used += length
        lengths_J = lengths_J[order_J]
        within_I = torch.arange(int(lengths_J.sum())) - (lengths_J.cumsum(0) - lengths_J).repeat_interleave(lengths_J)
        own_I, begin_I, tile_I, seen_I = (x.repeat_interleave(lengths_J) for x in (offsets_J1[order_J], row_J, tile_J, seen_J[order_J]))
        at_I = tile_I * rows + begin_I + within_I
        seen_MX = torch.zeros(len(chunks) * rows, dtype=torch.long)
        first_MX = torch.arange(rows).repeat(len(chunks))
        seen_MX[at_I], first_MX[at_I] = seen_I, begin_I
        parts = []
        for first, behind, tiles in _ranges(chunks, many, most):
            start, stop = int(begins_N1[first]), int(begins_N1[behind])
            groups = []
            for low, high in tiles:
                span = slice(*torch.searchsorted(tile_I, torch.tensor([low, high])).tolist())
                inside_I = at_I[span] - low * rows
                rows_MX = torch.full(((high - low) * rows,), len(inside_I))
                rows_MX[inside_I] = torch.arange(len(inside_I))
                chunk_M = torch.tensor(chunks[low:high])
                keys_MC = begins_N1[chunk_M][:, None] + torch.arange(run)
                keys_MC = torch.where(keys_MC < begins_N1[chunk_M + 1][:, None], keys_MC, stop) - start
                shape = (high - low, rows)
                marks = (rows_MX.view(shape), *(x[low * rows : high * rows].view(shape) for x in (seen_MX, first_MX)))
                groups.append(TileGroup(*(x.to(device) for x in (keys_MC, *marks, chunk_M - first, inside_I))))
            parts.append(TilePart(behind - first, stop - start, tuple(groups)))
        return (own_I + within_I).to(device), tuple(parts)


def _ranges(chunks: list[int], many: int, most: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Successive ranges of all chunks, each with groups of tiles [low, high); ``chunks`` is that of each tile."""
    begins = [tile for tile in range(len(chunks)) if not tile or chunks[tile] != chunks[tile - 1]]
    firsts: list[int] = []
    for tile in begins:
        if not firsts or tile - firsts[-1] >= most:
            firsts.append(tile)
    bounds = [0, *(chunks[tile] for tile in firsts[1:]), many]
    ends = [*firsts[1:], len(chunks)]
    return [
        (bounds[part], bounds[part + 1], [(low, min(low + most, end)) for low in range(first, end, most)])
        for part, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]


@kernel
def branch_linear_attention(q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, branches: Branches, rule: Rule) -> Tensor:
    """What each token of the trunk, and behind these each token of a branch, reads: as if every branch followed a trunk of its own, [T, H, e].

    Shapes: as of ``linear_attention``, the trunk's tokens first.
    Raises: ValueError when shapes do not fit.
    """
    trunk, given = branches.trunk, _Tokens(q_TGd, k_TGd, v_THe, g, beta_TH)
    out_THe, _ = linear_attention.reference(*given.at(slice(trunk)), branches.offsets_B1, None, rule)
    spans = zip(branches.begins_J.tolist(), branches.ends_J.tolist(), branches.offsets_J1.tolist(), branches.offsets_J1[1:].tolist(), strict=False)
    ways = [torch.cat([torch.arange(begin, end), trunk + torch.arange(own, last)]).to(v_THe.device) for begin, end, own, last in spans]
    rows = torch.cat([torch.arange(0, device=v_THe.device), *ways])
    offsets_J1 = torch.tensor([0, *accumulate(map(len, ways))], device=v_THe.device)
    own_THe, _ = linear_attention.reference(*given.at(rows), offsets_J1, None, rule)
    return torch.cat([out_THe, own_THe[rows >= trunk]])


@branch_linear_attention.register("cpu")
@branch_linear_attention.register("cuda")
@branch_linear_attention.register("npu")
def branch_linear_attention_tiled(q_TGd: Tensor, k_TGd: Tensor, v_THe: Tensor, g: Tensor, beta_TH: Tensor | None, branches: Branches, rule: Rule) -> Tensor:
    """One walk over the trunk, and products with the states that its chunks began with; no table is kept for the way back."""
    with torch.autocast(v_THe.device.type, enabled=False):
        return _tiled(_Tokens(q_TGd, k_TGd, v_THe, g, beta_TH), branches, rule)


def _tiled(given: _Tokens, branches: Branches, rule: Rule) -> Tensor:
    trunk, own = given.at(slice(branches.trunk)), given.at(slice(branches.trunk, None))
    walked = linear_chunks(*trunk, branches.offsets_B1, None, rule)
    if len(own.v_THe) != branches.tokens:
        raise ValueError(
            f"{len(own.v_THe)} tokens behind a trunk of {branches.trunk}, but {branches.tokens} in branches: give each branch's tokens behind the trunk's"
        )
    (heads, value_size), size = given.v_THe.shape[1:], given.q_TGd.shape[2]
    rows = max(walked.run, branches.longest)
    pairs = rows * (walked.run + rows) * (size if rule.per_channel else 2)
    order_I, parts = branches.tiles(walked.run, max(1, _GROUP_BYTES // (4 * heads * (pairs + size * value_size))))
    if not len(order_I):
        return walked.out_THe
    assert walked.starts_NHde is not None
    written_THe = trunk.v_THe if walked.written_THe is None else walked.written_THe
    tokens = [part.tokens for part in parts]
    states = walked.starts_NHde.split([part.chunks for part in parts])
    pieces = zip(parts, states, *(x.split(tokens) for x in (trunk.k_TGd, written_THe, trunk.g)), strict=True)
    runs = own.at(order_I).split([len(group.at_I) for part in parts for group in part.groups])
    kept = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    outputs: list[Tensor] = []
    for part, starts, k, written, g in pieces:
        for group in part.groups:
            read = partial(_read, group, rule, starts, k, written, g, *next(runs))
            outputs.append(checkpoint(read, use_reentrant=False, preserve_rng_state=False) if kept else read())
    return torch.cat([walked.out_THe, torch.cat(outputs).to(walked.out_THe.dtype)[order_I.argsort()]])


def _read(
    group: TileGroup,
    rule: Rule,
    starts_NHde: Tensor,
    trunk_k: Tensor,
    written: Tensor,
    trunk_g: Tensor,
    q_IGd: Tensor,
    k_IGd: Tensor,
    v_IHe: Tensor,
    g_I: Tensor,
    beta_IH: Tensor | None,
) -> Tensor:
    """What the tokens of the group's branches read, [I, H, e]."""
    wide, share = starts_NHde.dtype, v_IHe.shape[1] // q_IGd.shape[1]

    def laid(x: Tensor, places: Tensor) -> Tensor:
        """[tokens, heads, ...] -> [M, heads, places, ...], with zeros where no token is."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[places].transpose(1, 2)

    def sums(g: Tensor, places: Tensor) -> Tensor:
        """Logarithms of decay added up, [M, H, places, 1 or d]."""
        added = laid(g.double().clamp(min=LOWEST), places).cumsum(2)
        return added if rule.per_channel else added.unsqueeze(-1)

    def at(x: Tensor, places_MX: Tensor) -> Tensor:
        return x.gather(2, places_MX[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    key, write = laid(trunk_k.to(wide), group.keys_MC).repeat_interleave(share, 1), laid(written.to(wide), group.keys_MC)
    q, k = (laid(x.to(wide), group.rows_MX).repeat_interleave(share, 1) for x in (q_IGd, k_IGd))
    v, until, own = laid(v_IHe.to(wide), group.rows_MX), sums(trunk_g, group.keys_MC), sums(g_I, group.rows_MX)
    before = torch.cat([torch.zeros_like(own[:, :, :1]), own], 2)  # entry i is the sum up to row i, its own not among them
    since = own - at(before, group.first_MX) + at(until, (group.seen_MX - 1).clamp(min=0))
    row_X = torch.arange(q.shape[2], device=q.device)
    unseen_MXC = torch.arange(key.shape[2], device=q.device) >= group.seen_MX[:, :, None]
    other_MXX = (row_X > row_X[:, None]) | (row_X < group.first_MX[:, :, None])
    x = q.unsqueeze(2) if beta_IH is None else torch.stack([q, k], 2)
    from_chunk = _pairs(x, key, since, until, unseen_MXC)
    from_own = _pairs(x, k, own, own, other_MXX)
    flat = (x * since.to(wide).exp().unsqueeze(2)).flatten(2, 3) @ starts_NHde[group.chunk_M] + from_chunk.flatten(2, 3) @ write
    read, *known = flat.unflatten(2, x.shape[2:4]).unbind(2)
    if beta_IH is not None:
        beta = laid(beta_IH.to(wide), group.rows_MX).unsqueeze(-1)
        v = torch.linalg.solve_triangular(beta * from_own[:, :, 1], beta * (v - known[0]), upper=False, unitriangular=True)
    out_MXHe = (read + from_own[:, :, 0] @ v).transpose(1, 2)
    out_IHe: Tensor = out_MXHe.flatten(0, 1)[group.at_I]
    return out_IHe


def _pairs(x: Tensor, k: Tensor, later: Tensor, earlier: Tensor, apart: Tensor) -> Tensor:
    """Products of rows with keys, faded by what lies between, and zero where they are apart: [M, H, z, X, d], [M, H, C, d] -> [M, H, z, X, C]."""
    if later.shape[-1] == 1:
        fade = (later - earlier.transpose(-1, -2)).masked_fill(apart[:, None], -torch.inf).to(x.dtype).exp()
        alike: Tensor = (x.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, x.shape[2:4]) * fade.unsqueeze(2)
        return alike
    fade = (later.unsqueeze(3) - earlier.unsqueeze(2)).masked_fill(apart[:, None, :, :, None], -torch.inf).to(x.dtype).exp()
    found: Tensor = torch.einsum("mhzxd,mhxcd->mhzxc", x, k.unsqueeze(2) * fade)
    return found
