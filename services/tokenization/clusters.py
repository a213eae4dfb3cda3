"""Residual k-means: fits the codebooks level by level and places every item as it goes.

Same input and seed give the same codebooks: seeding, assignment and the sums behind the centroids run in a fixed order.
Legend: N items, L levels, K codes, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, prod

import numpy as np
import scipy.sparse as sp

from semantide.shared.models.linear_map import FloatArray
from semantide.shared.models.residual_codes import IntArray, ResidualCodes, in_chunks, nearest_code, squared_distances
from semantide.shared.models.tokenizer import Tick, TokenizerConfig, silent

_SEED_ROWS = 32  # rows per code that k-means++ looks at


def level_sizes_for(num_items: int) -> tuple[int, ...]:
    """Levels for a catalog of this size, with room for at least half as many items again.

    Two levels while 4,096 first codes leave about a dozen items each: short ids are predicted in fewer steps, and a fine first
    level is where a generator gains most (on Amazon Beauty 1,024 x 64 against 256 x 256: Recall@10 .062 against .053).
    """
    first = 16
    while first * 12 < num_items:
        first *= 2
    if first <= 4096:
        return first, 64
    for levels in (3, 4, 5, 6):
        if 1024 * 256 ** (levels - 1) >= 1.5 * num_items:
            return (1024, *(256,) * (levels - 1))
    raise ValueError(f"{num_items} items: give level_sizes yourself")


def _row_lengths(rows: FloatArray) -> FloatArray:
    return np.asarray(np.einsum("nd,nd->n", rows, rows))


def _seed_centres(rows: FloatArray, size: int, random: np.random.Generator) -> FloatArray:
    """k-means++ with several tries a centre."""
    if len(rows) > _SEED_ROWS * size:
        rows = rows[np.sort(random.choice(len(rows), _SEED_ROWS * size, replace=False))]
    lengths = _row_lengths(rows)
    centres = np.empty((size, rows.shape[1]), np.float32)
    centres[0] = rows[random.integers(len(rows))]
    closest = np.maximum(lengths + squared_distances(rows, centres[:1])[:, 0], 0).astype(np.float64)
    tries = 2 + int(log(size))
    for number in range(1, size):
        mass = np.cumsum(closest)
        if mass[-1] <= 0:  # fewer distinct rows than codes: the rest stay on top of the first and unused
            centres[number:] = centres[0]
            break
        picks = np.minimum(np.searchsorted(mass, random.random(tries) * mass[-1], side="right"), len(rows) - 1)
        candidates = np.minimum(closest[:, None], np.maximum(lengths[:, None] + squared_distances(rows, rows[picks]), 0))
        best = int(candidates.sum(axis=0).argmin())
        centres[number], closest = rows[picks[best]], candidates[:, best]
    return centres


def _assign(rows: FloatArray, centres: FloatArray) -> tuple[IntArray, FloatArray]:
    codes, distance = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)

    def work(part: slice) -> None:
        near = squared_distances(rows[part], centres)
        codes[part] = near.argmin(axis=1)
        distance[part] = near.min(axis=1)

    in_chunks(len(rows), work)
    return codes, np.maximum(distance + _row_lengths(rows), 0)


def means(rows: FloatArray, codes: IntArray, centres: FloatArray) -> FloatArray:
    """Mean of each code's rows; the old centre where a code has none."""
    size = len(centres)
    member = sp.csr_matrix((np.ones(len(rows), np.float32), (codes, np.arange(len(rows)))), shape=(size, len(rows)))
    counts = np.bincount(codes, minlength=size)[:, None]
    return np.where(counts > 0, (member @ rows) / np.maximum(counts, 1), centres).astype(np.float32)


def kmeans(rows: FloatArray, size: int, random: np.random.Generator, iterations: int, tick: Tick = silent, stage: str = "clusters") -> FloatArray:
    """Centres [K, D] of the rows [N, D]; an empty cluster is given the row that is worst off, while there is one."""
    centres = _seed_centres(rows, size, random)
    before = np.inf
    for iteration in range(iterations):
        tick(stage, iteration, iterations)
        codes, distance = _assign(rows, centres)
        empty = np.flatnonzero(np.bincount(codes, minlength=size) == 0)
        if len(empty):
            worst = np.argsort(-distance, kind="stable")[: len(empty)]
            worst = worst[distance[worst] > 1e-10]
            codes[worst] = empty[: len(worst)]
        centres = means(rows, codes, centres)
        inertia = float(distance.sum(dtype=np.float64))
        if not len(empty) and inertia >= before * (1 - 1e-4):
            break
        before = inertia
    return centres


@dataclass(frozen=True)
class Spelling:
    """Codebooks, plain codes (where items may share an id) and the distinct codes that the items got."""

    codes: ResidualCodes
    plain: IntArray
    placed: IntArray


def most_below(level_sizes: tuple[int, ...], num_items: int, fill: float, balance: float) -> list[int]:
    """Most items that a prefix of each length may hold; whoever fits below a prefix fits below its children.

    Raises: ValueError when there are more items than ids.
    """
    if num_items > prod(level_sizes):
        raise ValueError(f"{num_items} items do not fit into levels {level_sizes} ({prod(level_sizes)} ids): give larger or more level_sizes")
    most = [1]
    for level in range(len(level_sizes) - 1, 0, -1):
        share = fill if level == len(level_sizes) - 1 else 1.0
        most.insert(0, max(1, int(share * level_sizes[level])) * most[0])
    if num_items > level_sizes[0] * most[0]:
        return most_below(level_sizes, num_items, 1.0, balance)
    if balance:
        above = num_items
        for level in range(len(level_sizes) - 1):
            above = most[level] = min(most[level], ceil(balance * above / level_sizes[level]))
    return most


def fit(vectors: FloatArray, config: TokenizerConfig, seed: int, tick: Tick = silent) -> Spelling:
    """Codebooks for the vectors [N, D], and a distinct id for each."""
    sizes = config.level_sizes or level_sizes_for(len(vectors))
    total = (*sizes, config.append_size) if config.resolver == "append" else sizes
    most = most_below(total, len(vectors), 1.0 if config.resolver == "append" else config.fill, config.balance)
    random = np.random.default_rng(seed)
    books: list[FloatArray] = []
    placed = np.empty((len(vectors), len(total)), np.int64)
    nothing = np.zeros((0, len(total)), np.int64)
    residual = vectors.copy()
    for level, size in enumerate(total):
        stage = f"level {level + 1} of {len(total)}"
        if level < len(sizes):
            sample = residual
            if len(residual) > config.fit_rows:
                sample = residual[np.sort(random.choice(len(residual), config.fit_rows, replace=False))]
            books.append(kmeans(sample, size, random, config.iterations, tick, stage))
        else:
            # The appended level says nothing about an item: all its codes are equally near, the lowest free one is taken.
            books.append(np.zeros((size, vectors.shape[1]), np.float32))
        so_far = ResidualCodes((*books, *(np.zeros((rest, vectors.shape[1]), np.float32) for rest in total[level + 1 :])))
        placed[:, level] = so_far.place_level(level, residual, placed[:, :level], nothing, most[level], optimal=config.assignment == "optimal")
        if level < len(total) - 1 and level < len(sizes) and (placed[:, level] != nearest_code(residual, books[level])).any():
            books[level] = means(residual, placed[:, level], books[level])
        residual -= books[level][placed[:, level]]
        tick(stage, 1, 1)
    codes = ResidualCodes(tuple(books))
    plain = codes.nearest(vectors)
    return Spelling(codes, plain, placed)
