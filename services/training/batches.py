"""Which histories make up which batch: a function of seed, epoch and place, so that a checkpoint only keeps the last two.

Legend: E items of all histories, U users, P pieces (a history or a stretch of one), T items of a batch, B pieces of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.services.training.page_targets import PageTargets
from semantide.services.training.recipes import TrainConfig
from semantide.shared.errors import BadData
from semantide.shared.jagged import Jagged

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HistoryBatch:
    """What one step trains on: packed histories, when each event happened, and which pieces of which epoch they are.

    Shapes: ``items`` [T] rows of the data set's items; ``times_T`` int64, zeros where unknown; ``samples_B`` int64; ``events_T`` int64, number of each event
    among all training events, None where unknown. ``targets`` are those of pages, where training goes by them.
    Units: ``times_T`` seconds.
    """

    items: Jagged
    times_T: Tensor
    samples_B: Tensor
    events_T: Tensor | None = None
    epoch: int = 0
    targets: PageTargets | None = None

    @classmethod
    def of(cls, items: Jagged, times_T: Tensor | None = None) -> HistoryBatch:
        """Histories alone, numbered from 0."""
        return cls(items, torch.zeros_like(items.values) if times_T is None else times_T, torch.arange(len(items), device=items.values.device))

    def to(self, device: torch.device | str) -> HistoryBatch:
        """The same on another device."""
        events_T = None if self.events_T is None else self.events_T.to(device)
        targets = None if self.targets is None else self.targets.to(device)
        return HistoryBatch(self.items.to(device), self.times_T.to(device), self.samples_B.to(device), events_T, self.epoch, targets)

    @property
    def lengths_B(self) -> Tensor:
        """What each history asks of a step: its items and, where training goes by pages, its targets."""
        return self.items.lengths_B if self.targets is None else self.items.lengths_B + self.targets.lengths_B(len(self))

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Epoch:
    """One pass over the histories, cut into batches.

    Shapes: ``rows``, ``times``, ``events`` [T of all], ``starts_P``, ``lengths_P`` into them; ``batches`` lists pieces. ``homes_P`` is the rank that holds
    each piece's rows and times, where no rank holds all; everything else every rank knows of all pieces.
    """

    rows: IntArray
    times: IntArray | None
    starts_P: IntArray
    lengths_P: IntArray
    batches: tuple[IntArray, ...]
    homes_P: IntArray | None = None
    events: IntArray | None = None
    """Number of each of ``rows`` among all training events; None: they are those, in order."""
    number: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def sizes_P(self) -> IntArray:
        """How much each piece asks of a step, items."""
        return self.lengths_P

    def batch(self, index: int) -> HistoryBatch:
        """One batch whole."""
        return self.gather(self.batches[index])

    def gather(self, pieces: IntArray) -> HistoryBatch:
        """Some pieces as a batch, shorter histories first: equal lengths lie together, which attention needs to see them as one block."""
        lengths = self.lengths_P[pieces]
        pieces = pieces[np.argsort(lengths, kind="stable")]
        places, offsets = ranges(self.starts_P[pieces], self.lengths_P[pieces])
        times = np.zeros(len(places), dtype=np.int64) if self.times is None else self.times[places]
        events = places if self.events is None else self.events[places]
        items = Jagged(torch.from_numpy(self.rows[places]), torch.from_numpy(offsets))
        return HistoryBatch(items, torch.from_numpy(times), torch.from_numpy(pieces), torch.from_numpy(events), self.number)


class Epochs(Protocol):
    """Whoever makes the epochs of a run."""

    def epoch(self, number: int) -> Epoch:
        """Batches of one pass, each time the same for the same number."""
        ...


class Sampler:
    """Makes the epochs of a run.

    With ``held``, a rank and the number of ranks, only every so-many-th history is kept, and the ranks exchange what each needs; the epochs are the same.
    Units: ``times``, of each event of each history: milliseconds, as data sets have them.
    """

    def __init__(
        self,
        histories: Iterable[npt.NDArray[np.integer]],
        config: TrainConfig,
        seed: int,
        times: Iterable[npt.NDArray[np.integer]] | None = None,
        held: tuple[int, int] = (0, 1),
    ) -> None:
        self._rank, self._size = held
        self._rows, self._lengths_U = _held(histories, *held)
        if not len(self._lengths_U):
            raise BadData("the data set has no training interactions: import more data, or lower the filters of the dataset job")
        self._times = None
        if times is not None:
            moments, numbers = _held(times, *held)
            if not np.array_equal(numbers, self._lengths_U):
                raise ValueError(f"{numbers.sum()} times for {self._lengths_U.sum()} events: give one of each event")
            self._times = moments // 1000
        mine_U = np.where(np.arange(len(self._lengths_U)) % self._size == self._rank, self._lengths_U, 0)
        self._starts_U = np.cumsum(mine_U) - mine_U
        # What is held is numbered as if all were, so that what depends on an event's number does not depend on the ranks.
        first_U = np.cumsum(self._lengths_U) - self._lengths_U
        held_U = mine_U > 0
        self._events = None if self._size == 1 else ranges(first_U[held_U], self._lengths_U[held_U])[0]
        self._config, self._seed = config, seed

    @property
    def num_histories(self) -> int:
        """Users with training interactions."""
        return len(self._lengths_U)

    def epoch(self, number: int) -> Epoch:
        """Batches of one pass, each time the same for the same number."""
        config, rng = self._config, np.random.default_rng([self._seed, number])
        users, skipped, lengths = self._pieces(rng)
        homes = users % self._size
        mine = homes == self._rank
        starts = self._starts_U[users] + skipped
        rows, times, events = self._rows, self._times, self._events
        if config.skip_rate:
            piece = np.repeat(np.arange(len(lengths)), lengths)
            keep = rng.random(len(piece)) >= config.skip_rate  # of others' pieces too: every rank draws the same
            left = np.bincount(piece[keep], minlength=len(lengths))
            keep |= (left < np.minimum(2, lengths))[piece]  # a history that would all but vanish stays whole
            places, _ = ranges(starts[mine], lengths[mine])
            places = places[keep[mine[piece]]]
            events = places if events is None else events[places]
            rows, times = rows[places], None if times is None else times[places]
            lengths = np.bincount(piece[keep], minlength=len(lengths)).astype(np.int64)
            own = np.where(mine, lengths, 0)
            starts = np.cumsum(own) - own
        if config.batching == "mixed":
            order = rng.permutation(len(lengths))
        else:
            # Some noise keeps the same histories from meeting in every epoch.
            order = np.argsort(lengths * (1 + 0.05 * rng.random(len(lengths))) + 1.5 * rng.random(len(lengths)), kind="stable")
        begins = np.cumsum(lengths[order]) - lengths[order]
        batch_of = begins // config.items_per_batch
        cuts = np.flatnonzero(np.diff(batch_of)) + 1
        batches = np.split(order, cuts)
        shuffled = rng.permutation(len(batches))
        batched = tuple(batches[index] for index in shuffled)
        return Epoch(rows, times, starts, lengths, batched, homes if self._size > 1 else None, events, number)

    def _pieces(self, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """Of each piece: whose history, the place in it where it begins, its length."""
        longest, lengths = self._config.max_items, self._lengths_U
        users = np.arange(len(lengths))
        if self._config.crop == "cover":
            users = np.repeat(users, np.maximum(1, (lengths / longest + rng.random(len(lengths))).astype(np.int64)))
        room = np.maximum(lengths[users] - longest, 0)
        if self._config.crop == "last":
            skipped = room
        elif self._config.crop == "cover":
            # Stretches may lean over the ends, so that first and last items come up as often as others.
            lean = longest // 4
            skipped = np.clip(rng.integers(-lean, room + lean + 1), 0, room)
        else:
            skipped = rng.integers(0, room + 1)
            if self._config.crop == "mixed":
                skipped = np.where(rng.random(len(users)) < 0.5, room, skipped)
        return users, skipped, np.minimum(lengths[users], longest)


def _held(sequences: Iterable[npt.NDArray[np.integer]], rank: int, size: int) -> tuple[IntArray, IntArray]:
    """The values of every ``size``-th sequence that is not empty, from ``rank`` on, one after another; and all their lengths."""
    kept: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    lengths: list[int] = []
    for sequence in sequences:
        if len(sequence):
            if len(lengths) % size == rank:
                kept.append(np.asarray(sequence, dtype=np.int64))
            lengths.append(len(sequence))
    return np.concatenate(kept), np.array(lengths, dtype=np.int64)


def ranges(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """The places start, start + 1, ... of every piece one after another, and where each begins."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets
