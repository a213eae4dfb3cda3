"""What this room answers of single users: their history, all that is stored of them, and that they be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.forgotten import Forgotten, Tombstone
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.schema import INTERACTION_SCHEMA, completed
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import Corrupt, NotFound
from semantide.shared.forgetting import Forgetting
from semantide.shared.history import Histories
from semantide.shared.jobs import Jobs, now_ms
from semantide.shared.room import Room


class Users:
    """The users of one data folder."""

    def __init__(self, room: Room, jobs: Jobs, histories: Histories) -> None:
        self._room, self._jobs, self._histories = room, jobs, histories
        self._events = room.settings.data_dir / "events"

    def forget(self, user: str, *, accept_later: bool) -> tuple[str, int, JobRecord]:
        """Keep out what comes of a user from now on, drop the online history, and submit the job that takes every other trace away; the tombstone's digest, its time, and the job."""
        since = now_ms()
        with closing(Manifest(self._events)) as manifest:
            digest = Forgotten(manifest).add(user, since, accept_later=accept_later)
        Forgetting(self._room.broker).add(digest, user)
        self._histories.forget(user)
        return digest, since, self._jobs.submit(JobSpec(kind="forget"))

    def tombstones(self) -> list[Tombstone]:
        """Who was forgotten, by digests, and what was found of them."""
        with closing(Manifest(self._events)) as manifest:
            return Forgotten(manifest).tombstones()

    def events(self, user: str) -> list[dict[str, Any]]:
        """Every stored event of a user, oldest first."""
        with closing(Manifest(self._events)) as manifest:
            segments = EventLog(manifest).segments()
        rows = [row for segment in segments for row in _rows(pq.read_table(segment.path, filters=pc.field("user") == user))]
        return sorted(rows, key=lambda row: (row["time"], row["item"]))

    def datasets(self, user: str) -> Iterator[str]:
        """References of the data sets that hold a user."""
        for ref in self._room.store.list("datasets"):
            # One that is damaged, or has just been removed, keeps nobody from the others.
            with suppress(NotFound, Corrupt):
                folder = self._room.store.get(ref, files=("users.parquet",))
                if pq.read_table(folder / "users.parquet", columns=["user"], filters=pc.field("user") == user).num_rows:
                    yield ref


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in completed(table, INTERACTION_SCHEMA).to_pylist()]
