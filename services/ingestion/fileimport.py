"""An import of files into the log: chunk by chunk, each with its own transaction, so that a restart goes on where it stopped.

plan.json      in the job's folder: the files as they were, and the moment of the start
rejects.jsonl  beside it: refused rows; its committed length is in the manifest, what lies beyond is cut off on a restart
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from semantide.services.ingestion.batches import TIME_UNITS, check_interaction_table
from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.itemlog import ItemLog
from semantide.services.ingestion.itemrows import check_item_records
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.readers.chunk import ROWS_PER_CHUNK, Chunk
from semantide.services.ingestion.readers.formats import Format, ReadOptions
from semantide.services.ingestion.rows import item_table
from semantide.services.ingestion.schema import INTERACTION_SCHEMA, Rejection, Rules
from semantide.services.ingestion.sources import Source, reopened
from semantide.shared.contracts import Item
from semantide.shared.pseudonyms import Pseudonyms

REJECTS_SHOWN = 20


@dataclass(frozen=True)
class ImportConfig:
    """What a caller may say about an import; only ``path`` is needed.

    Units: ``time_unit`` of numbers in the time column: ms, s, us or ns.
    """

    path: str
    format: str = ""
    kind: str = ""
    mapping: Mapping[str, str] = field(default_factory=dict)
    time_unit: str = ""
    delimiter: str = ""
    encoding: str = "utf-8"
    default_action: str = "click"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ImportConfig:
        """Check a job's configuration.

        Raises: ValueError naming what is wrong.
        """
        known = cls.__dataclass_fields__
        for name in config:
            if name not in known:
                raise ValueError(f"an import has no option {name!r}: use some of {', '.join(known)}")
        if not isinstance(config.get("path"), str) or not config["path"]:
            raise ValueError(f"path is {config.get('path')!r}: name the file or folder to import")
        made = cls(**config)
        if made.kind not in ("", "interactions", "items"):
            raise ValueError(f"kind is {made.kind!r}: it is interactions or items, or left out")
        if made.time_unit and made.time_unit not in TIME_UNITS:
            raise ValueError(f"time_unit is {made.time_unit!r}: use one of {', '.join(TIME_UNITS)}")
        if made.delimiter and len(made.delimiter.encode()) != 1:
            raise ValueError(f"delimiter is {made.delimiter!r}: it is one character")
        try:
            "".encode(made.encoding)
        except LookupError:
            raise ValueError(f"encoding {made.encoding!r} is not known: use utf-8, latin-1 or another name that Python knows") from None
        return made

    @property
    def options(self) -> ReadOptions:
        """The part that concerns reading."""
        kind: Any = self.kind or None
        return ReadOptions(self.format, kind, dict(self.mapping), self.time_unit, self.delimiter, self.encoding)


@dataclass(frozen=True)
class State:
    """How far an import is: the file, the position in it, and what was counted so far. Units: ``done`` bytes of the finished part of that file."""

    file: int = 0
    position: str = ""
    done: int = 0
    num_rows: int = 0
    accepted: int = 0
    duplicates: int = 0
    rejected: int = 0
    rejects_bytes: int = 0
    items: int = 0


@dataclass(frozen=True)
class Prepared:
    """Chunks that were read and checked and wait to be stored; ``position`` and ``done`` are those after them."""

    index: int
    found: Format
    position: str
    done: int
    num_rows: int
    table: pa.Table
    hashes: list[bytes]
    items: list[Item]
    numbers: list[int]
    rejections: list[Rejection]


_FIELDS = tuple(State.__dataclass_fields__)


class FileImport:
    """One import job's writer."""

    def __init__(
        self, job: str, manifest: Manifest, sources: list[Source], config: ImportConfig, rules: Rules, rejects: Path, pseudonyms: Pseudonyms | None = None
    ) -> None:
        self.job, self.manifest, self.sources, self.config, self.rules, self.rejects = job, manifest, sources, config, rules, rejects
        self.events, self.items, self._pseudonyms = EventLog(manifest), ItemLog(manifest), pseudonyms or Pseudonyms("")
        row = manifest.connection.execute(f"SELECT {', '.join(_FIELDS)} FROM imports WHERE job = ?", (job,)).fetchone()
        self.state = State(**dict(zip(_FIELDS, row, strict=True))) if row else State()
        self._cut_rejects()

    def _cut_rejects(self) -> None:
        with self.rejects.open("ab") as stream:
            stream.truncate(self.state.rejects_bytes)

    def chunks(self) -> Iterator[tuple[int, Format, list[Chunk]]]:
        """What is left to import: the file's number, its format, and chunks that together are worth a transaction."""
        for index in range(self.state.file, len(self.sources)):
            source = self.sources[index]
            found = reopened(source, self.config.options)
            start = self.state.position if index == self.state.file else ""
            held: list[Chunk] = []
            rows = 0
            for chunk in found.read(Path(source.path), start):
                held.append(chunk)
                rows += chunk.num_rows + len(chunk.rejections)
                if rows >= ROWS_PER_CHUNK // 2:
                    yield index, found, held
                    held, rows = [], 0
            if held:
                yield index, found, held

    def prepare(self, index: int, found: Format, chunks: list[Chunk]) -> Prepared:
        """Check some chunks; nothing is stored yet."""
        rules = replace(self.rules, default_action=self.config.default_action, ordinal_time=found.ordinal_time)
        rejections = [rejection for chunk in chunks for rejection in chunk.rejections]
        num_rows = sum(chunk.num_rows + len(chunk.rejections) for chunk in chunks)
        tables: list[pa.Table] = []
        items: list[Item] = []
        numbers: list[int] = []
        for chunk in chunks:
            if found.kind == "interactions":
                assert isinstance(chunk.records, pa.Table)
                checked = check_interaction_table(chunk.records, rules, chunk.rows, time_unit=found.time_unit)
                users = self._pseudonyms.column(checked.table["user"])
                tables.append(checked.table.set_column(0, checked.table.schema.field("user"), users) if self._pseudonyms else checked.table)
                rejections.extend(checked.rejections)
            else:
                records = chunk.records.to_pylist() if isinstance(chunk.records, pa.Table) else chunk.records
                good, rows, bad = check_item_records(records, replace(rules, embedding_dimension=self.rules.embedding_dimension), chunk.rows)
                if self.rules.embedding_dimension is None:
                    # The first vector of a catalogue without any decides for the rest of the import.
                    self.rules = replace(self.rules, embedding_dimension=next((len(item.embedding) for item in good if item.embedding), None))
                items.extend(good)
                numbers.extend(rows)
                rejections.extend(bad)
        if found.kind == "interactions":
            names = tuple(INTERACTION_SCHEMA.names)
            rejections = [replace(each, value=self._pseudonyms.quoted(each.field, each.value, names)) for each in rejections]
        table = pa.concat_tables(tables).combine_chunks() if tables else INTERACTION_SCHEMA.empty_table()
        return Prepared(index, found, chunks[-1].position, chunks[-1].done, num_rows, table, event_hashes(table), items, numbers, rejections)

    def take(self, part: Prepared) -> None:
        """Store some checked chunks: rows, rejections and progress in one transaction.

        Raises: OSError, sqlite3.OperationalError when it cannot be written; then nothing changed and it can be tried again.
        """
        file = Path(self.sources[part.index].path).name
        rejections, items = list(part.rejections), part.items
        state = self.state
        try:
            with self.manifest.writing() as connection:
                accepted = duplicates = 0
                if part.found.kind == "interactions":
                    accepted = len(self.events.append(part.table, part.hashes, origin=self.job))
                    duplicates = part.table.num_rows - accepted
                elif items:
                    # All rows of an import have one version, the moment of its start: an id that has it already came earlier in these files.
                    repeated = self.items.append(item_table(items), self.version)
                    for row in repeated:
                        rejections.append(
                            Rejection(
                                part.numbers[row], "id", items[row].id, "duplicate item id: an earlier row of this import has it", "keep one row for each item"
                            )
                        )
                    accepted = len(items) - len(repeated)
                rejects_bytes = self._write_rejects(rejections, file)
                state = State(
                    file=part.index,
                    position=part.position,
                    done=part.done,
                    num_rows=self.state.num_rows + part.num_rows,
                    accepted=self.state.accepted + accepted,
                    duplicates=self.state.duplicates + duplicates,
                    rejected=self.state.rejected + len(rejections),
                    rejects_bytes=rejects_bytes,
                    items=self.state.items + (accepted if part.found.kind == "items" else 0),
                )
                values = [getattr(state, name) for name in _FIELDS]
                connection.execute(f"INSERT OR REPLACE INTO imports (job, {', '.join(_FIELDS)}) VALUES (?{', ?' * len(_FIELDS)})", (self.job, *values))
        except BaseException:
            self._cut_rejects()
            raise
        self.state = state

    @property
    def version(self) -> int:
        """The item version of everything in this import."""
        # The sequence part keeps two imports, or an import and a REST batch, of one millisecond apart.
        return self.rules.now << 20 | 1 << 19 | zlib.crc32(self.job.encode()) & ((1 << 19) - 1)

    def _write_rejects(self, rejections: list[Rejection], file: str) -> int:
        if not rejections:
            return self.state.rejects_bytes
        with self.rejects.open("ab") as stream:
            for rejection in sorted(rejections, key=lambda rejection: rejection.row):
                stream.write(json.dumps(replace(rejection, file=file).as_dict(), ensure_ascii=True).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            return stream.tell()

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(source.num_bytes for source in self.sources)

    @property
    def done_bytes(self) -> int:
        """Size of what is imported."""
        return sum(source.num_bytes for source in self.sources[: self.state.file]) + self.state.done

    def release(self) -> None:
        """The import has ended: its segments may be merged with others."""
        with self.manifest.writing() as connection:
            connection.execute("UPDATE segments SET origin = '' WHERE origin = ?", (self.job,))

    def first_rejects(self) -> list[dict[str, Any]]:
        """Some of the refused rows, for the job's result."""
        with self.rejects.open() as stream:
            return [json.loads(line) for _, line in zip(range(REJECTS_SHOWN), stream, strict=False)]


def run_through(work: FileImport, *, check: Callable[[], None], retry: Callable[[Exception], bool], report: Callable[[FileImport], None]) -> None:
    """Import everything that is left. ``retry`` is asked after a write that failed, and waits before it says yes."""
    groups = work.chunks()

    def following() -> Prepared | None:
        group = next(groups, None)
        return None if group is None else work.prepare(*group)

    # The next chunk is read and checked while this one is written.
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
        ahead = reader.submit(following)
        while (part := ahead.result()) is not None:
            ahead = reader.submit(following)
            while True:
                check()
                try:
                    work.take(part)
                    break
                except (OSError, sqlite3.OperationalError) as error:
                    if not retry(error):
                        raise
            report(work)


def result_of(work: FileImport, skipped: Mapping[str, str], rows_per_second: float) -> dict[str, Any]:
    """The figures of an ended import; ``exit_code`` 1 says that rows were refused."""
    state = work.state
    return {
        "rows": state.num_rows,
        "accepted": state.accepted,
        "items": state.items,
        "interactions": state.accepted - state.items,
        "duplicates": state.duplicates,
        "rejected": state.rejected,
        "reject_file": str(work.rejects) if state.rejected else "",
        "rejects": work.first_rejects(),
        "files": [{"path": source.path, "format": source.format, "kind": source.kind} for source in work.sources],
        "skipped": dict(skipped),
        "rows_per_second": float(np.round(rows_per_second, 1)),
        "exit_code": 1 if state.rejected else 0,
    }
