"""The places in users' training histories at which a model is asked what it would recommend.

Legend: C cuts.
"""

from __future__ import annotations

import numpy as np

from semantide.shared.negative_sampling import IntArray
from semantide.shared.negative_source import TrainingEvents


def cut_events(events: TrainingEvents, points: int) -> IntArray:
    """The events before which a model is asked [C]: evenly spread over each user's events but the first, ascending."""
    _, starts, lengths = np.unique(events.users_E, return_index=True, return_counts=True)
    cuts: list[IntArray] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length > 1:
            cuts.append(start + np.unique(np.linspace(1, length - 1, min(points, length - 1)).round().astype(np.int64)))
    return np.concatenate(cuts) if cuts else np.zeros(0, dtype=np.int64)


class Cuts:
    """What a user did before an event."""

    def __init__(self, events: TrainingEvents) -> None:
        self._events = events
        self._starts_U = np.searchsorted(events.users_E, np.arange(int(events.users_E.max(initial=-1)) + 2))

    def span(self, cut: int) -> slice:
        """The user's events before one of them."""
        return slice(int(self._starts_U[self._events.users_E[cut]]), cut)

    def before(self, cut: int) -> IntArray:
        """Their items, rows of the data set."""
        return self._events.rows_E[self.span(cut)]
