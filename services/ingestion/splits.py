"""Which of a user's events train, validate and test.

Leave-one-out: the last is for the test, the one before for validation; a user of fewer than three only trains. Between users
this leaks time, as the protocol always does: the temporal split does not, since all that trains happened before all that is judged.
Legend: U users, E events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from semantide.shared.errors import BadData


@dataclass(frozen=True)
class SplitConfig:
    """How to split. Units: times in milliseconds; a time of 0 means that the fraction decides."""

    split: Literal["leave-one-out", "temporal"] = "leave-one-out"
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    valid_time: int = 0
    test_time: int = 0


@dataclass(frozen=True)
class Split:
    """Ends of the training and validation parts, counted within the user's events.

    Shapes: ``train_end``, ``valid_end`` [U]. Units: ``valid_time``, ``test_time`` milliseconds, 0 without a temporal split.
    """

    train_end: npt.NDArray[np.int32]
    valid_end: npt.NDArray[np.int32]
    valid_time: int = 0
    test_time: int = 0


def split(times: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], config: SplitConfig) -> Split:
    """Split histories whose events are in order.

    Shapes: ``times`` [E], ``offsets`` [U + 1].
    Raises: BadData where nothing would be left to train on.
    """
    if config.split == "leave-one-out":
        lengths = np.diff(offsets)
        held_out = lengths >= 3
        return Split((lengths - 2 * held_out).astype(np.int32), (lengths - held_out).astype(np.int32))
    ordered = np.sort(times)
    valid_time = config.valid_time or int(ordered[min(len(ordered) - 1, int(len(ordered) * (1 - config.valid_fraction - config.test_fraction)))])
    test_time = config.test_time or int(ordered[min(len(ordered) - 1, int(len(ordered) * (1 - config.test_fraction)))])
    if test_time < valid_time:
        raise BadData(f"test_time {test_time} is before valid_time {valid_time}: the test comes last")
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    train_end = np.bincount(users[times < valid_time], minlength=len(offsets) - 1).astype(np.int32)
    valid_end = np.bincount(users[times < test_time], minlength=len(offsets) - 1).astype(np.int32)
    if train_end.sum() == 0:
        raise BadData(f"a temporal split at {valid_time} leaves no event to train on: set valid_time and test_time, or use leave-one-out")
    return Split(train_end, valid_end, valid_time, test_time)
