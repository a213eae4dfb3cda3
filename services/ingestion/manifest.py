"""The manifest of stored events: one SQLite file that says which segments, events, items and imports count, and who is forgotten.

    events/manifest.sqlite     this file; what is not in it did not happen
    events/segments/*.parquet  interactions; a file that the manifest does not name is an orphan
One transaction holds everything that one batch changes, so a kill at any point leaves either all of it or nothing.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS seen (hash BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (
    name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL, first_time INTEGER NOT NULL, last_time INTEGER NOT NULL,
    actions TEXT NOT NULL, origin TEXT NOT NULL, retired INTEGER);
CREATE TABLE IF NOT EXISTS entries (id TEXT PRIMARY KEY, new_rows BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, title TEXT, text TEXT, categories TEXT, attributes TEXT, available INTEGER,
    deleted INTEGER NOT NULL, embedding BLOB, changed INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_changed ON items (changed) WHERE changed > 0;
CREATE TABLE IF NOT EXISTS imports (
    job TEXT PRIMARY KEY, file INTEGER NOT NULL, position TEXT NOT NULL, done INTEGER NOT NULL, num_rows INTEGER NOT NULL, accepted INTEGER NOT NULL,
    duplicates INTEGER NOT NULL, rejected INTEGER NOT NULL, rejects_bytes INTEGER NOT NULL, items INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS keys (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS forgotten (
    digest BLOB PRIMARY KEY, since INTEGER NOT NULL, accept_later INTEGER NOT NULL, swept INTEGER, found TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS digests (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL) WITHOUT ROWID;
"""
_NAMES = re.findall(r"IF NOT EXISTS (\w+)", _SCHEMA)


class Manifest:
    """A connection to the manifest; one thread uses one."""

    def __init__(self, folder: Path, *, wait_seconds: float = 60.0) -> None:
        self.folder = folder
        self.segments = folder / "segments"
        self.created: list[Path] = []
        self.segments.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(folder / "manifest.sqlite", timeout=wait_seconds, isolation_level=None)
        try:
            self._log_ahead(wait_seconds)
            # FULL: a committed transaction survives a power cut.
            self.connection.execute("PRAGMA synchronous=FULL")
            self.connection.execute("PRAGMA temp_store=MEMORY")
            self.connection.execute("PRAGMA cache_size=-65536")
            known = {name for (name,) in self.connection.execute("SELECT name FROM sqlite_master")}
            if not known.issuperset(_NAMES):
                with self.writing():
                    for statement in _SCHEMA.split(";"):
                        self.connection.execute(statement)
        except BaseException:
            self.connection.close()
            raise

    def _log_ahead(self, wait_seconds: float) -> None:
        """Let readers read while one writes. Two first openers may get in each other's way, and SQLite does not wait for this one."""
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        """Give the connection back."""
        self.connection.close()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The only writer, until the block ends: commit on success, nothing at all on an error."""
        self.connection.execute("BEGIN IMMEDIATE")
        self.created.clear()
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            # On a full disk the orphans of the failed attempts would keep it full.
            for path in self.created:
                path.unlink(missing_ok=True)
            raise

    def count(self, name: str, amount: int) -> None:
        """Add to a counter, inside a transaction."""
        self.connection.execute("INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value", (name, amount))

    def counter(self, name: str) -> int:
        """The value of a counter, 0 where it never counted."""
        row = self.connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0
