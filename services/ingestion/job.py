"""Long work of this room: imports of files, data sets, and the sweep after users were forgotten."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.eventlog import EventLog, Segment
from semantide.services.ingestion.fileimport import FileImport, ImportConfig, result_of, run_through
from semantide.services.ingestion.forgotten import Forgotten
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA, ItemLog
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.schema import Rules
from semantide.services.ingestion.sources import Source, confined, plan
from semantide.services.ingestion.stream import DIMENSION, GROUP, STREAM
from semantide.services.ingestion.sweep import Sweep, rewrite_append_only_file
from semantide.services.ingestion.user_ids import settled
from semantide.shared import broker as broker_door
from semantide.shared.availability import Availability
from semantide.shared.contracts import JobRecord
from semantide.shared.errors import BadData, Corrupt, NotFound, TransientError
from semantide.shared.executors import executor
from semantide.shared.forgetting import KNOWN_SECONDS, Forgetting
from semantide.shared.history import Histories, HistoryEvent
from semantide.shared.job_ending import write_report
from semantide.shared.jobs import JobContext, JobOutcome, Jobs, now_ms
from semantide.shared.telemetry import logger
from semantide.shared.version import code_version

MIN_FREE_BYTES = 64 * 1024 * 1024
_RETRY_SECONDS = 5.0
_DRAIN_SECONDS = 120.0
_USERS_PER_MERGE = 500
_MOST_JOBS = 1_000_000
_EVENTS_PER_PARTITION = 4_000_000
_LOG = logger("ingestion")


def run(job: JobContext) -> JobOutcome:
    """Do the job's work: ``import``, ``dataset`` or ``forget``."""
    if job.spec.kind == "import":
        return import_files(job)
    if job.spec.kind == "dataset":
        return make_dataset(job)
    if job.spec.kind == "forget":
        return forget_users(job)
    raise ValueError(f"ingestion runs no jobs of kind {job.spec.kind!r}: it runs import, dataset and forget")


def import_files(job: JobContext) -> JobOutcome:
    """Read files into the log; ends with refused rows in a file beside the job, and fails where no row was good.

    Raises: BadData.
    """
    config = ImportConfig.parse(job.spec.config)
    job.configured(config)
    folders = job.settings.import_folders
    pseudonyms = _patiently(job, lambda: settled(job.settings, job.broker))
    sources, skipped, started = _plan(job, config, folders)
    with closing(Manifest(job.settings.data_dir / "events")) as manifest:
        dimension = _patiently(job, lambda: job.broker.get(DIMENSION))
        rules = Rules(
            job.settings.actions,
            started,
            default_action=config.default_action,
            embedding_dimension=int(dimension) if dimension else ItemLog(manifest).embedding_dimension(),
        )
        if config.default_action not in rules.actions:
            raise ValueError(f"default_action {config.default_action!r} is not a known action: use one of {', '.join(sorted(rules.actions))}")
        work = FileImport(job.id, manifest, sources, config, rules, job.workdir / "rejects.jsonl", pseudonyms)
        begun, rows_before = time.monotonic(), work.state.num_rows

        def report(work: FileImport) -> None:
            job.progress(work.done_bytes, work.total_bytes, "bytes", f"importing {Path(work.sources[work.state.file].path).name}")
            seconds = max(1e-6, time.monotonic() - begun)
            job.metric(
                work.state.num_rows, rows=work.state.num_rows, rejected=work.state.rejected, rows_per_second=(work.state.num_rows - rows_before) / seconds
            )

        def retry(error: Exception) -> bool:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                return False
            _LOG.warning("the log cannot be written, the import waits", error=str(error))
            job.progress(work.done_bytes, work.total_bytes, "bytes", f"waiting: {error}")
            _wait(job, _RETRY_SECONDS)
            return True

        def check() -> None:
            job.check_cancelled()
            while shutil.disk_usage(manifest.folder).free < MIN_FREE_BYTES:
                retry(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

        try:
            run_through(work, check=check, retry=retry, report=report)
        except BadData:
            # What came before the damage is stored and counts: nothing of it may stay half told.
            _tell(job, manifest, work)
            raise
        per_second = (work.state.num_rows - rows_before) / max(1e-6, time.monotonic() - begun)
        result = result_of(work, skipped, per_second)
        if work.state.num_rows == work.state.rejected:
            first = result["rejects"][0] if result["rejects"] else None
            why = f"the first: {first}" if first else "there were none"
            raise BadData(f"none of the {work.state.num_rows} rows could be imported; {why}")
        _tell(job, manifest, work)
    return JobOutcome(result=result)


def _tell(job: JobContext, manifest: Manifest, work: FileImport) -> None:
    """Let the other rooms know of what is stored."""
    if work.state.items:
        _publish_items(job, manifest)
    if work.state.accepted > work.state.items:
        _merge_histories(job, EventLog(manifest).segments(job.id))
    work.release()


def _plan(job: JobContext, config: ImportConfig, folders: list[Path]) -> tuple[list[Source], dict[str, str], int]:
    """The plan of the first start: a restart works on the same files at the same moment, so it decides the same of every row."""
    path = job.workdir / "plan.json"
    if path.exists():
        kept = json.loads(path.read_text())
        return [Source(**source) for source in kept["sources"]], kept["skipped"], kept["started"]
    private = job.settings.data_dir.resolve()
    sources, skipped = plan(confined(config.path, folders, private), folders, config.options, private)
    started = now_ms()
    temporary = path.with_suffix(".incoming")
    temporary.write_text(json.dumps({"sources": [source.as_dict() for source in sources], "skipped": skipped, "started": started}, indent=1))
    temporary.replace(path)
    return sources, skipped, started


def _wait(job: JobContext, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job.check_cancelled()
        time.sleep(0.1)


def _patiently(job: JobContext, ask: Any) -> Any:
    """Ask the broker until it answers: what is stored is stored, the rest can wait."""
    while True:
        try:
            return ask()
        except broker_door.ConnectionLost as error:
            _LOG.warning("the broker is away, the job waits", error=str(error))
            _wait(job, 1.0)


def _publish_items(job: JobContext, manifest: Manifest) -> None:
    """Say at once which items must not be recommended, and how long vectors are; the worker announces the rest."""
    items = ItemLog(manifest)
    gone = items.unavailable()
    availability = Availability(job.broker)
    for begin in range(0, len(gone), 5000):
        part = gone[begin : begin + 5000]
        _patiently(job, lambda part=part: availability.update(dict.fromkeys(part, False)))
    dimension = items.embedding_dimension()
    if dimension is not None:
        _patiently(job, lambda: job.broker.set(DIMENSION, dimension, nx=True))


def _merge_histories(job: JobContext, segments: list[Segment]) -> None:
    """Give the imported users their online histories: the last N events, merged with what is there."""
    settings = job.settings
    told = [name for name, intensity in settings.actions.items() if intensity >= 1 or intensity < 0]
    histories = Histories(job.broker, settings.history_length, settings.history_ttl_seconds)
    paths = [segment.path for segment in segments]
    partitions = 1 + sum(segment.num_rows for segment in segments) // _EVENTS_PER_PARTITION
    for partition in range(partitions):
        job.progress(partition, partitions, "parts", "online histories")
        frame = (
            pl.scan_parquet(paths, missing_columns="insert", extra_columns="ignore")
            .select("user", "item", "time", "action")
            .filter(pl.col("action").is_in(told) & (pl.col("user").hash(seed=0) % partitions == partition))
            .sort("user", "time")
            .group_by("user", maintain_order=True)
            .tail(settings.history_length)
            .collect()
        )
        users = frame.group_by("user", maintain_order=True).agg("item", "time", "action")
        for part in users.iter_slices(_USERS_PER_MERGE):
            job.check_cancelled()
            events = {user: [HistoryEvent(*event) for event in zip(item, moment, action, strict=True)] for user, item, moment, action in part.rows()}
            _patiently(job, lambda events=events: histories.merge(events))


def make_dataset(job: JobContext) -> JobOutcome:
    """Make a data set of everything that was accepted before now.

    Raises: BadData where nothing is left after cleaning, Corrupt where a segment of the log is damaged, TransientError where accepted batches are not being stored.
    """
    config = DatasetConfig.parse(job.spec.config, session_gap_seconds=job.settings.session_gap_seconds)
    job.configured(config)
    _wait_for_stream(job)
    with closing(Manifest(job.settings.data_dir / "events")) as manifest:
        job.progress(0, 3, "steps", "reading the log")
        segments = EventLog(manifest).segments()
        tables = list(ItemLog(manifest).tables())
    if not segments:
        raise BadData("there are no interactions: send some to POST /v1/interactions, or import a file with `semantide ingest PATH`")
    for segment in segments:
        job.check_cancelled()
        segment.check()
    items = pa.concat_tables(tables) if tables else ARTIFACT_SCHEMA.empty_table()
    settings = job.settings
    workdir = _workdir(job.workdir / "steps", segments, items, config, settings.actions, settings.data_part_rows)

    def tick(done: int, total: int, name: str) -> None:
        job.check_cancelled()
        job.progress(1 + done / total, 3, "steps", name)

    with tempfile.TemporaryDirectory(dir=job.workdir) as folder:
        header = write_dataset(
            grouped(segments, settings.data_part_rows),
            sum(segment.num_rows for segment in segments),
            items,
            settings.actions,
            config,
            Path(folder),
            workdir=workdir,
            executor=executor(settings.data_executor, settings.ray_address),
            part_rows=settings.data_part_rows,
            tick=tick,
        )
        job.check_cancelled()
        job.progress(2, 3, "steps", "storing the data set")
        ref = job.store.put("datasets", Path(folder), config=header["config"], seed=job.spec.seed)
    job.discard(workdir)
    job.progress(3, 3, "steps", "done")
    return JobOutcome(artifacts={"dataset": ref}, result={"counts": header["counts"], "dropped": header["dropped"], "pages": header["page_report"]})


def forget_users(job: JobContext) -> JobOutcome:
    """Take away every trace of the users that were forgotten and not yet swept. Does nothing twice, and nothing where nobody waits."""
    _wait_for_stream(job)
    with closing(Manifest(job.settings.data_dir / "events")) as manifest:
        forgotten = Forgotten(manifest)
        waiting = forgotten.tombstones(waiting=True)
        forgetting, begun = Forgetting(job.broker), time.monotonic()
        names = forgetting.users()
        sweep = Sweep(manifest, job.store, job.broker, job.settings.data_dir.absolute(), set(names.values()))
        sweep.saw = sorted({ref for stone in waiting for ref in stone.found.get("saw", ())})  # of a sweep that did not end
        job.progress(0, 5, "steps", "events")
        sweep.events(job.check_cancelled)
        # What runs now may have read of them before, and would write of them later.
        _wait_for_jobs(job, lambda record: record.spec.room == job.spec.room)
        sweep.events(job.check_cancelled)
        job.progress(1, 5, "steps", "artifacts")
        while refs := sweep.artifacts():
            _wait_for_jobs(job, partial(_reads, refs))
            forgotten.note(waiting, sweep.saw)
            sweep.remove(refs)
        job.progress(2, 5, "steps", "files")
        own = [record for record in Jobs(job.broker).recent(limit=_MOST_JOBS) if record.spec.room == job.spec.room and record.id != job.id]
        sweep.files([record.id for record in own if record.state != "running"])
        if names:  # requests that began before keep rankings and prompts of theirs until they end, and whoever holds such in memory has to meet the ids
            job.progress(3, 5, "steps", "waits for requests that began before")
            _wait(job, begun + KNOWN_SECONDS + job.settings.serving_deadline_seconds - time.monotonic())
        job.progress(3, 5, "steps", "broker")
        sweep.broker_state(Histories(job.broker, job.settings.history_length, job.settings.history_ttl_seconds))
        _report_anew(job, sweep.unreported)
        if sweep.damaged:  # the tombstones go on waiting: nobody is forgotten there
            raise Corrupt(
                f"segments {', '.join(sorted(sweep.damaged))} of the event log are damaged and may hold users who were forgotten: bring them back from a backup "
                f"into {manifest.segments}, and run the job again (semantide forget); everything else is swept"
            )
        found = {**sweep.counts, "removed": sweep.removed, "saw": sweep.saw}
        forgotten.swept(waiting, found, now_ms())
        forgetting.remove(names)
        job.progress(4, 5, "steps", "the broker's file")
        rewrite_append_only_file(job.broker, job.check_cancelled)
    job.progress(5, 5, "steps", "done")
    return JobOutcome(result={"users": len(waiting), **found})


def _report_anew(job: JobContext, names: Sequence[str]) -> None:
    """Write the reports of ended jobs from what is kept of them now."""
    records = Jobs(job.broker)
    for name in names:
        with suppress(NotFound):
            write_report(records, records.get(name), job.store, job.workdir.parent / name)


def _reads(refs: Sequence[str], record: JobRecord) -> bool:
    return not set(refs).isdisjoint(record.spec.inputs.values())


def _wait_for_jobs(job: JobContext, matters: Callable[[JobRecord], bool]) -> None:
    """Wait until none of the jobs that matter runs."""
    records = Jobs(job.broker)
    while others := [record.id for record in records.recent(state="running", limit=_MOST_JOBS) if record.id != job.id and matters(record)]:
        job.progress(0, 0, "steps", f"waits for {others[0]}")
        _wait(job, _RETRY_SECONDS)


def grouped(segments: Sequence[Segment], rows: int) -> list[list[Path]]:
    """Segments to be read together: as many as have about so many rows."""
    groups: list[list[Path]] = []
    room = 0
    for segment in segments:
        if room <= 0:
            groups.append([])
            room = rows
        groups[-1].append(segment.path)
        room -= segment.num_rows
    return groups


def _workdir(folder: Path, segments: Sequence[Segment], items: pa.Table, config: DatasetConfig, actions: dict[str, float], part_rows: int) -> Path:
    """Where the steps keep what they made; emptied where that was of other events, items or options, or made by another version."""
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, items.schema) as stream:
        stream.write_table(items)
    digest = hashlib.sha256(buffer.getvalue())
    digest.update(json.dumps([[segment.path.name for segment in segments], asdict(config), actions, part_rows, code_version()], sort_keys=True).encode())
    kept = folder / "made-of"
    if not kept.exists() or kept.read_text() != digest.hexdigest():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kept.write_text(digest.hexdigest())
    return folder


def _wait_for_stream(job: JobContext) -> None:
    """Wait until what was accepted before now is in the log."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    last = _patiently(job, lambda: job.broker.xrevrange(STREAM, count=1))
    if not last:
        return
    target = _moment(last[0][0])
    while True:
        first = _patiently(job, lambda: job.broker.xrange(STREAM, count=1))
        if not first or _moment(first[0][0]) > target:
            return
        if time.monotonic() > deadline:
            raise TransientError(f"accepted batches wait in {STREAM} (group {GROUP}) and nobody stores them: start the ingestion worker, then resume this job")
        job.progress(0, 3, "steps", "waiting for accepted batches to be stored")
        _wait(job, 0.2)


def _moment(entry: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry.decode().partition("-")
    return int(milliseconds), int(sequence)
