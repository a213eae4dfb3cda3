"""Shards of negatives between the room that draws them and the run that trains on them.

A run asks for the shards of an epoch before it comes to it (``NegativesWanted``), and finds them when they are there (``errands``). What is not there in
time it draws itself, number for number the same.
Artifact ``negatives/...``: ``rows.npy`` [E, R] int32, -1 where there is none, of one shard's events, and ``wanted.json``, which asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import NegativesWanted
from semantide.shared.errands import AWAY, Errands, store_made
from semantide.shared.errors import BrokerUnavailable
from semantide.shared.negative_sampling import Negatives, Rows
from semantide.shared.negative_source import SHARD_EVENTS, NegativeSource
from semantide.shared.stored_files import whole


def store_shard(wanted: NegativesWanted, rows: Negatives, store: ArtifactStore) -> str:
    """Put a shard into the store."""
    inputs = {name: ref for name in ("dataset", "catalog", "beams") if (ref := getattr(wanted, name))}
    config = {"mix": wanted.mix, "epoch": wanted.epoch, "shard": wanted.shard}
    return store_made("negatives", wanted, lambda folder: np.save(folder / "rows.npy", rows), store, config=config, inputs=inputs, seed=wanted.seed)


class NegativeShards:
    """The negatives of a run's events, epoch after epoch; ``pause`` waits some seconds, ``clock`` tells them."""

    def __init__(
        self,
        source: NegativeSource,
        wanted: NegativesWanted,
        store: ArtifactStore,
        broker: Any,
        send: Callable[[NegativesWanted], None],
        *,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        wait_seconds: float,
        leader: bool = True,
    ) -> None:
        """One process of a run is its ``leader``: it asks for shards and takes them away, the others only read."""
        self.source, self._wanted, self._send = source, wanted, send
        self._errands = Errands(NegativesWanted, broker, store)
        self._clock, self._pause, self._wait_seconds = clock, pause, wait_seconds
        self._leader = leader
        self._held: dict[tuple[int, int], Negatives] = {}
        self._asked: dict[int, float] = {}
        self.from_room = self.drawn_here = 0

    def prefetch(self, epoch: int) -> None:
        """Ask for an epoch's shards, once; a broker that is away costs only the time of drawing them here."""
        if epoch in self._asked:
            return
        self._asked[epoch] = self._clock()
        if not self._leader:
            return
        for number in range(self.source.num_shards):
            try:
                self._send(self._of(epoch, number))
            except BrokerUnavailable:
                return

    def draw(self, epoch: int, events_T: Rows) -> Negatives:
        """Negatives of some events in an epoch [T, R]; asks for the next epoch's, and takes those of earlier ones away."""
        self.prefetch(epoch)
        self.prefetch(epoch + 1)
        self._release(epoch)
        events_T = np.asarray(events_T, dtype=np.int64)
        rows = np.empty((len(events_T), self.source.mix.size), dtype=np.int32)
        shards_T = events_T // SHARD_EVENTS
        for number in np.unique(shards_T).tolist():
            here = shards_T == number
            rows[here] = self._shard(epoch, number)[events_T[here] % SHARD_EVENTS]
        return rows

    def _shard(self, epoch: int, number: int) -> Negatives:
        found = self._held.get((epoch, number))
        if found is None:
            found = self._fetched(epoch, number)
            if found is None:
                self.drawn_here += 1
                found = self.source.shard(self._wanted.seed, epoch, number)
            else:
                self.from_room += 1
            self._held[epoch, number] = found
        return found

    def _fetched(self, epoch: int, number: int) -> Negatives | None:
        folder = self._errands.fetched(self._of(epoch, number), self._asked[epoch] + self._wait_seconds, self._clock, self._pause)
        if folder is None:
            return None
        with suppress(*AWAY), whole(folder, "negatives", "let the shard be drawn again"):
            # Mapped, not read: a batch touches a few rows of every shard.
            rows: Negatives = np.load(folder / "rows.npy", mmap_mode="r")
            return rows
        return None

    def _release(self, epoch: int) -> None:
        over = [key for key in self._held if key[0] < epoch]
        for past, number in over:
            del self._held[past, number]
            if self._leader:
                with suppress(*AWAY):  # swept by the room a day later
                    self._errands.remove(self._of(past, number))

    def _of(self, epoch: int, number: int) -> NegativesWanted:
        return self._wanted.model_copy(update={"epoch": epoch, "shard": number})
