"""Which of a user's events train, validate and test.

Leave-one-out: the last is for the test, the one before for validation; a user of fewer than three only trains. Between users
this leaks time, as the protocol always does: the temporal split does not, since all that trains happened before all that is judged.
Legend: U users, E events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """Split histories whose events are in order; a temporal split's two times must be known.

    Shapes: ``times`` [E], ``offsets`` [U + 1].
    """
    if config.split == "leave-one-out":
        lengths = np.diff(offsets)
        held_out = lengths >= 3
        return Split((lengths - 2 * held_out).astype(np.int32), (lengths - held_out).astype(np.int32))
    assert config.valid_time and config.test_time, config
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    train_end = np.bincount(users[times < config.valid_time], minlength=len(offsets) - 1).astype(np.int32)
    valid_end = np.bincount(users[times < config.test_time], minlength=len(offsets) - 1).astype(np.int32)
    return Split(train_end, valid_end, config.valid_time, config.test_time)


def dated(config: SplitConfig, num_events: int, time_of_rank: Callable[[int], int]) -> SplitConfig:
    """The same with the times of a temporal split, where fractions tell them; ``time_of_rank`` gives the k-th earliest time of all events.

    Raises: BadData where the test would come before the validation.
    """
    if config.split == "leave-one-out":
        return config

    def after(share: float) -> int:
        return time_of_rank(min(num_events - 1, int(num_events * share)))

    valid_time = config.valid_time or after(1 - config.valid_fraction - config.test_fraction)
    test_time = config.test_time or after(1 - config.test_fraction)
    if test_time < valid_time:
        raise BadData(f"test_time {test_time} is before valid_time {valid_time}: the test comes last")
    return replace(config, valid_time=valid_time, test_time=test_time)
