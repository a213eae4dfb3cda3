"""Takes every trace of forgotten users away: events, histories, rankings, parked batches, refused rows, uploads, data sets and what was drawn from these.

What was learned from their events stays and is named (``saw``): a model holds no row of anybody, and is made anew from a new data set where that does not suffice.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.forgotten import Forgotten
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.stream import PARKED, decode
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.errors import Corrupt
from semantide.shared.history import Histories
from semantide.shared.job_ending import REPORT_FILE

PERSONAL = ("datasets", "negatives", "beams", "rollouts")
"""Kinds of artifacts that hold rows of single users; what else was made of these has learned from them."""

_SCAN = 500
_FORGOTTEN = "(forgotten)"


def mentions(user: str) -> re.Pattern[str]:
    """A user's id where it stands alone, plain or as JSON, a log or a page writes it; not inside of another word or number. What stands before it may be an escaped tab or line break."""
    said = {user, repr(user)[1:-1]}
    said |= {json.dumps(form, ensure_ascii=ascii)[1:-1] for form in said for ascii in (True, False)}
    forms = said | {escape(form) for form in said}
    return re.compile(rf"(?:(?<![\w.-])|(?<=\\[nrtbf]))(?:{'|'.join(map(re.escape, sorted(forms, key=lambda form: (-len(form), form))))})(?![\w-])")


class Sweep:
    """One sweep. ``names`` are the ids of those whose text may lie somewhere; the log and the artifacts know them by their tombstones."""

    def __init__(self, manifest: Manifest, store: ArtifactStore, broker: Any, data_dir: Path, names: Collection[str]) -> None:
        self._manifest, self._store, self._broker, self._data_dir, self._names = manifest, store, broker, data_dir, names
        self._forgotten = Forgotten(manifest)
        self._patterns = [mentions(name) for name in names]
        self.counts: Counter[str] = Counter()
        self.removed: list[str] = []
        self.unreported: list[str] = []
        self.saw: list[str] = []
        self.damaged: set[str] = set()

    def events(self, check: Callable[[], None]) -> None:
        """Write segments anew without these users, and remove the old files at once. Of those that are ``damaged`` nobody can say whose events they hold."""
        log = EventLog(self._manifest)
        self.damaged.clear()
        for segment in log.segments():
            check()
            try:
                segment.check()
                column = read_segment(segment.path, ("user", "time"))
                if self._forgotten.refused(column["user"], column["time"]) is not None:
                    self.counts["events"] += log.cut(segment, self._flags, retired=0)
            except Corrupt:
                self.damaged.add(segment.path.name)
        log.sweep(grace_seconds=-1.0)

    def _flags(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        flags = self._forgotten.refused(table["user"], table["time"])
        return np.zeros(table.num_rows, dtype=np.bool_) if flags is None else flags

    def artifacts(self) -> list[str]:
        """References of the artifacts that hold rows of these users; ``saw`` then names what has learned from them."""
        inputs = {ref: set(self._store.manifest(ref).get("inputs", {}).values()) for ref in self._store.list()}
        tainted = {ref for ref in inputs if ref.startswith("datasets/") and self._holds(ref)}
        while more := {ref for ref, made_of in inputs.items() if made_of & tainted} - tainted:
            tainted |= more
        self.saw = sorted({*self.saw, *(ref for ref in tainted if not ref.startswith(PERSONAL))})
        return sorted(ref for ref in tainted if ref.startswith(PERSONAL))

    def _holds(self, ref: str) -> bool:
        with suppress(OSError, pa.ArrowException, Corrupt):
            # Unchecked: in a data set that is damaged somebody may still be found.
            users = pq.read_table(self._store.get(ref, files=()) / "users.parquet", columns=["user", "times"])
            first = [min(times or [0]) for times in users["times"].to_pylist()]
            return self._forgotten.refused(users["user"], pa.array(first, pa.int64())) is not None
        return False  # it holds no users that anybody could read

    def remove(self, refs: Collection[str]) -> None:
        """Remove artifacts."""
        for ref in refs:
            self._store.remove(ref)
        self.removed = sorted({*self.removed, *refs})

    def files(self, idle: Collection[str]) -> None:
        """Clear uploads, what jobs had in hand, and what their refused rows, logs and reports say of these users. ``idle`` are ids of jobs that do not run; ``unreported`` then names those whose report went."""
        uploads = self._data_dir / "uploads"
        for path in sorted(uploads.rglob("*"), reverse=True) if uploads.is_dir() else ():
            if path.is_file() and not path.name.startswith(".incoming"):
                path.unlink(missing_ok=True)
                self.counts["uploads"] += 1
            elif path.is_dir():
                with suppress(OSError):
                    path.rmdir()
        for job in idle:
            folder = self._data_dir / "jobs" / job
            shutil.rmtree(folder / "steps", ignore_errors=True)
            if (rejects := folder / "rejects.jsonl").is_file():
                self._cut(rejects)
            outcome = folder / "outcome.json"  # of an ended job: its record has all of it
            if outcome.is_file() and self._named(outcome.read_text(errors="replace")):
                outcome.unlink()
            if (log := folder / "log.txt").is_file():
                self._rewrite(log, lambda line: str(self._redacted(line)))
            report = folder / REPORT_FILE
            if report.is_file() and self._named(report.read_text(errors="replace")):
                report.unlink()
                self.unreported.append(job)

    def _cut(self, rejects: Path) -> None:
        """Blank refused rows out. The file stays as long as it is: an import that is resumed knows by its length what of it counts."""

        def blank(line: str) -> str:
            try:
                told = json.dumps(self._redacted(json.loads(line)))
            except ValueError:
                told = "{}"
            size = len(line.rstrip("\n").encode(errors="surrogateescape"))
            told = told if len(told) <= size else "{}"
            return told.ljust(size) + "\n" * line.endswith("\n")

        self._rewrite(rejects, blank)

    def _rewrite(self, path: Path, change: Callable[[str], str]) -> None:
        """Change the lines that name these users."""
        with path.open(errors="surrogateescape", newline="\n") as stream:
            lines = [(line, self._named(line)) for line in stream]
        if not (found := sum(named for _, named in lines)):
            return
        aside = path.with_suffix(".incoming")
        with aside.open("w", errors="surrogateescape", newline="\n") as stream:
            stream.writelines(change(line) if named else line for line, named in lines)
        aside.replace(path)
        self.counts["lines"] += found

    def _named(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self._patterns)

    def broker_state(self, histories: Histories) -> None:
        """Take these users out of the broker: histories, kept rankings, parked batches, refused rows in records of jobs."""
        for name in self._names:
            histories.forget(name)
        for key in self._broker.scan_iter(match="semantide:*", count=_SCAN, _type="string"):
            value = self._broker.get(key)
            if value is not None and _user_of(value) in self._names:
                self._broker.delete(key)
                self.counts["kept_values"] += 1
        for letter in self._broker.lrange(PARKED, 0, -1):
            if self._in_letter(letter):
                self._broker.lrem(PARKED, 1, letter)
                self.counts["parked"] += 1
        for key in self._broker.scan_iter(match="semantide:job:import-*", count=_SCAN, _type="hash"):
            fields = {name: json.loads(value) for name, value in self._broker.hgetall(key).items() if name in (b"result", b"error")}
            told = (fields.get(b"result") or {}).get("rejects", [])
            if told and self._named(json.dumps(told, ensure_ascii=False)):
                fields[b"result"]["rejects"] = [self._redacted(each) for each in told]
                self._broker.hset(key, "result", json.dumps(fields[b"result"]))
                self.counts["records"] += 1
            if self._named(fields.get(b"error") or ""):
                self._broker.hset(key, "error", json.dumps(self._redacted(fields[b"error"])))
                self.counts["records"] += 1

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._redacted(str(inner) if key == "value" and isinstance(inner, int | float) else inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._redacted(inner) for inner in value]
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(_FORGOTTEN, value)
        return value

    def _in_letter(self, letter: bytes) -> bool:
        """Whether a parked batch may hold these users: one that nobody can read is not kept on the chance that it does not."""
        try:
            said = json.loads(letter)
            fields = {name.encode(): bytes.fromhex(text) if name == "data" else text.encode() for name, text in said["fields"].items()}
            entry = decode(said["entry"].encode(), fields)
        except (Corrupt, ValueError, KeyError, AttributeError, TypeError):
            return True
        return entry.kind == "interactions" and bool(np.any(pc.is_in(entry.table["user"], pa.array(list(self._names), pa.string())).to_numpy()))


def rewrite_append_only_file(broker: Any, check: Callable[[], None], pause: Callable[[float], None] = time.sleep) -> None:
    """Have the broker write its file anew: what was deleted still stands in the commands of the old one."""
    with suppress(Exception):  # a managed broker may not let us: its own rewrites do it in time
        broker.bgrewriteaof()
    while True:
        state = broker.info("persistence")
        if not state.get("aof_rewrite_in_progress") and not state.get("aof_rewrite_scheduled"):
            return
        check()
        pause(0.1)


def _user_of(value: bytes) -> str | None:
    """The user of a kept value, packed or plain, that says one."""
    with suppress(zlib.error):
        value = zlib.decompress(value)
    with suppress(ValueError):
        said = json.loads(value)
        return said.get("user") if isinstance(said, dict) else None
    return None
