"""Negatives of a data set's training events, shard by shard: a function of the data set, the mixture, the seed, the epoch and the shard.

A shard is drawn from the histories of its own users and a few numbers of every item, one by one as a run asks for them, or an epoch's by an executor.
Events are numbered through all training parts, user after user. Artifact ``beams/...``: ``rows.npy`` [C, W] int32, the items (rows of the data set) that a
model's beams held after the user's events before event ``cuts.npy`` [C] int64, best first, -1 past the end; ``beams.json`` says which model and how.
An event takes the beams of the last cut at or before it: no beam knows what comes after.
Legend: E training events, N items, R negatives of an event, C cuts, W beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.executors import Output, Piece, Steps, read
from semantide.shared.negative_sampling import AliasTable, IntArray, KnownPairs, NegativeMix, Negatives, NegativeSampler, Rows
from semantide.shared.stored_files import whole

SHARD_EVENTS = 1 << 15


@dataclass(frozen=True)
class TrainingEvents:
    """Every training event of a data set, as a row of its items and of its users.

    Shapes: ``rows_E``, ``users_E`` int64.
    """

    rows_E: IntArray
    users_E: IntArray
    num_items: int

    @classmethod
    def of(cls, dataset: Dataset) -> TrainingEvents:
        """The training parts alone: what comes after must not be known to be no negative."""
        return cls._cut(dataset.items, np.diff(dataset.offsets), dataset.train_end, len(dataset.item_ids))

    @classmethod
    def of_histories(cls, histories: pa.Table, num_items: int) -> TrainingEvents:
        """Those of a stretch of users (columns items and train_end of ``users.parquet``), who are numbered from 0."""
        items = histories["items"].combine_chunks()
        lengths = np.asarray(items.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
        return cls._cut(items.flatten().to_numpy(zero_copy_only=False), lengths, histories["train_end"].to_numpy(), num_items)

    @classmethod
    def _cut(cls, items: Rows, lengths: IntArray, train_end: Rows, num_items: int) -> TrainingEvents:
        users = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(items)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        training = place < train_end[users]
        return cls(items[training].astype(np.int64), users[training], num_items)

    @cached_property
    def known(self) -> KnownPairs:
        """What each user is known to have taken."""
        return KnownPairs(self.users_E, self.rows_E, self.num_items)


@dataclass(frozen=True)
class BeamLists:
    """What a model's beams held for some of the events."""

    cuts_C: IntArray
    rows_CW: npt.NDArray[np.int32]

    @classmethod
    def load(cls, folder: Path) -> BeamLists:
        """Read a ``beams`` artifact.

        Raises: Corrupt.
        """
        with whole(folder, "beams", "search them anew (`semantide negatives`), or copy the artifact again"):
            return cls(np.load(folder / "cuts.npy"), np.load(folder / "rows.npy", mmap_mode="r"))

    def save(self, folder: Path) -> None:
        """Write its two arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "cuts.npy", self.cuts_C)
        np.save(folder / "rows.npy", self.rows_CW)

    def between(self, begin: int, end: int) -> BeamLists:
        """Those of the events from ``begin`` to before ``end``, counted from there."""
        first, last = np.searchsorted(self.cuts_C, (begin, end))
        return BeamLists(self.cuts_C[first:last] - begin, self.rows_CW[first:last])

    def batch(self) -> pa.RecordBatch:
        """As a step of an executor takes them."""
        return pa.record_batch({"cut": self.cuts_C, "rows": _lists(self.rows_CW)})

    def of(self, events_T: Rows, events: TrainingEvents) -> Rows:
        """The beams that each event may take, -1 where its user has none yet: [T, W]."""
        if not len(self.cuts_C):
            return np.full((len(events_T), self.rows_CW.shape[1]), -1, dtype=np.int32)
        at_T = np.searchsorted(self.cuts_C, events_T, side="right") - 1
        same_T = (at_T >= 0) & (events.users_E[self.cuts_C[np.maximum(at_T, 0)]] == events.users_E[events_T])
        return np.where(same_T[:, None], self.rows_CW[at_T], -1)


def draw_part(
    histories: pa.Table,
    shards: pa.Table,
    items: pa.Table,
    mix: NegativeMix,
    seed: int,
    epoch: int,
    codes: pa.Table | None = None,
    beams: pa.Table | None = None,
) -> dict[str, Output]:
    """Shards that lie next to each other, one record batch for each: a step of an executor.

    ``histories`` are the users who have events in them (items, train_end), ``shards`` their numbers, and where they begin and end among those users' events;
    ``items`` is what ``NegativeSource.epoch`` shares of all items; ``beams`` are (cut, rows), counted from the first of those users' events.
    """
    counts_N, popularity = items["count"].to_numpy(), AliasTable.of(*(items[name].to_numpy() for name in ("probability", "cut", "other")))
    sampler = NegativeSampler(mix, counts_N, None if codes is None else _matrix(codes, "codes"), popularity)
    lists = None if beams is None else BeamLists(beams["cut"].to_numpy(), _matrix(beams, "rows"))
    drawn = _drawn(TrainingEvents.of_histories(histories, len(counts_N)), shards, sampler, lists, seed, epoch)
    return {"rows": [pa.record_batch({"rows": _lists(rows)}) for rows in drawn]}


def _drawn(events: TrainingEvents, shards: pa.Table, sampler: NegativeSampler, lists: BeamLists | None, seed: int, epoch: int) -> Iterator[Negatives]:
    for number, begin, end in zip(*(shards[name].to_pylist() for name in ("shard", "begin", "end")), strict=True):
        # What a user took is known of the shard's own users alone, which makes looking it up quick.
        first, last = np.searchsorted(events.users_E, events.users_E[begin]), np.searchsorted(events.users_E, events.users_E[end - 1], side="right")
        own, at_T = TrainingEvents(events.rows_E[first:last], events.users_E[first:last], events.num_items), np.arange(begin - first, end - first)
        beams_TW = None if lists is None else lists.between(int(first), int(last)).of(at_T, own)
        rng = np.random.default_rng([seed, epoch, number])
        yield sampler.draw(own.rows_E[at_T], rng, users_T=own.users_E[at_T], known=own.known, beams_TW=beams_TW)


class NegativeSource:
    """All that a run's shards are drawn from; of the histories, which stay where they are, a shard's own are read."""

    def __init__(self, users: Path, counts_N: Rows, mix: NegativeMix, codes_NL: Rows | None = None, beams: BeamLists | None = None) -> None:
        """``users`` is a data set's ``users.parquet``."""
        if mix.beams and beams is None:
            raise BadData(f"the mixture takes {mix.beams} negatives from beams: give the beams artifact that a negatives job makes, or set beams to 0")
        self.mix, self._users, self._counts_N, self._codes_NL = mix, users, counts_N, codes_NL
        self._beams = beams if mix.beams else None
        self._sampler = NegativeSampler(mix, counts_N, codes_NL)
        self._ends_U = np.cumsum(read([Piece(users, columns=("train_end",))])["train_end"].to_numpy(), dtype=np.int64)

    @classmethod
    def of(cls, wanted: NegativesWanted, store: ArtifactStore) -> NegativeSource:
        """Load what a message names.

        Raises: BadData for a wrong mixture, Conflict for beams of another data set.
        """
        try:
            mix = NegativeMix.of(wanted.mix)
        except (ValueError, TypeError) as error:
            raise BadData(str(error)) from error
        folder = store.get(wanted.dataset)
        items = read([Piece(folder / "items.parquet", columns=("item", "count"))])
        codes_NL = None
        if mix.prefix:
            if wanted.catalog is None:
                raise BadData(f"the mixture takes {mix.prefix} negatives by prefix: name the catalog whose semantic ids say what is alike, or set prefix to 0")
            codes_NL = codes_of(items["item"].to_pylist(), Catalog.load(store.get(wanted.catalog)))
        beams = None
        if mix.beams and wanted.beams is not None:
            made_for = store.manifest(wanted.beams)["inputs"].get("dataset")
            if made_for != wanted.dataset:
                raise Conflict(f"the beams {wanted.beams[:24]}... were searched for data set {made_for}, not {wanted.dataset}: run a negatives job on this one")
            beams = BeamLists.load(store.get(wanted.beams))
        try:
            return cls(folder / "users.parquet", items["count"].to_numpy(), mix, codes_NL, beams)
        except ValueError as error:
            raise BadData(str(error)) from error

    @property
    def num_events(self) -> int:
        """Training events, each of which has its negatives in every epoch."""
        return int(self._ends_U[-1]) if len(self._ends_U) else 0

    @property
    def num_shards(self) -> int:
        """Shards of an epoch."""
        return -(-self.num_events // SHARD_EVENTS)

    def shard(self, seed: int, epoch: int, number: int) -> Negatives:
        """One shard.

        Raises: BadData for one that does not exist.
        """
        if not 0 <= number < self.num_shards:
            raise BadData(f"shard {number} was asked for, and the data set's {self.num_events} training events make {self.num_shards}")
        stretch = self._stretch(number, number + 1)
        events = TrainingEvents.of_histories(read([stretch.histories]), len(self._counts_N))
        lists = None if self._beams is None else self._beams.between(*stretch.events)
        return next(_drawn(events, stretch.shards, self._sampler, lists, seed, epoch))

    def epoch(self, steps: Steps, seed: int, epoch: int, *, part_events: int) -> Iterator[Negatives]:
        """All shards of an epoch in their order, drawn by an executor in parts of about so many events; what is read may be larger than memory."""
        if not self.num_shards:
            return
        together = max(1, part_events // SHARD_EVENTS)
        stretches = [self._stretch(first, min(first + together, self.num_shards)) for first in range(0, self.num_shards, together)]
        popularity = self._sampler.popularity
        items = steps.share(
            "items",
            pa.table({"count": self._counts_N, "probability": popularity.probabilities_N, "cut": popularity.cut_N, "other": popularity.other_N}),
        )
        shards = steps.share("shards", [stretch.shards.combine_chunks().to_batches()[0] for stretch in stretches])[0].path
        parts: list[dict[str, Sequence[Piece]]] = [
            {"histories": [stretch.histories], "shards": [Piece(shards, part)], "items": items} for part, stretch in enumerate(stretches)
        ]
        if self.mix.prefix:
            assert self._codes_NL is not None
            codes = steps.share("codes", pa.table({"codes": _lists(self._codes_NL)}))
            parts = [{**part, "codes": codes} for part in parts]
        if self._beams is not None:
            beams = steps.share("beams", (self._beams.between(*stretch.events).batch() for stretch in stretches))[0].path
            parts = [{**part, "beams": [Piece(beams, number)]} for number, part in enumerate(parts)]
        drawn = steps(f"epoch-{epoch}", draw_part, parts, mix=self.mix, seed=seed, epoch=epoch)
        for part, stretch in enumerate(stretches):
            for batch in range(stretch.shards.num_rows):
                yield _matrix(read([Piece(drawn.path(part, "rows"), batch)]), "rows")

    def _stretch(self, first: int, last: int) -> _Stretch:
        """What the shards from ``first`` to before ``last`` need."""
        begins = np.arange(first, last, dtype=np.int64) * SHARD_EVENTS
        ends = np.minimum(begins + SHARD_EVENTS, self.num_events)
        user, end_user = (int(np.searchsorted(self._ends_U, event, side="right")) for event in (begins[0], ends[-1] - 1))
        event, end_event = int(self._ends_U[user - 1]) if user else 0, int(self._ends_U[end_user])
        return _Stretch(
            Piece(self._users, rows=(user, end_user + 1), columns=("items", "train_end")),
            pa.table({"shard": np.arange(first, last), "begin": begins - event, "end": ends - event}),
            (event, end_event),
        )


@dataclass(frozen=True)
class _Stretch:
    """Shards that lie next to each other, the histories of their users, and the first and last of those users' events."""

    histories: Piece
    shards: pa.Table
    events: tuple[int, int]


def _lists(rows: Rows) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


def _matrix(table: pa.Table, name: str) -> npt.NDArray[Any]:
    lists = table[name].combine_chunks()
    found: npt.NDArray[Any] = lists.flatten().to_numpy().reshape(len(lists), lists.type.list_size)
    return found


def codes_of(item_ids: Sequence[str], catalog: Catalog) -> IntArray:
    """The semantic id of each item of the data set; -1 for one that the catalog lacks."""
    rows_N = np.array([catalog.row_of.get(item, -1) for item in item_ids], dtype=np.int64)
    codes_NL = catalog.codes[np.maximum(rows_N, 0)].copy()
    codes_NL[rows_N < 0] = -1
    return codes_NL
