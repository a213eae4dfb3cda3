"""The worker's side of the stream: takes accepted batches off it and writes the log, exactly once, as long as the process lives.

    read -> one transaction in the manifest -> online histories, XACK and XDEL in one step -> announce changed items
A kill between any two steps is made good by the next start: pending entries are read again, and the manifest knows those it has.
One worker of a data folder writes; others stand by for the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.expiry import Expiry
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.shown import joined
from semantide.services.ingestion.stream import CONSUMER, DIMENSION, GROUP, PARKED, STREAM, Entry, decode
from semantide.services.ingestion.writer import EntryWriter, Written
from semantide.shared import broker as broker_door
from semantide.shared.availability import Availability
from semantide.shared.contracts import Interaction, ItemsChanged
from semantide.shared.errors import Corrupt, TransientError
from semantide.shared.history import Histories
from semantide.shared.room import Room
from semantide.shared.shown_lists import ShownLists
from semantide.shared.telemetry import linked_span, logger, meter

ENTRIES_PER_READ = 40
LINGER_SECONDS = 0.1
BLOCK_MS = 500
ANNOUNCE_SECONDS = 1.0
ANNOUNCE_AT_MOST_SECONDS = 30.0
ANNOUNCE_UNDER_LOAD_SECONDS = 5.0
PAGES_LOOKED_AT = 25
TIDY_SECONDS = 30.0
OPEN_AGAIN_SECONDS = 5.0
MIN_FREE_BYTES = 64 * 1024 * 1024
_AVAILABILITY_PART = 5000
_LOG = logger("ingestion")


def background(room: Room, stop: threading.Event) -> None:
    """Write the log until ``stop`` is set."""
    folder = room.settings.data_dir / "events"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not stop.is_set():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                stop.wait(0.5)
                continue
            try:
                with closing(Manifest(folder)) as manifest:
                    Consumer(room, manifest).run(stop)
            except (OSError, sqlite3.Error):
                # A thread that ended here would let accepted batches pile up until somebody restarts the worker.
                _LOG.exception("the log cannot be opened, trying again")
                stop.wait(OPEN_AGAIN_SECONDS)
    finally:
        os.close(handle)


class Consumer:
    """Reads the stream and writes the log of one data folder."""

    def __init__(self, room: Room, manifest: Manifest, *, min_free_bytes: int = MIN_FREE_BYTES, block_ms: int = BLOCK_MS) -> None:
        self._room, self._redis, self._manifest, self._min_free_bytes = room, room.broker, manifest, min_free_bytes
        self._block_ms = block_ms
        self._writer = EntryWriter(manifest)
        self._availability = Availability(room.broker)
        settings = room.settings
        self._expiry = Expiry(self._writer.events, settings.event_days, settings.event_bytes)
        self._histories = Histories(room.broker, settings.history_length, settings.history_ttl_seconds)
        self._shown = ShownLists(room.broker, settings.serving_shown_seconds, settings.serving_shown_bytes)
        # Exposures would push what the user did out of a short history.
        self._told = pa.array([name for name, intensity in settings.actions.items() if intensity >= 1 or intensity < 0], pa.string())
        self._recover = True
        self._due: tuple[float, int] | None = None
        self._told_last = -math.inf
        self._looked = self._tidied = 0.0
        instruments = meter("ingestion")
        self._stored = instruments.create_counter("semantide_ingestion_events", unit="events", description="Interactions written to the log")
        self._duplicates = instruments.create_counter("semantide_ingestion_duplicates", unit="events", description="Interactions that were already in the log")
        self._expired = instruments.create_counter("semantide_ingestion_expired", unit="events", description="Interactions that the log keeps no longer")
        self._seconds = instruments.create_histogram("semantide_ingestion_flush", unit="s", description="Time to write one group of batches")

    def run(self, stop: threading.Event) -> None:
        """Step until asked to stop; whatever fails is waited out, nothing is dropped."""
        pause = 0.5
        while not stop.is_set():
            try:
                self.step(stop)
                pause = 0.5
                continue
            except (*broker_door.ConnectionLost, TransientError) as error:
                _LOG.warning("the broker is away, the log waits for it", error=str(error))
            except broker_door.ResponseError as error:
                if "NOGROUP" not in str(error):
                    _LOG.error("the broker refuses, trying again", error=str(error))
            except (OSError, sqlite3.OperationalError) as error:
                _LOG.error("the log cannot be written, accepted batches wait in the stream", error=str(error))
            except Exception:
                _LOG.exception("the log's writer failed, trying again")
            self._recover = True
            stop.wait(pause)
            pause = min(pause * 2, 10.0)

    def step(self, stop: threading.Event | None = None) -> int:
        """Take what is there, waiting a moment for more; how many batches were written."""
        if self._recover:
            taken = self._take_over()
            self._recover = False
            return taken
        entries = self._read(self._block_ms)
        if entries and len(entries) < ENTRIES_PER_READ and stop is not None:
            # Batches that arrive together share a segment and a flush to disk.
            stop.wait(LINGER_SECONDS)
            entries += self._read(None)
        self._process(entries)
        if len(entries) < ENTRIES_PER_READ or time.monotonic() - self._looked > ANNOUNCE_UNDER_LOAD_SECONDS:
            self.announce()
        self._tidy()
        return len(entries)

    def _read(self, block_ms: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = self._redis.xreadgroup(GROUP, CONSUMER, {STREAM: ">"}, count=ENTRIES_PER_READ, block=block_ms)
        if not answer:
            return []
        streams = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
        return list(streams[0] if isinstance(answer, dict) else streams)

    def _take_over(self) -> int:
        """Write what earlier readers were given and did not acknowledge; then bring the broker's copies of our state up to date."""
        try:
            self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except broker_door.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        taken, cursor = 0, b"0-0"
        while True:
            answer = self._redis.xautoclaim(STREAM, GROUP, CONSUMER, min_idle_time=0, start_id=cursor, count=ENTRIES_PER_READ)
            cursor, entries = answer[0], [entry for entry in answer[1] if entry[1]]
            self._process(entries)
            taken += len(entries)
            if cursor in (b"0-0", "0-0"):
                break
        self._writer.forget_acknowledged()
        gone = self._writer.items.unavailable()
        missing = sorted(set(gone) - self._availability.unavailable()) if gone else []
        self._tell_availability(dict.fromkeys(missing, False))
        dimension = self._writer.items.embedding_dimension()
        if dimension is not None:
            self._redis.set(DIMENSION, dimension, nx=True)
        return taken

    def _process(self, raw: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if not raw:
            return
        if shutil.disk_usage(self._manifest.folder).free < self._min_free_bytes:
            raise OSError(errno.ENOSPC, f"less than {self._min_free_bytes} bytes are free below {self._manifest.folder}")
        entries: list[Entry] = []
        for entry_id, fields in raw:
            try:
                entries.append(decode(entry_id, fields))
            except Corrupt as error:
                self._park(entry_id, error)
        if not entries:
            return
        with linked_span("ingestion", "write to the log", [entry.trace for entry in entries]):
            self._store(joined(entries, self._shown.get))

    def _store(self, entries: Sequence[Entry]) -> None:
        begun = time.monotonic()
        written = self._write(entries)
        pipe = self._redis.pipeline(transaction=True)
        fresh = [entry.fresh for entry in written if entry.fresh is not None]
        if fresh:
            self._append_histories(pa.concat_tables(fresh), pipe)
        ids = [entry.entry.id for entry in written]
        if ids:
            pipe.xack(STREAM, GROUP, *ids)
            pipe.xdel(STREAM, *ids)
            pipe.execute()
        self._writer.acknowledged(written)
        stored = sum(table.num_rows for table in fresh)
        self._stored.add(stored)
        self._duplicates.add(sum(entry.entry.table.num_rows for entry in written if entry.fresh is not None) - stored)
        self._seconds.record(time.monotonic() - begun)

    def _write(self, entries: Sequence[Entry]) -> list[Written]:
        try:
            return self._writer.write(entries)
        except (OSError, sqlite3.OperationalError):
            raise
        except Exception as error:
            if len(entries) == 1:
                # One batch that cannot be written must not hold up all others for ever.
                self._park(entries[0].id.encode(), error)
                return []
            return [written for entry in entries for written in self._write([entry])]

    def _park(self, entry_id: bytes, error: Exception) -> None:
        found = self._redis.xrange(STREAM, min=entry_id, max=entry_id)
        data = {key.decode(): value.hex() if key == b"data" else value.decode(errors="replace") for key, value in (found[0][1].items() if found else ())}
        letter = json.dumps({"entry": entry_id.decode(), "fields": data, "error": f"{type(error).__name__}: {error}", "time": int(time.time() * 1000)})
        pipe = self._redis.pipeline(transaction=True)
        pipe.rpush(PARKED, letter)
        pipe.xack(STREAM, GROUP, entry_id)
        pipe.xdel(STREAM, entry_id)
        pipe.execute()
        _LOG.error("a batch was parked", entry=entry_id.decode(), where=PARKED, error=str(error))

    def _append_histories(self, table: pa.Table, pipe: Any) -> None:
        rows = table.filter(pc.is_in(table["action"], self._told)).sort_by("time").select(["user", "item", "time", "action"]).to_pylist()
        self._histories.append((Interaction.model_construct(**row) for row in rows), pipe)

    def announce(self, *, now: float | None = None, at_once: bool = False) -> bool:
        """Tell the other rooms of changed items, a moment after the last change; whether something was told."""
        now = time.monotonic() if now is None else now
        if not at_once and now - self._looked < ANNOUNCE_SECONDS / 4:
            return False
        self._looked = now
        version = self._availability.version()
        changes = self._writer.items.changes()
        if not changes:
            self._due = None
            return False
        total = sum(change.changed for change in changes)
        if not at_once:
            first, size = self._due or (now, -1)
            self._due = (first, total)
            # While changes keep coming (an import), one message tells of many.
            if now - first < ANNOUNCE_SECONDS or (size != total and now - first < ANNOUNCE_AT_MOST_SECONDS):
                return False
            # Every message costs a whole catalog for each tokenizer in use, and nothing removes the one before.
            if now - self._told_last < self._room.settings.item_changes_seconds:
                return False
        if self._items_wait():
            return False
        with tempfile.TemporaryDirectory(dir=self._manifest.folder) as folder:
            state = self._writer.items.write(changes, Path(folder))
            good = pc.and_(state["available"], pc.invert(state["deleted"]))
            if not self._tell_as_of(version, dict(zip(state["item"].to_pylist(), good.to_pylist(), strict=True))):
                # A newer state was accepted meanwhile: telling this one would undo it for a moment.
                return False
            # Last, so that no artifact is left behind by an attempt that comes to nothing.
            ref = self._room.store.put("items", Path(folder))
        self._room.send(ItemsChanged(items=ref))
        self._writer.items.announced(changes)
        self._due, self._told_last = None, now
        dimension = self._writer.items.embedding_dimension()
        if dimension is None:
            self._redis.delete(DIMENSION)
        else:
            self._redis.set(DIMENSION, dimension, nx=True)
        _LOG.info("items changed", items=len(changes), artifact=ref)
        return True

    def _items_wait(self) -> bool:
        """Whether the stream may hold items whose availability was told and is not in the log yet; interactions, which never stop, do not count."""
        after = b"-"
        for _ in range(PAGES_LOOKED_AT):
            entries = self._redis.xrange(STREAM, min=after, count=ENTRIES_PER_READ)
            if any(fields.get(b"kind") != b"interactions" for _, fields in entries):
                return True
            if len(entries) < ENTRIES_PER_READ:
                return False
            after = b"(" + entries[-1][0]
        return True

    def _tell_as_of(self, version: int, available: dict[str, bool]) -> bool:
        ids = list(available)
        for number, begin in enumerate(range(0, len(ids), _AVAILABILITY_PART)):
            if not self._availability.update_as_of(version + number, {item: available[item] for item in ids[begin : begin + _AVAILABILITY_PART]}):
                return False
        return True

    def _tell_availability(self, available: dict[str, bool]) -> None:
        ids = list(available)
        for begin in range(0, len(ids), _AVAILABILITY_PART):
            self._availability.update({item: available[item] for item in ids[begin : begin + _AVAILABILITY_PART]})

    def _tidy(self) -> None:
        now = time.monotonic()
        if now - self._tidied < TIDY_SECONDS:
            return
        self._tidied = now
        self._writer.events.merge_small()
        self._expired.add(self._expiry.step(int(time.time() * 1000)))
        self._writer.events.sweep()
