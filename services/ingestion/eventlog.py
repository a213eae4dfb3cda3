"""The durable log of interactions: Parquet segments, each event once, listed in the manifest."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.ingestion.forgotten import Forgotten
from semantide.services.ingestion.identity import HASH_BYTES, event_hashes
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.schema import INTERACTION_SCHEMA, completed
from semantide.shared.artifacts import digest_file
from semantide.shared.errors import Corrupt
from semantide.shared.telemetry import logger

# SQLite takes at least 999 parameters a statement.
_KEYS_PER_QUERY = 900
_KEYS_PER_INSERT = 400
SEGMENT_SCHEMA = pa.schema([*INTERACTION_SCHEMA, pa.field("event", pa.binary(HASH_BYTES), nullable=False)])


@dataclass(frozen=True)
class Segment:
    """One Parquet file of the log. Units: times in milliseconds since 1970."""

    path: Path
    num_rows: int
    num_bytes: int
    first_time: int
    last_time: int
    actions: dict[str, int]
    digest: str = ""  # sha256; empty for a file that was written before digests were kept

    def check(self) -> None:
        """Make sure that the file holds what was written.

        Raises: Corrupt.
        """
        found = digest_file(self.path) if self.path.is_file() else "no file"
        if found == "no file" or found != (self.digest or found):
            raise Corrupt(
                f"segment {self.path.name} of the event log does not have its digest ({self.digest[:12]}..., found {found[:12]}): bring {self.path} back from a backup; its {self.num_rows} events are left alone until then"
            )
        if not self.digest:  # written before digests were kept
            read_segment(self.path)


def write_durably(table: pa.Table, path: Path) -> None:
    """Write a Parquet file so that it survives a power cut; an interrupted one is removed."""
    try:
        with path.open("xb") as stream:
            pq.write_table(
                table,
                stream,
                compression="zstd",
                compression_level=1,
                use_dictionary=["user", "item", "action", "page", "tab", "signals.list.element", "request_id", "variant"],
                write_statistics=True,
            )
            stream.flush()
            os.fsync(stream.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_segment(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one segment; columns that it was written without are null.

    Raises: FileNotFoundError; Corrupt for what can no longer be read.
    """
    schema = SEGMENT_SCHEMA if columns is None else pa.schema([SEGMENT_SCHEMA.field(name) for name in columns])
    try:
        with pq.ParquetFile(path) as file:
            return completed(file.read(columns=schema.names), schema)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise Corrupt(f"segment {path.name} of the event log cannot be read ({error}): bring {path} back from a backup") from error


class EventLog:
    """Writes and lists segments of one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def append(self, table: pa.Table, hashes: Sequence[bytes] | None = None, *, origin: str = "") -> list[int]:
        """Store the rows that are not yet stored, inside the manifest's open transaction; the positions of the new rows.

        Of rows with the same event id the first is stored, of forgotten users none. ``origin`` keeps an import's segments apart until it has ended.
        """
        connection = self.manifest.connection
        assert connection.in_transaction, "append belongs into Manifest.writing()"
        if table.num_rows == 0:
            return []
        hashes = event_hashes(table) if hashes is None else hashes
        gone = Forgotten(self.manifest).refused(table["user"], table["time"])
        first: dict[bytes, int] = {}
        for row, key in enumerate(hashes):
            if gone is None or not gone[row]:
                first.setdefault(key, row)
        num_gone = 0 if gone is None else int(gone.sum())
        self.manifest.count("forgotten", num_gone)
        # In the order of the key, so that pages of the index are touched once; neighbours in time are neighbours there.
        keys = sorted(first)
        known: set[bytes] = set()
        for begin in range(0, len(keys), _KEYS_PER_QUERY):
            part = keys[begin : begin + _KEYS_PER_QUERY]
            known.update(key for (key,) in connection.execute(f"SELECT hash FROM seen WHERE hash IN ({','.join('?' * len(part))})", part))
        fresh = [key for key in keys if key not in known] if known else keys
        rows = sorted(first[key] for key in fresh)
        self.manifest.count("duplicates", len(hashes) - num_gone - len(rows))
        if not rows:
            return []
        taken = table if len(rows) == table.num_rows else table.take(pa.array(rows, pa.int64()))
        kept = taken.append_column(SEGMENT_SCHEMA.field("event"), pa.array([hashes[row] for row in rows], pa.binary(HASH_BYTES))).cast(SEGMENT_SCHEMA)
        self.add_segment(kept, origin)
        for begin in range(0, len(fresh), _KEYS_PER_INSERT):
            part = fresh[begin : begin + _KEYS_PER_INSERT]
            connection.execute(f"INSERT INTO seen VALUES {','.join(['(?)'] * len(part))}", part)
        self.manifest.count("stored", len(rows))
        return rows

    def add_segment(self, table: pa.Table, origin: str) -> None:
        """Store rows as a segment of its own, inside the manifest's open transaction; that they are new is the caller's to know."""
        path = self.manifest.segments / f"{uuid.uuid4().hex}.parquet"
        self.manifest.created.append(path)
        write_durably(table, path)
        self.manifest.connection.execute("INSERT INTO digests VALUES (?, ?)", (path.name, digest_file(path)))
        times = pc.min_max(table["time"]).as_py()
        actions = dict(Counter({entry["values"]: entry["counts"] for entry in pc.value_counts(table["action"]).to_pylist()}))
        self.manifest.connection.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, NULL)",
            (path.name, table.num_rows, path.stat().st_size, times["min"], times["max"], json.dumps(actions, sort_keys=True), origin),
        )

    def cut(self, segment: Segment, gone: Callable[[pa.Table], npt.NDArray[np.bool_]], retired: int) -> int:
        """Write a segment anew without the rows that are ``gone``, and forget their event ids; how many. The old file goes as one that was merged at ``retired`` does, in milliseconds since 1970.

        Nothing where the segment was merged meanwhile: its rows are found in another one.
        Raises: Corrupt.
        """
        with self.manifest.writing() as connection:
            row = connection.execute("SELECT origin FROM segments WHERE name = ? AND retired IS NULL", (segment.path.name,)).fetchone()
            if row is None:
                return 0
            segment.check()
            table = read_segment(segment.path)
            flags = gone(table)
            hashes = table.filter(pa.array(flags))["event"].to_pylist()
            if not flags.all():
                self.add_segment(table.filter(pa.array(~flags)), row[0])
            connection.execute("UPDATE segments SET retired = ? WHERE name = ?", (retired, segment.path.name))
            for begin in range(0, len(hashes), _KEYS_PER_QUERY):
                part = hashes[begin : begin + _KEYS_PER_QUERY]
                connection.execute(f"DELETE FROM seen WHERE hash IN ({','.join('?' * len(part))})", part)
        return len(hashes)

    def segments(self, origin: str | None = None) -> list[Segment]:
        """The segments that count now (of one origin, or all); their files stay readable for at least an hour after a merge."""
        found = self.manifest.connection.execute(
            "SELECT name, num_rows, num_bytes, first_time, last_time, actions, coalesce(sha256, '') FROM segments LEFT JOIN digests USING (name) WHERE retired IS NULL AND (?1 IS NULL OR origin = ?1) ORDER BY name",
            (origin,),
        ).fetchall()
        return [
            Segment(self.manifest.segments / name, rows, size, first, last, json.loads(actions), digest)
            for name, rows, size, first, last, actions, digest in found
        ]

    def merge_small(self, *, at_least: int = 32, small_rows: int = 100_000, most_rows: int = 1_000_000, now: float | None = None) -> int:
        """Merge small segments into one where many have gathered, the oldest first; how many were merged.

        Steady traffic writes one small segment a flush: unmerged, a day of it would be a hundred thousand files. Neighbours in time stay together, so that what is too old goes by whole files.
        """
        small = sorted((segment for segment in self.segments("") if segment.num_rows < small_rows), key=lambda segment: (segment.last_time, segment.path.name))
        if len(small) < at_least:
            return 0
        small = [segment for segment in small[:256] if _sound(segment)]
        if len(small) < 2:
            return 0
        rows = np.cumsum([segment.num_rows for segment in small])
        small = small[: max(2, int(np.searchsorted(rows, most_rows, side="right")))]
        with self.manifest.writing() as connection:
            names = [segment.path.name for segment in small]
            alive = {name for (name,) in connection.execute("SELECT name FROM segments WHERE retired IS NULL").fetchall()}
            if not alive.issuperset(names):
                return 0
            self.add_segment(pa.concat_tables([read_segment(segment.path) for segment in small]), "")
            retired = int((time.time() if now is None else now) * 1000)
            connection.executemany("UPDATE segments SET retired = ? WHERE name = ?", [(retired, name) for name in names])
        return len(names)

    def sweep(self, *, now: float | None = None, grace_seconds: float = 3600.0) -> int:
        """Remove files that no longer or never counted; how many files.

        Writers hold the manifest while they write a file, so with the manifest in hand an unknown file is an orphan of a killed one.
        """
        removed = 0
        before = int(((time.time() if now is None else now) - grace_seconds) * 1000)
        with self.manifest.writing() as connection:
            connection.execute("DELETE FROM segments WHERE retired < ?", (before,))
            connection.execute("DELETE FROM digests WHERE name NOT IN (SELECT name FROM segments)")
            known = {name for (name,) in connection.execute("SELECT name FROM segments").fetchall()}
            for path in self.manifest.segments.iterdir():
                if path.name not in known:
                    with suppress(FileNotFoundError):
                        path.unlink()
                        removed += 1
        return removed


def _sound(segment: Segment) -> bool:
    """Whether it may be merged: a damaged one would get a digest that is right."""
    try:
        segment.check()
    except Corrupt as error:
        logger("ingestion").error("a segment is damaged and stays as it is", error=str(error))
        return False
    return True
