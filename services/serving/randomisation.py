"""A share of the places for items that the search found and did not rank first there, drawn by chance.

A list that always shows what a model ranks first tells nothing of what it passes over, and a later model learns of the earlier one's choices only. Where each place goes with a small known chance to one of the next
best items, be it one that comes later in the list or one that would not come at all, exposures and their propensities let other models be judged, which rank in another order or other items, and rewards be learned, without
that bias. Draws are seeded, so the same request gets the same list.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semantide.services.serving.engine import Recommendation
from semantide.services.serving.exploration import Mixed

SPARE = 20  # next best items among which draws are made


def spare(n: int, width: int) -> int:
    """How many items beyond n a search of this width may give besides."""
    return min(SPARE, max(0, width - n))


def randomise(mixed: Mixed, ranked: Sequence[Recommendation], beyond: Sequence[Recommendation], share: float, seed: int) -> Mixed:
    """Give each place that no new item has, with this chance, to one of the ``SPARE`` best items after the best that is left, each as likely; what it takes the place of comes next.

    ``ranked`` is the list as it was before new items came into it, and ``beyond`` what follows: so what is drawn among is known from the places before, whatever new items come later.
    """
    if not share:
        return mixed
    rng = np.random.default_rng((seed, 2))
    luck, left = rng.random((len(mixed.items), 2)), [*ranked, *beyond]
    items, chances = list(mixed.items), list(mixed.propensities)
    for place, hit in enumerate(mixed.items):
        if hit.item in mixed.explored:
            continue
        others = min(SPARE, len(left) - 1)
        takes = bool(others and luck[place, 0] < share)
        if chances and others:
            chances[place] *= share / others if takes else 1 - share
        items[place] = left.pop(1 + int(luck[place, 1] * others) if takes else 0)
    return Mixed(tuple(items), mixed.explored, tuple(chances))
