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
import numpy.typing as npt

from semantide.services.serving.engine import Recommendation

IntArray = npt.NDArray[np.int64]

POOL = 50  # new items among which the draw is made


class Mixed(NamedTuple):
    """A list with new items in it; ``explored`` are those that stand there for being new.

    ``propensities`` are the chances with which each item came to its place, given the places before it; empty where nobody knows them.
    """

    items: tuple[Recommendation, ...]
    explored: frozenset[str] = frozenset()
    propensities: tuple[float, ...] = ()


def seed_of(*parts: object) -> int:
    """A number from anything that can be written, other parts another number."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def places(n: int, share: float, seed: int) -> tuple[int, ...]:
    """Which of n places are meant for new items: ``share`` of them on average, never the first where there are others."""
    rng = np.random.default_rng(seed)
    # What is left of a place is given with that chance, so that small shares count on short lists too.
    count = math.floor(n * share + rng.random())
    free = _free(n, share)
    return tuple(sorted(rng.choice(free, min(count, len(free)), replace=False).tolist()))


def mix(
    ranked: Sequence[Recommendation], fresh: Sequence[Recommendation], wanted: Sequence[int], new: Set[str], seed: int, *, n: int = 0, share: float = 0.0
) -> Mixed:
    """Put new items into a ranking, at the wanted places. ``new`` are those items of the ranking that are new by themselves; they count.

    ``n`` and ``share`` are what the places were drawn with; without them nothing is said of chances.
    """
    known = {hit.item for hit in ranked}
    pool = [hit for hit in fresh if hit.item not in known]
    usable = [place for place in wanted if place < len(ranked)]
    extra = _extra(len(usable), ranked, len(pool), new)
    rng = np.random.default_rng((seed, 1))  # independent of what chose the places
    # The largest of scores with Gumbel noise are a draw without replacement from their softmax.
    noisy = np.array([hit.score for hit in pool]) + rng.gumbel(size=len(pool))
    order = np.argsort(-noisy)[:extra].tolist()
    drawn = iter([pool[index] for index in order])
    chosen = set(rng.choice(usable, extra, replace=False).tolist()) if extra else set()
    rest = iter(ranked)
    items = tuple(next(drawn) if place in chosen else next(rest) for place in range(len(ranked)))
    return Mixed(items, frozenset(hit.item for hit in items) - known, _propensities(ranked, pool, wanted, new, chosen, order, n, share))


def _free(n: int, share: float) -> IntArray:
    """The places that may go to new items."""
    return np.arange(n) if n == 1 or share >= 1 else np.arange(1, n)


def _extra(places: int, ranked: Sequence[Recommendation], fresh: int, new: Set[str]) -> int:
    """How many new items come into the ranking, where so many places are meant for them."""
    extra = 0
    while extra < min(places, fresh) and extra + sum(hit.item in new for hit in ranked[: len(ranked) - extra]) < places:
        extra += 1
    return extra


def _propensities(
    ranked: Sequence[Recommendation],
    pool: Sequence[Recommendation],
    wanted: Sequence[int],
    new: Set[str],
    chosen: Set[int],
    order: Sequence[int],
    n: int,
    share: float,
) -> tuple[float, ...]:
    """The chance of each choice given those before it: whether a place goes to a new item, and which one."""
    if not share:
        return (1.0,) * len(ranked)
    if not ranked or len(ranked) != n:
        return ()  # of a list that is too short the places were drawn for another length
    free = set(_free(n, share).tolist())
    whole = math.floor(n * share)
    searched = len(pool) if wanted else n  # where no place was drawn nobody looked how many there are
    cases = [(1 - (n * share - whole), whole), (n * share - whole, whole + 1)]
    weights = [(chance, float(_extra(min(count, len(free)), ranked, searched, new))) for chance, count in cases if chance > 0]
    scores = np.array([hit.score for hit in pool])
    left = np.ones(len(pool), dtype=np.bool_)
    chances, used, remaining = [], 0, len(free)
    for place in range(n):
        if place not in free:
            chances.append(1.0)
            continue
        if not (total := sum(chance for chance, _ in weights)):
            return ()  # the search among new items failed, and the places that were drawn for them went back
        fresh = sum(chance * (extra - used) / remaining for chance, extra in weights) / total
        if place in chosen:
            odds = np.exp(scores - scores[left].max()) * left
            chances.append(float(fresh * odds[order[used]] / odds.sum()))
            left[order[used]] = False
            weights = [(chance * (extra - used) / remaining, extra) for chance, extra in weights if extra > used]
            used += 1
        else:
            chances.append(float(1 - fresh))
            weights = [(chance * (1 - (extra - used) / remaining), extra) for chance, extra in weights if extra - used < remaining]
        remaining -= 1
    return tuple(chances)
