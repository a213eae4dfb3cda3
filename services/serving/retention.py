"""What a stack keeps no longer: artifacts that nobody needs, jobs that ended long ago, uploads.

An artifact goes in three steps: it is hidden, so that nobody can begin to use it; then it is asked once more who needs it, and one that somebody named meanwhile comes back; the others
are removed. What was made of something goes before that. A process that is killed in between leaves hidden artifacts, which the next look brings back and judges anew.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from semantide.services.serving.needed import needed
from semantide.services.serving.registry import Registry
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import ENDED, JobRecord
from semantide.shared.errors import NotFound
from semantide.shared.jobs import Jobs
from semantide.shared.lineage import Lineage

_DAY_SECONDS = 86_400.0
_TOGETHER = 50  # artifacts that are hidden for one look
_MOST_JOBS = 1_000_000


@dataclass(frozen=True)
class Policy:
    """How long things are kept; 0 is for ever. Units: seconds, and artifacts of a kind."""

    artifact_seconds: float
    artifacts_kept: int
    job_seconds: float
    upload_seconds: float

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """That of a deployment."""
        days = (settings.artifact_days, settings.job_days, settings.upload_days)
        artifacts, jobs, uploads = (each * _DAY_SECONDS for each in days)
        return cls(artifacts, settings.artifacts_kept, jobs, uploads)

    def __bool__(self) -> bool:
        return bool(self.artifact_seconds or self.job_seconds or self.upload_seconds)


@dataclass
class Removed:
    """What went, or would go."""

    artifacts: list[str] = field(default_factory=list)
    artifact_bytes: int = 0
    jobs: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    upload_bytes: int = 0


def newest(stored_at: Mapping[str, float], number: int) -> set[str]:
    """The newest so many artifacts of each kind."""
    kinds: dict[str, list[str]] = {}
    for ref in sorted(stored_at, key=lambda ref: (-stored_at[ref], ref)):
        kinds.setdefault(ref.partition("/")[0], []).append(ref)
    return {ref for refs in kinds.values() for ref in refs[:number]}


def children_first(refs: Collection[str], lineage: Lineage) -> list[str]:
    """An order in which nothing comes after what it was made of."""
    graph: dict[str, set[str]] = {ref: set() for ref in sorted(refs)}
    for ref in graph:
        for parent in lineage.parents(ref):
            if parent in graph:
                graph[parent].add(ref)
    return list(TopologicalSorter(graph).static_order())


class Retention:
    """One look. With ``dry`` nothing is changed, and what would go is told."""

    def __init__(self, store: ArtifactStore, broker: Any, data_dir: Path, policy: Policy, clock: Callable[[], float] = time.time, *, dry: bool = False) -> None:
        self._store, self._broker, self._data_dir, self._policy, self._clock, self._dry = store, broker, data_dir, policy, clock, dry
        self._jobs = Jobs(broker)
        self.removed = Removed()

    def _records(self) -> list[JobRecord]:
        # What a job of another version needs, nobody here can say: then nothing goes.
        return self._jobs.recent(limit=_MOST_JOBS, strict=True)

    def artifacts(self, check: Callable[[], None], own: str = "") -> None:
        """Remove artifacts that nobody has needed for as long as they are kept. ``own`` is the job that looks: what it tells of those that go keeps none."""
        for ref in () if self._dry else self._store.hidden():
            self._store.show(ref)
        if not self._policy.artifact_seconds:
            return
        self._store.forget_fetched()
        lineage = Lineage(self._store)
        since = self._clock() - self._policy.artifact_seconds
        doomed = self._doomed(lineage, since, own)
        order = children_first(doomed, lineage)
        for begin in range(0, len(order), _TOGETHER):
            check()
            some = [ref for ref in order[begin : begin + _TOGETHER] if ref in doomed]
            sizes = {ref: self._size(ref) for ref in some}
            if not self._dry:
                some = self._taken_away(some, lineage, since, own)
                doomed -= self._needed(lineage, since, own)
            self.removed.artifacts += some
            self.removed.artifact_bytes += sum(sizes[ref] for ref in some)

    def _doomed(self, lineage: Lineage, since: float, own: str) -> set[str]:
        stored_at = {}
        for ref in self._store.list():
            with suppress(NotFound):  # taken away by whom it belonged to
                stored_at[ref] = self._store.stored_at(ref)
        young = {ref for ref, moment in stored_at.items() if moment >= since}
        kept = lineage.closure(young | newest(stored_at, self._policy.artifacts_kept)) | self._needed(lineage, since, own)
        return set(stored_at) - kept

    def _needed(self, lineage: Lineage, since: float, own: str) -> set[str]:
        return needed(self._broker, lineage, [record for record in self._records() if record.spec.kind != "retention" and record.id != own], since)

    def _taken_away(self, refs: Sequence[str], lineage: Lineage, since: float, own: str) -> list[str]:
        hidden = []
        for ref in refs:
            lineage.parents(ref)  # as long as it can be read
            with suppress(NotFound):
                self._store.hide(ref)
                hidden.append(ref)
        wanted = self._needed(lineage, since, own)
        back = lineage.closure(ref for ref in hidden if ref in wanted or self._store.stored_at(ref) >= since)
        for ref in hidden:
            if ref in back:
                self._store.show(ref)
            else:
                self._store.remove_hidden(ref)
        return [ref for ref in hidden if ref not in back]

    def _size(self, ref: str) -> int:
        with suppress(NotFound):
            return sum(int(entry["bytes"]) for entry in self._store.manifest(ref)["files"].values())
        return 0

    def jobs(self, check: Callable[[], None]) -> None:
        """Remove the records and folders of jobs that ended long ago, but for those on which a promotion may still depend; and folders that no record has."""
        if not self._policy.job_seconds:
            return
        before = self._clock() - self._policy.job_seconds
        state = Registry(self._broker).read()
        needed_jobs = {job for candidate in state.candidates for job in (candidate.judging, candidate.judged)}
        folder = self._data_dir / "jobs"
        records = self._records()
        for record in records:
            if record.state not in ENDED or record.id in needed_jobs or (record.finished or record.created) / 1000 >= before:
                continue
            check()
            # The record first: once it is gone nobody resumes the job, and a folder without one is found below.
            if self._dry or self._jobs.forget(record):
                self.removed.jobs.append(record.id)
                if not self._dry:
                    shutil.rmtree(folder / record.id, ignore_errors=True)
        known = {record.id for record in records}
        for path in folder.iterdir() if folder.is_dir() and not self._dry else ():
            if path.name not in known and path.is_dir() and _touched(path) < before:
                check()
                shutil.rmtree(path, ignore_errors=True)

    def uploads(self) -> None:
        """Remove uploads that were sent long ago, unless an import may be reading them."""
        folder = self._data_dir / "uploads"
        if not self._policy.upload_seconds or not folder.is_dir():
            return
        if any(record.spec.kind == "import" and record.state not in ENDED for record in self._records()):
            return
        before = self._clock() - self._policy.upload_seconds
        for path in sorted(folder.rglob("*"), reverse=True):
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink() and not self._dry:
                    path.rmdir()  # folders go with their last file
                elif path.is_file() and path.lstat().st_ctime < before:
                    size = path.lstat().st_size
                    if not self._dry:
                        path.unlink()
                    self.removed.uploads.append(path.relative_to(folder).as_posix())
                    self.removed.upload_bytes += size


def _touched(folder: Path) -> float:
    with suppress(OSError):
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time()
