"""Shards of negatives between the room that draws them and the run that trains on them.

A run asks for the shards of an epoch before it comes to it (``NegativesWanted``), and finds their references in Redis when they are there. What is not there in
time it draws itself, number for number the same: the room takes work off a run, and never decides what a run computes.
Artifact ``negatives/...``: ``rows.npy`` [E, R] int32, -1 where there is none, of one shard's events, and ``wanted.json``, which asked for it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from semantide.shared import broker as broker_door
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import NegativesWanted
from semantide.shared.errors import BrokerUnavailable, Corrupt, NotFound, StoreUnavailable
from semantide.shared.negative_sampling import Negatives, Rows
from semantide.shared.negative_source import SHARD_EVENTS, NegativeSource

KEPT_SECONDS = 86400  # after which a shard that nobody took away belongs to a run that is gone
_MADE = "semantide:negatives:made"


def shard_key(wanted: NegativesWanted) -> str:
    """Where the reference of a shard stands in Redis."""
    return f"semantide:negatives:shard:{hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()}"


def store_shard(wanted: NegativesWanted, rows: Negatives, store: ArtifactStore) -> str:
    """Put a shard into the store."""
    with tempfile.TemporaryDirectory(prefix="semantide-negatives-") as scratch:
        folder = Path(scratch)
        np.save(folder / "rows.npy", rows)
        # Shards of one content may answer several wishes, and each run takes its own away: the wish makes them differ.
        (folder / "wanted.json").write_text(json.dumps(wanted.model_dump(mode="json"), sort_keys=True))
        inputs = {name: ref for name in ("dataset", "catalog", "beams") if (ref := getattr(wanted, name))}
        return store.put("negatives", folder, config={"mix": wanted.mix, "epoch": wanted.epoch, "shard": wanted.shard}, inputs=inputs, seed=wanted.seed)


class ShardBoard:
    """The references of shards that have been drawn, in Redis."""

    def __init__(self, broker: Any, store: ArtifactStore) -> None:
        self._broker, self._store = broker, store

    def find(self, wanted: NegativesWanted) -> str | None:
        """The reference of a shard, where it has been drawn."""
        value = self._broker.get(shard_key(wanted))
        return value.decode() if value else None

    def put(self, wanted: NegativesWanted, ref: str, now: float) -> None:
        """Note a shard that has been drawn; ``now`` in seconds."""
        pipe = self._broker.pipeline()
        pipe.set(shard_key(wanted), ref, ex=KEPT_SECONDS)
        pipe.zadd(_MADE, {ref: now})
        pipe.execute()

    def remove(self, wanted: NegativesWanted) -> None:
        """Take a shard away that has been used."""
        ref = self.find(wanted)
        if ref is not None:
            self._broker.delete(shard_key(wanted))
            self._store.remove(ref)
            self._broker.zrem(_MADE, ref)  # last: what could not be taken away is swept

    def sweep(self, now: float) -> int:
        """Take away what runs have left behind; how many shards."""
        left = self._broker.zrangebyscore(_MADE, "-inf", now - KEPT_SECONDS)
        for ref in left:
            self._store.remove(ref.decode())
            self._broker.zrem(_MADE, ref)
        return len(left)

    def waiting(self) -> int:
        """Shards that are kept."""
        return int(self._broker.zcard(_MADE))


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
        self.source, self._wanted, self._store, self._send = source, wanted, store, send
        self._board = ShardBoard(broker, store)
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
        wanted = self._of(epoch, number)
        while True:
            try:
                ref = self._board.find(wanted)
                if ref is not None:
                    # Mapped, not read: a batch touches a few rows of every shard.
                    rows: Negatives = np.load(self._store.get(ref) / "rows.npy", mmap_mode="r")
                    return rows
            except (broker_door.RedisError, BrokerUnavailable, StoreUnavailable, NotFound, Corrupt, OSError):
                return None
            if self._clock() - self._asked[epoch] >= self._wait_seconds:
                return None
            self._pause(0.05)

    def _release(self, epoch: int) -> None:
        over = [key for key in self._held if key[0] < epoch]
        for past, number in over:
            del self._held[past, number]
            if not self._leader:
                continue
            try:
                self._board.remove(self._of(past, number))
            except (broker_door.RedisError, StoreUnavailable, OSError):
                continue  # swept by the room a day later

    def _of(self, epoch: int, number: int) -> NegativesWanted:
        return self._wanted.model_copy(update={"epoch": epoch, "shard": number})
