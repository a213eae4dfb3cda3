"""Which of a user's events train, validate and test.

Leave-one-out: the last is for the test, the one before for validation; a user of fewer than three only trains. Last-page: the same of pages, or of groups of
pages that were seen at the same time, whose events are then predicted together. Between users both leak time, as the protocol always does: the temporal split does not, since all that trains happened
before all that is judged.
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

    split: Literal["leave-one-out", "last-page", "temporal"] = "leave-one-out"
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


def split(times: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], config: SplitConfig, begins: npt.NDArray[np.int64] | None = None) -> Split:
    """Split histories whose events are in order; a temporal split's two times must be known, and when each event's page began where the last pages are held out.

    Shapes: ``times``, ``begins`` [E], ``offsets`` [U + 1].
    """
    if config.split == "last-page":
        assert begins is not None
        return _last_pages(offsets, begins)
    if config.split == "leave-one-out":
        lengths = np.diff(offsets)
        held_out = lengths >= 3
        return Split((lengths - 2 * held_out).astype(np.int32), (lengths - held_out).astype(np.int32))
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    train_end = np.bincount(users[times < config.valid_time], minlength=len(offsets) - 1).astype(np.int32)
    valid_end = np.bincount(users[times < config.test_time], minlength=len(offsets) - 1).astype(np.int32)
    return Split(train_end, valid_end, config.valid_time, config.test_time)


def _last_pages(offsets: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> Split:
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.flatnonzero(np.append(True, (user[1:] != user[:-1]) | (pages[1:] != pages[:-1]))[: len(pages)])
    runs = np.bincount(user[begins], minlength=len(lengths))
    last, held_out = np.cumsum(runs) - 1, runs >= 3
    ends = [np.where(held_out, begins[np.maximum(last - back, 0)] - offsets[:-1] if len(begins) else 0, lengths) for back in (1, 0)]
    return Split(ends[0].astype(np.int32), ends[1].astype(np.int32))


def dated(config: SplitConfig, num_events: int, time_of_rank: Callable[[int], int]) -> SplitConfig:
    """The same with the times of a temporal split, where fractions tell them; ``time_of_rank`` gives the k-th earliest time of all events.

    Raises: BadData where the test would come before the validation.
    """
    if config.split != "temporal":
        return config

    def after(share: float) -> int:
        return time_of_rank(min(num_events - 1, int(num_events * share)))

    valid_time = config.valid_time or after(1 - config.valid_fraction - config.test_fraction)
    test_time = config.test_time or after(1 - config.test_fraction)
    if test_time < valid_time:
        raise BadData(f"test_time {test_time} is before valid_time {valid_time}: the test comes last")
    return replace(config, valid_time=valid_time, test_time=test_time)
