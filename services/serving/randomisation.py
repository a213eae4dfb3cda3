"""A share of the places for items that the search found and did not rank high enough, drawn by chance.

A list that always shows what a model ranks first tells nothing of what it passes over, and a later model learns of the earlier one's choices only. Where each place goes with a small known chance to an item drawn
among the next best ones, exposures and their propensities let other models be judged, and rewards be learned, without that bias. Draws are seeded, so the same request gets the same list.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semantide.services.serving.engine import Recommendation
from semantide.services.serving.exploration import Mixed

SPARE = 20  # items beyond the list among which draws are made


def spare(n: int, width: int) -> int:
    """How many items beyond n a search of this width may give besides."""
    return min(SPARE, max(0, width - n))


def randomise(mixed: Mixed, beyond: Sequence[Recommendation], share: float, seed: int) -> Mixed:
    """Give each place that no new item has, with this chance, to one of the items ``beyond`` the list, each as likely as the others and once."""
    if not beyond or not share:
        return mixed
    rng = np.random.default_rng((seed, 2))
    drawn = [beyond[index] for index in rng.permutation(len(beyond)).tolist()]
    luck = rng.random(len(mixed.items))
    items, chances, used = list(mixed.items), list(mixed.propensities), 0
    for place, hit in enumerate(mixed.items):
        if hit.item in mixed.explored or used == len(drawn):
            continue
        takes = bool(luck[place] < share)
        if chances:
            chances[place] *= share / (len(drawn) - used) if takes else 1 - share
        if takes:
            items[place] = drawn[used]
            used += 1
    return Mixed(tuple(items), mixed.explored, tuple(chances))
