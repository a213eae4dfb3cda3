"""The data set that tokenization, training and evaluation read: cleaned histories with a split.

Artifact ``datasets/...``:
    items.parquet  item, count, title, text, categories (list), attributes (JSON text), available, embedding (list or null)
    users.parquet  user, items (list<int32>, rows of items.parquet, chronological, positive actions only), times (list<int64> ms),
                   actions (list<string>), train_end, valid_end (int32)
    pages.parquet  user (row of users.parquet), time (ms), items (list<int32>), actions (list<string>), parts (list<int8>): everything shown on one page
    feedback.parquet  user (row of users.parquet, -1 for one who never liked anything), item (row), time (ms), page (number), tab (or null), position (on the
                   page), signals (list<string>, everything that was done with it), value, propensity (or null), part (0 train, 1 validation, 2 test, by its
                   latest event; a temporal split's by its first, -1 where that is in training's time and a later one is not): every item that was shown, once for
                   each page
    dataset.json   configuration, counts, what cleaning dropped and why
Of a user's n events, [:train_end] train, [train_end:valid_end] validate, [valid_end:] test. Nothing at or after
``train_end`` may reach training, collaborative vectors or popularity counts (``count`` counts training events only).
Legend: U users, E events.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.shared.executors import Piece, Steps, read
from semantide.shared.stored_files import DATASET_AGAIN, whole

Part = Literal["valid", "test"]


@dataclass(frozen=True)
class Dataset:
    """Histories of all users, one after another.

    Shapes: ``items``, ``times`` [E]; ``offsets`` [U + 1]; ``train_end``, ``valid_end`` [U], counted within the user's events.
    """

    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    items: npt.NDArray[np.int32]
    times: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    train_end: npt.NDArray[np.int32]
    valid_end: npt.NDArray[np.int32]
    item_table: pa.Table
    header: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Dataset:
        """Read a ``datasets`` artifact.

        Raises: Corrupt.
        """
        with whole(folder, "data set", DATASET_AGAIN):
            users = pq.read_table(folder / "users.parquet").combine_chunks()
            table = pq.read_table(folder / "items.parquet").combine_chunks()
            items = users["items"].combine_chunks() if users.num_rows else pa.array([], pa.list_(pa.int32()))
            times = users["times"].combine_chunks() if users.num_rows else pa.array([], pa.list_(pa.int64()))
            lengths = np.asarray(items.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
            return cls(
                user_ids=tuple(users["user"].to_pylist()),
                item_ids=tuple(table["item"].to_pylist()),
                items=items.flatten().to_numpy(zero_copy_only=False).astype(np.int32),
                times=times.flatten().to_numpy(zero_copy_only=False).astype(np.int64),
                offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                train_end=users["train_end"].to_numpy().astype(np.int32),
                valid_end=users["valid_end"].to_numpy().astype(np.int32),
                item_table=table,
                header=json.loads((folder / "dataset.json").read_text()),
            )

    def history(self, user: int) -> npt.NDArray[np.int32]:
        """All events of a user, rows of the item table."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def train_histories(self) -> Iterator[npt.NDArray[np.int32]]:
        """The training part of every user, in user order."""
        for user in range(len(self.user_ids)):
            yield self.history(user)[: self.train_end[user]]

    def train_times(self) -> Iterator[npt.NDArray[np.int64]]:
        """When each event of ``train_histories`` happened, milliseconds."""
        for user in range(len(self.user_ids)):
            yield self.times[self.offsets[user] : self.offsets[user + 1]][: self.train_end[user]]

    def case_times(self, user: int, part: Part) -> npt.NDArray[np.int64]:
        """When each event of a case's history happened, milliseconds."""
        end = self.train_end[user] if part == "valid" else self.valid_end[user]
        return self.times[self.offsets[user] : self.offsets[user] + end]

    def parts(self, steps: Steps, num_events: int) -> list[Sequence[Piece]]:
        """Items and ends of the training parts for the steps of an executor, of stretches of users with about so many training events."""
        stretches = _stretches(self.train_end, num_events)
        shared = steps.share("histories", (self._histories(*users) for users in stretches)) if stretches else ()
        return [[Piece(shared[0].path, part)] for part in range(len(stretches))]

    def _histories(self, begin: int, end: int) -> pa.RecordBatch:
        offsets = self.offsets[begin : end + 1]
        items = pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), pa.array(self.items[offsets[0] : offsets[-1]], pa.int32()))
        return pa.record_batch({"items": items, "train_end": pa.array(self.train_end[begin:end], pa.int32())})

    def cases(self, part: Part) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """(user, history, targets) of every user that has something to predict in this part.

        At test time the validation events belong to the history.
        """
        for user in range(len(self.user_ids)):
            events = self.history(user)
            begin, end = (self.train_end[user], self.valid_end[user]) if part == "valid" else (self.valid_end[user], len(events))
            if 0 < begin < end:
                yield user, events[:begin], events[begin:end]


@dataclass(frozen=True)
class StoredDataset:
    """A data set whose histories stay where they are: what is in memory is its items."""

    folder: Path

    @cached_property
    def item_table(self) -> pa.Table:
        """The items."""
        return pq.read_table(self.folder / "items.parquet").combine_chunks()

    @cached_property
    def item_ids(self) -> tuple[str, ...]:
        """The items' ids."""
        return tuple(self.item_table["item"].to_pylist())

    def parts(self, steps: Steps, num_events: int) -> list[Sequence[Piece]]:
        """See ``Dataset.parts``."""
        path = self.folder / "users.parquet"
        train_end = read([Piece(path, columns=("train_end",))])["train_end"].to_numpy()
        return [[Piece(path, rows=users, columns=("items", "train_end"))] for users in _stretches(train_end, num_events)]


def _stretches(train_end: npt.NDArray[np.int32], num_events: int) -> list[tuple[int, int]]:
    """Users from one to before another, with about so many training events together."""
    before = np.cumsum(train_end, dtype=np.int64) - train_end
    begins = np.flatnonzero(np.diff(before // num_events, prepend=-1)).tolist()
    return list(itertools.pairwise([*begins, len(train_end)]))
