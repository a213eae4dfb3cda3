"""From accepted batches to the log, exactly once: everything that a group of stream entries changes is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.itemlog import ItemLog, version_of_entry
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.stream import Entry


@dataclass(frozen=True)
class Written:
    """An entry that is in the log, with those of its interactions that were new."""

    entry: Entry
    fresh: pa.Table | None


class EntryWriter:
    """Writes entries; remembers each until it was acknowledged, so that a redelivered one gives the same answer and stores nothing."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.events, self.items = manifest, EventLog(manifest), ItemLog(manifest)
        self._acknowledged: list[str] = []

    def write(self, entries: Sequence[Entry]) -> list[Written]:
        """Store the entries that are not stored yet; all of them, in their order, with their new rows."""
        with self.manifest.writing() as connection:
            if self._acknowledged:
                connection.executemany("DELETE FROM entries WHERE id = ?", [(entry,) for entry in self._acknowledged])
            new_rows: dict[str, bytes] = {}
            for entry in entries:
                known = connection.execute("SELECT new_rows FROM entries WHERE id = ?", (entry.id,)).fetchone()
                if known is not None:
                    new_rows[entry.id] = known[0]
            missing = [entry for entry in entries if entry.id not in new_rows]
            events = [entry for entry in missing if entry.kind == "interactions"]
            if events:
                starts = np.cumsum([0, *(entry.table.num_rows for entry in events)])
                fresh = np.array(self.events.append(pa.concat_tables([entry.table for entry in events]).combine_chunks()), dtype=np.int64)
                for index, entry in enumerate(events):
                    own = fresh[(fresh >= starts[index]) & (fresh < starts[index + 1])] - starts[index]
                    new_rows[entry.id] = own.astype("<u4").tobytes()
            for entry in missing:
                if entry.kind == "items":
                    self.items.append(entry.table, version_of_entry(entry.id))
                    new_rows[entry.id] = b""
            connection.executemany("INSERT INTO entries VALUES (?, ?)", [(entry.id, new_rows[entry.id]) for entry in missing])
        self._acknowledged.clear()
        return [
            Written(entry, entry.table.take(pa.array(np.frombuffer(new_rows[entry.id], dtype="<u4"))) if entry.kind == "interactions" else None)
            for entry in entries
        ]

    def acknowledged(self, entries: Sequence[Written]) -> None:
        """The stream no longer has these: they need not be remembered after the next write."""
        self._acknowledged.extend(written.entry.id for written in entries)

    def forget_acknowledged(self) -> None:
        """Forget every remembered entry: right after all pending ones were written and acknowledged."""
        with self.manifest.writing() as connection:
            connection.execute("DELETE FROM entries")
        self._acknowledged.clear()
