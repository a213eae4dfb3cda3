"""A share of the places for items that are younger than the model.

A model knows a new item by its codes alone, and ranks it low as long as nobody has acted upon it, so nobody ever does. A deployment may therefore give new items a share of
the places. They are found by a search of their own, restricted to them, and drawn from what it found with the model's own probabilities: who would rather like one
sees it. Everything is seeded, so the same request gets the same list.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from semantide.services.serving.engine import Recommendation

POOL = 50  # new items among which the draw is made


class Mixed(NamedTuple):
    """A list with new items in it; ``explored`` are those that stand there for being new."""

    items: tuple[Recommendation, ...]
    explored: frozenset[str] = frozenset()


def seed_of(*parts: object) -> int:
    """A number from anything that can be written, other parts another number."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def places(n: int, share: float, seed: int) -> tuple[int, ...]:
    """Which of n places are meant for new items: ``share`` of them on average, never the first where there are others."""
    rng = np.random.default_rng(seed)
    # What is left of a place is given with that chance, so that small shares count on short lists too.
    count = math.floor(n * share + rng.random())
    free = np.arange(n) if n == 1 or share >= 1 else np.arange(1, n)
    return tuple(sorted(rng.choice(free, min(count, len(free)), replace=False).tolist()))


def mix(ranked: Sequence[Recommendation], fresh: Sequence[Recommendation], wanted: Sequence[int], new: Set[str], seed: int) -> Mixed:
    """Put new items into a ranking, at the wanted places. ``new`` are those items of the ranking that are new by themselves; they count."""
    n = len(ranked)
    known = {hit.item for hit in ranked}
    pool = [hit for hit in fresh if hit.item not in known]
    usable = [place for place in wanted if place < n]
    extra = 0
    while extra < min(len(usable), len(pool)) and extra + sum(hit.item in new for hit in ranked[: n - extra]) < len(usable):
        extra += 1
    if not extra:
        return Mixed(tuple(ranked))
    rng = np.random.default_rng((seed, 1))  # independent of what chose the places
    # The largest of scores with Gumbel noise are a draw without replacement from their softmax.
    noisy = np.array([hit.score for hit in pool]) + rng.gumbel(size=len(pool))
    drawn = iter([pool[index] for index in np.argsort(-noisy)[:extra]])
    chosen = set(rng.choice(usable, extra, replace=False).tolist())
    rest = iter(ranked)
    items = tuple(next(drawn) if place in chosen else next(rest) for place in range(n))
    return Mixed(items, frozenset(hit.item for hit in items) - known)
