"""How a job's end is recorded: its report is written into its folder first, so whoever sees that a job has ended finds the report."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import ConnectionLost
from semantide.shared.contracts import JobRecord, JobState
from semantide.shared.errors import SemantideError
from semantide.shared.job_report import Origin, page
from semantide.shared.jobs import CONFIG_FILE, JobOutcome, Jobs, end_of_file, now_ms, write_whole
from semantide.shared.telemetry import logger
from semantide.shared.version import code_version

REPORT_FILE = "report.html"
_LOG_BYTES = 8 * 1024


def origin_of(record: JobRecord, store: ArtifactStore, folder: Path) -> Origin:
    """What a job was made from, as far as it is still there to be read."""
    manifests: dict[str, dict[str, Any]] = {}
    for ref in (*record.spec.inputs.values(), *record.artifacts.values()):
        try:
            manifests[ref] = store.manifest(ref)
        except (SemantideError, OSError, ValueError):
            continue
    try:
        config = dict(json.loads((folder / CONFIG_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        config = {}
    return Origin(code_version(), _machine(), config, manifests, end_of_file(folder / "log.txt", _LOG_BYTES))


def _machine() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version(), "torch": torch}


def end_job(
    jobs: Jobs, record: JobRecord, store: ArtifactStore, folder: Path, state: JobState, *, error: str | None = None, outcome: JobOutcome | None = None
) -> None:
    """Write the report, then the record."""
    made = {"artifacts": outcome.artifacts, "result": outcome.result} if outcome is not None else {}
    write_report(jobs, record.model_copy(update={"state": state, "error": error, "finished": now_ms(), **made}), store, folder)
    jobs.end(record, state, error=error, outcome=outcome)


def write_report(jobs: Jobs, record: JobRecord, store: ArtifactStore, folder: Path) -> None:
    """Write an ended job's report into its folder. One that cannot be written takes nothing from the job.

    Raises: what the broker's client does where the broker is away.
    """
    try:
        write_whole(folder / REPORT_FILE, page(record, jobs.metrics(record.id), origin_of(record, store, folder)))
    except ConnectionLost:
        raise
    except Exception as cause:
        logger("jobs").warning("the report of a job could not be written", job=record.id, error=f"{type(cause).__name__}: {cause}")


def report_of(record: JobRecord, jobs: Jobs, store: ArtifactStore, folder: Path) -> str:
    """The report that was written when the job ended; of one that goes on, or whose report is gone, as it stands now."""
    if record.finished is not None:
        try:
            return (folder / REPORT_FILE).read_text(encoding="utf-8")
        except OSError:
            pass
    return page(record, jobs.metrics(record.id), origin_of(record, store, folder))
