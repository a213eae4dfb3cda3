"""What each user had been shown and had given by some moment, and what he did with an item since: counts over a data set's exposures.

Legend: X exposures, S signals, B moments of users, C pairs of a user and an item at a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantide.shared.feedback import Feedback, IntArray


@dataclass(frozen=True)
class _Counts:
    """Running counts of exposures in the order of a key and, of each key, of time.

    Shapes: ``keys`` ascending, ``places_X`` place of each exposure's key among them x number of moments + that of its moment, ascending; ``before_X1S`` [X + 1, 1 + S]
    exposures and signals given before each.
    """

    keys: IntArray
    places_X: IntArray
    before_X1S: npt.NDArray[np.int32]

    @classmethod
    def of(cls, keys_X: IntArray, moments_X: IntArray, num_moments: int, given_XS: npt.NDArray[np.bool_]) -> _Counts:
        keys, place_X = np.unique(keys_X, return_inverse=True)
        places_X = place_X.astype(np.int64) * num_moments + moments_X
        order = np.argsort(places_X, kind="stable")
        counted = np.concatenate([np.ones((len(keys_X), 1), np.bool_), given_XS], axis=1)[order]
        before = np.concatenate([np.zeros((1, counted.shape[1]), np.int32), np.cumsum(counted, axis=0, dtype=np.int32)])
        return cls(keys, places_X[order], before)

    def between(self, keys_C: IntArray, from_C: IntArray | int, to_C: IntArray | int, num_moments: int) -> npt.NDArray[np.int64]:
        """Counts of a key's exposures from one moment to before another [C, 1 + S]."""
        place_C = np.searchsorted(self.keys, keys_C)
        known_C = place_C < len(self.keys)
        known_C[known_C] = self.keys[place_C[known_C]] == keys_C[known_C]
        begin, end = (np.searchsorted(self.places_X, place_C * num_moments + moment) for moment in (from_C, to_C))
        return np.where(known_C[:, None], self.before_X1S[end].astype(np.int64) - self.before_X1S[begin], 0)


@dataclass(frozen=True)
class OwnFeedback:
    """See the top of this file; rows of users and items are the data set's. Units: ``moments`` milliseconds, ascending."""

    moments: IntArray
    of_users: _Counts
    of_pairs: _Counts
    num_items: int

    @classmethod
    def of(cls, feedback: Feedback, signals: Sequence[str], num_items: int, counted_X: npt.NDArray[np.bool_]) -> OwnFeedback:
        """Count the exposures that ``counted_X`` says, of users that are known."""
        rows = np.flatnonzero(counted_X & (feedback.users >= 0))
        users, items, given = feedback.users[rows].astype(np.int64), feedback.items[rows].astype(np.int64), feedback.among(signals)[rows]
        moments, moment_X = np.unique(feedback.times[rows], return_inverse=True)
        span = len(moments) + 1
        return cls(moments, _Counts.of(users, moment_X, span, given), _Counts.of(users * num_items + items, moment_X, span, given), num_items)

    def before(self, users_B: IntArray, times_B: IntArray) -> tuple[IntArray, IntArray]:
        """How much each user was shown strictly before a moment [B], and gave of each signal [B, S]."""
        counts = self.of_users.between(users_B, 0, self._moment(times_B), len(self.moments) + 1)
        return counts[:, 0], counts[:, 1:]

    def since(self, users_C: IntArray, items_C: IntArray, times_C: IntArray) -> tuple[IntArray, IntArray]:
        """How often each user was shown an item from a moment on [C], and gave each signal [C, S]."""
        keys = np.where((users_C >= 0) & (items_C >= 0), users_C * self.num_items + items_C, -1)
        counts = self.of_pairs.between(keys, self._moment(times_C), len(self.moments), len(self.moments) + 1)
        return counts[:, 0], counts[:, 1:]

    def _moment(self, times: IntArray) -> npt.NDArray[Any]:
        return np.searchsorted(self.moments, times)
