"""Residual codes: every level's code is the nearest row of its codebook to what the levels before left over.

``nearest`` is the plain quantiser, where items may share an id. ``place`` is the resolver: level by level, an item gets the
nearest code whose subtree still has room, so that no two items, and no item and a taken id, share one. Where more items
want a code than fit below it, those that would lose most by moving keep it; the others spill to the next nearest.
A subtree's room is the number of ids below it, hence whoever got a prefix finds a free id under it: no backtracking.
Legend: N items, L levels, K codes of a level, D dimensions, P prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from semantide.shared.errors import BadData
from semantide.shared.models.linear_map import FloatArray

IntArray = npt.NDArray[np.int64]

_CHUNK = 4096
_OPTIMAL_CELLS = 4_000_000  # largest cost matrix that is solved exactly; beyond it the greedy order stands


def squared_distances(rows: FloatArray, codebook: FloatArray) -> FloatArray:
    """[N, K], without the rows' own lengths squared: the order of the codes is the same, and one pass is saved."""
    return np.asarray((codebook * codebook).sum(axis=1) - 2 * (rows @ codebook.T), dtype=np.float32)


def in_chunks(count: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` for slices of ``count`` rows, several at a time; memory stays bounded and no sum depends on the order."""
    slices = [slice(begin, min(begin + _CHUNK, count)) for begin in range(0, count, _CHUNK)]
    if len(slices) < 2:
        for part in slices:
            work(part)
        return
    with ThreadPoolExecutor(min(len(slices), os.cpu_count() or 1)) as pool:
        list(pool.map(work, slices))


def nearest_code(rows: FloatArray, codebook: FloatArray) -> IntArray:
    """Index [N] of the nearest codebook row; the lower index where two are equally near."""
    codes = np.empty(len(rows), np.int64)

    def work(part: slice) -> None:
        codes[part] = squared_distances(rows[part], codebook).argmin(axis=1)

    in_chunks(len(rows), work)
    return codes


def choose_with_room(rows: FloatArray, parents: IntArray, codebook: FloatArray, room: Callable[[IntArray, IntArray], IntArray]) -> IntArray:
    """The nearest code with room below each item's prefix.

    ``room(parents, codes)`` says how many items may go to a code under a prefix.
    Shapes: ``rows`` [N, D], ``parents`` [N] (numbers of prefixes), returns [N].
    """
    count, size = len(rows), len(codebook)
    codes = np.full(count, -1, np.int64)
    taken: dict[int, int] = {}
    full: dict[int, list[int]] = {}  # codes without room, by prefix
    waiting = np.arange(count)
    while len(waiting):
        wish, regret = _wishes(rows, parents, codebook, waiting, full)
        cell = parents[waiting] * size + wish
        # Within a cell those that would lose most by moving come first; catalog order decides a tie.
        order = np.lexsort((waiting, -regret, cell))
        ranked = cell[order]
        first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
        cells = ranked[first]
        position = np.arange(len(ranked)) - np.repeat(first, np.diff(np.r_[first, len(ranked)]))
        left = room(cells // size, cells % size) - np.array([taken.get(int(c), 0) for c in cells], np.int64)
        accepted = position < np.repeat(left, np.diff(np.r_[first, len(ranked)]))
        codes[waiting[order[accepted]]] = wish[order[accepted]]
        gained = np.add.reduceat(accepted.astype(np.int64), first)
        for number, gain, free in zip(cells.tolist(), gained.tolist(), left.tolist(), strict=True):
            taken[number] = taken.get(number, 0) + gain
            if gain == free:
                full.setdefault(number // size, []).append(number % size)
        waiting = np.sort(waiting[order[~accepted]])
    return codes


def _wishes(rows: FloatArray, parents: IntArray, codebook: FloatArray, waiting: IntArray, full: dict[int, list[int]]) -> tuple[IntArray, FloatArray]:
    wish, regret = np.empty(len(waiting), np.int64), np.empty(len(waiting), np.float32)

    def work(part: slice) -> None:
        chosen = waiting[part]
        distance = squared_distances(rows[chosen], codebook)
        if full:
            for row, parent in enumerate(parents[chosen].tolist()):
                if parent in full:
                    distance[row, full[parent]] = np.inf
        best = distance.argmin(axis=1)
        wish[part] = best
        least = distance[np.arange(len(best)), best]
        assert np.isfinite(least).all(), "a prefix took more items than it has ids"
        distance[np.arange(len(best)), best] = np.inf
        regret[part] = distance.min(axis=1) - least

    in_chunks(len(waiting), work)
    return wish, regret


@dataclass(frozen=True)
class ResidualCodes:
    """The codebooks of all levels.

    Shapes: ``codebooks[l]`` [K_l, D].
    """

    codebooks: tuple[FloatArray, ...]

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Codes of each level."""
        return tuple(len(codebook) for codebook in self.codebooks)

    @cached_property
    def capacity(self) -> int:
        """How many ids there are."""
        return prod(self.level_sizes)

    def below(self, level: int) -> int:
        """How many ids begin with one prefix of ``level + 1`` codes."""
        return prod(self.level_sizes[level + 1 :])

    def nearest(self, vectors: FloatArray) -> IntArray:
        """Plain residual codes [N, L]; two items may get the same."""
        codes = np.empty((len(vectors), len(self.codebooks)), np.int64)
        residual = vectors.copy()
        for level, codebook in enumerate(self.codebooks):
            codes[:, level] = nearest_code(residual, codebook)
            residual -= codebook[codes[:, level]]
        return codes

    def decode(self, codes: IntArray) -> FloatArray:
        """The vectors [N, D] that ids stand for."""
        vectors = np.zeros((len(codes), self.codebooks[0].shape[1]), np.float32)
        for level, codebook in enumerate(self.codebooks):
            vectors += codebook[codes[:, level]]
        return vectors

    def prefix_numbers(self, codes: IntArray, levels: int) -> IntArray:
        """The first ``levels`` codes as one number [N] in mixed radix."""
        numbers = np.zeros(len(codes), np.int64)
        for level in range(levels):
            numbers = numbers * self.level_sizes[level] + codes[:, level]
        return numbers

    def place(self, vectors: FloatArray, taken: IntArray | None = None, *, optimal: bool = True) -> IntArray:
        """Distinct codes [N, L], none of them among ``taken`` [M, L].

        Raises: BadData when there are more items than ids.
        """
        taken = np.zeros((0, len(self.codebooks)), np.int64) if taken is None else taken
        if len(taken) + len(vectors) > self.capacity:
            raise BadData(
                f"{len(taken)} items have ids and {len(vectors)} more want one, but levels {self.level_sizes} spell only {self.capacity}: "
                "make a new catalog with larger or more levels (level_sizes)"
            )
        codes = np.empty((len(vectors), len(self.codebooks)), np.int64)
        residual = vectors.copy()
        for level in range(len(self.codebooks)):
            codes[:, level] = self.place_level(level, residual, codes[:, :level], taken, self.below(level), optimal=optimal)
            residual -= self.codebooks[level][codes[:, level]]
        return codes

    def place_level(self, level: int, residual: FloatArray, prefix: IntArray, taken: IntArray, most: int, *, optimal: bool = True) -> IntArray:
        """One level's codes [N] so that no prefix holds more than ``most`` items, taken ids included."""
        size = self.level_sizes[level]
        parents = self.prefix_numbers(prefix, level)
        used, counts = np.unique(self.prefix_numbers(taken, level + 1), return_counts=True)

        def room(groups: IntArray, choices: IntArray) -> IntArray:
            cells = groups * size + choices
            if not len(used):
                return np.full(len(cells), most, np.int64)
            at = np.minimum(np.searchsorted(used, cells), len(used) - 1)
            return most - np.where(used[at] == cells, counts[at], 0)

        if optimal and level == len(self.codebooks) - 1 and most == 1:
            codes, left = _assign(residual, parents, self.codebooks[level], used)
            codes[left] = choose_with_room(residual[left], parents[left], self.codebooks[level], room)
            return codes
        return choose_with_room(residual, parents, self.codebooks[level], room)


def _assign(residual: FloatArray, parents: IntArray, codebook: FloatArray, used: IntArray) -> tuple[IntArray, IntArray]:
    """Last codes of least total distance within each prefix [N], and the rows of prefixes too large to be solved so."""
    size = len(codebook)
    codes = nearest_code(residual, codebook)
    wish, counts = np.unique(parents * size + codes, return_counts=True)
    contested = np.unique(wish[(counts > 1) | np.isin(wish, used)] // size)
    left: list[IntArray] = [np.zeros(0, np.int64)]
    order = np.argsort(parents, kind="stable")
    bounds = np.searchsorted(parents[order], np.stack([contested, contested + 1]))
    for parent, begin, end in zip(contested.tolist(), *bounds.tolist(), strict=True):
        rows = order[begin:end]
        if len(rows) * size > _OPTIMAL_CELLS:
            left.append(rows)
            continue
        free = np.ones(size, bool)
        low, high = np.searchsorted(used, [parent * size, (parent + 1) * size])
        free[used[low:high] - parent * size] = False
        choices = np.flatnonzero(free)
        chosen_rows, chosen = linear_sum_assignment(squared_distances(residual[rows], codebook[choices]).astype(np.float64))
        codes[rows[chosen_rows]] = choices[chosen]
    return codes, np.sort(np.concatenate(left))
