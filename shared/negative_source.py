"""Negatives of a data set's training events, shard by shard: a function of the data set, the mixture, the seed, the epoch and the shard.

Events are numbered through all training parts, user after user. Artifact ``beams/...``: ``rows.npy`` [C, W] int32, the items (rows of the data set) that a
model's beams held after the user's events before event ``cuts.npy`` [C] int64, best first, -1 past the end; ``beams.json`` says which model and how.
An event takes the beams of the last cut at or before it: no beam knows what comes after.
Legend: E training events, N items, R negatives of an event, C cuts, W beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.negative_sampling import IntArray, KnownPairs, NegativeMix, Negatives, NegativeSampler, Rows

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
        lengths = np.diff(dataset.offsets)
        users = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(dataset.items)) - np.repeat(dataset.offsets[:-1], lengths)
        training = place < dataset.train_end[users]
        return cls(dataset.items[training].astype(np.int64), users[training], len(dataset.item_ids))

    @cached_property
    def counts_N(self) -> IntArray:
        """How often each item stands among them."""
        return np.bincount(self.rows_E, minlength=self.num_items).astype(np.int64)

    @cached_property
    def known(self) -> KnownPairs:
        """What each user is known to have taken."""
        return KnownPairs(self.users_E, self.rows_E, self.num_items)

    @property
    def num_shards(self) -> int:
        """Shards of an epoch."""
        return -(-len(self.rows_E) // SHARD_EVENTS)

    def shard(self, number: int) -> slice:
        """The events of one shard."""
        return slice(number * SHARD_EVENTS, min((number + 1) * SHARD_EVENTS, len(self.rows_E)))


@dataclass(frozen=True)
class BeamLists:
    """What a model's beams held for some of the events."""

    cuts_C: IntArray
    rows_CW: npt.NDArray[np.int32]

    @classmethod
    def load(cls, folder: Path) -> BeamLists:
        """Read a ``beams`` artifact."""
        return cls(np.load(folder / "cuts.npy"), np.load(folder / "rows.npy"))

    def save(self, folder: Path) -> None:
        """Write its two arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "cuts.npy", self.cuts_C)
        np.save(folder / "rows.npy", self.rows_CW)

    def of(self, events_T: Rows, events: TrainingEvents) -> Rows:
        """The beams that each event may take, -1 where its user has none yet: [T, W]."""
        if not len(self.cuts_C):
            return np.full((len(events_T), self.rows_CW.shape[1]), -1, dtype=np.int32)
        at_T = np.searchsorted(self.cuts_C, events_T, side="right") - 1
        same_T = (at_T >= 0) & (events.users_E[self.cuts_C[np.maximum(at_T, 0)]] == events.users_E[events_T])
        return np.where(same_T[:, None], self.rows_CW[at_T], -1)


class NegativeSource:
    """All that a run's shards are drawn from."""

    def __init__(self, events: TrainingEvents, mix: NegativeMix, codes_NL: Rows | None = None, beams: BeamLists | None = None) -> None:
        if mix.beams and beams is None:
            raise BadData(f"the mixture takes {mix.beams} negatives from beams: give the beams artifact that a negatives job makes, or set beams to 0")
        self.events, self.mix, self._beams = events, mix, beams
        self.sampler = NegativeSampler(mix, events.counts_N, codes_NL)

    @classmethod
    def of(cls, wanted: NegativesWanted, store: ArtifactStore) -> NegativeSource:
        """Load what a message names.

        Raises: BadData for a wrong mixture, Conflict for beams of another data set.
        """
        try:
            mix = NegativeMix.of(wanted.mix)
        except (ValueError, TypeError) as error:
            raise BadData(str(error)) from error
        dataset = Dataset.load(store.get(wanted.dataset))
        codes_NL = None
        if mix.prefix:
            if wanted.catalog is None:
                raise BadData(f"the mixture takes {mix.prefix} negatives by prefix: name the catalog whose semantic ids say what is alike, or set prefix to 0")
            codes_NL = codes_of(dataset, Catalog.load(store.get(wanted.catalog)))
        beams = None
        if mix.beams and wanted.beams is not None:
            made_for = store.manifest(wanted.beams)["inputs"].get("dataset")
            if made_for != wanted.dataset:
                raise Conflict(f"the beams {wanted.beams[:24]}... were searched for data set {made_for}, not {wanted.dataset}: run a negatives job on this one")
            beams = BeamLists.load(store.get(wanted.beams))
        try:
            return cls(TrainingEvents.of(dataset), mix, codes_NL, beams)
        except ValueError as error:
            raise BadData(str(error)) from error

    def draw(self, events_T: Rows, rng: np.random.Generator) -> Negatives:
        """Negatives of some events."""
        events = self.events
        beams_TW = self._beams.of(events_T, events) if self._beams is not None else None
        return self.sampler.draw(events.rows_E[events_T], rng, users_T=events.users_E[events_T], known=events.known, beams_TW=beams_TW)

    def shard(self, seed: int, epoch: int, number: int) -> Negatives:
        """One shard.

        Raises: BadData for one that does not exist.
        """
        if not 0 <= number < self.events.num_shards:
            raise BadData(f"shard {number} was asked for, and the data set's {len(self.events.rows_E)} training events make {self.events.num_shards}")
        events = self.events.shard(number)
        return self.draw(np.arange(events.start, events.stop), np.random.default_rng([seed, epoch, number]))


def codes_of(dataset: Dataset, catalog: Catalog) -> IntArray:
    """The semantic id of each item of the data set; -1 for one that the catalog lacks."""
    rows_N = np.array([catalog.row_of.get(item, -1) for item in dataset.item_ids], dtype=np.int64)
    codes_NL = catalog.codes[np.maximum(rows_N, 0)].copy()
    codes_NL[rows_N < 0] = -1
    return codes_NL
