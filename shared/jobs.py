"""Long work: one spec, run by a local process of the room's worker, or on a cluster by pods (``shared/cluster_jobs.py``).

    submit -> record in Redis (queued) + RunJob message -> JobRunner in a worker starts ``services.local job <id>``
           -> that process calls the room's ``job.run(JobContext)`` -> outcome recorded (succeeded, failed, cancelled)

A job's folder (``data_dir/jobs/<id>``) outlives its process: checkpoints go there. A runner holds a lease on what it runs;
when it dies, its job's process ends too (its standard input closes) and another runner starts the job again, from its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from semantide.shared import broker as broker_door
from semantide.shared.artifacts import ArtifactStore, digest_bytes
from semantide.shared.config import Settings
from semantide.shared.contracts import ENDED, JobRecord, JobSpec, Message, RunJob
from semantide.shared.errors import Conflict, JobCancelled, NotFound, TransientError
from semantide.shared.queues import Queues
from semantide.shared.telemetry import current_trace, logger

JOBS_INDEX = "semantide:jobs"
ENDED_JOBS = "semantide:jobs:ended"  # hash "room/state" -> count
_METRICS_KEPT = 20_000
METRICS_SECONDS = 30 * 86400  # live metrics of a job that has ended; a model keeps its own curve
_RANKS_SECONDS = 600  # what ranks say of their steps is of the present alone
_RECORDS_PER_LOOK = 200
AGAIN = 75  # exit status of a job's process that shall be started again without counting as a crash
FAILED = 65  # exit status of a job's pod that shall not be started again: the job has failed, or was cancelled
CONFIG_FILE = "config.json"  # in a job's folder: its whole configuration, recipe and changes together
_PROGRESS_SECONDS = 0.2


def now_ms() -> int:
    """Milliseconds since 1970-01-01 UTC."""
    return int(time.time() * 1000)


def open_jobs_key(room: str) -> str:
    """The Redis set of a room's jobs that have not ended."""
    return f"semantide:jobs:open:{room}"


def ended_jobs(client: Any) -> dict[tuple[str, str], int]:
    """How many jobs ever ended, by room and state."""
    return {
        (room, state): int(count) for (room, _, state), count in ((key.decode().partition("/"), count) for key, count in client.hgetall(ENDED_JOBS).items())
    }


@dataclass(frozen=True)
class JobOutcome:
    """What a job hands back: artifact references by name, and small JSON figures."""

    artifacts: dict[str, str] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


class Jobs:
    """Records of all jobs, in Redis."""

    def __init__(self, client: Any, queues: Queues | None = None) -> None:
        self._redis, self._queues = client, queues

    @staticmethod
    def key(job_id: str) -> str:
        """The Redis hash of one job; each field is JSON."""
        return f"semantide:job:{job_id}"

    def write(self, job_id: str, **fields: Any) -> None:
        """Set some fields of a record."""
        self._redis.hset(self.key(job_id), mapping={name: json.dumps(value) for name, value in fields.items()})

    def submit(self, spec: JobSpec, once: str | None = None) -> JobRecord:
        """Record a job, in one step, and tell its room. Under the same key ``once`` it is submitted once: whoever comes again is given the job that is there.

        Raises: Conflict where that key stands for another job.
        """
        number = uuid.uuid4().hex if once is None else digest_bytes(once.encode())
        record = JobRecord(id=f"{spec.kind}-{number[:12]}", spec=spec, created=now_ms(), trace=current_trace())
        if self._open(record, record.model_dump(mode="json"), only_new=once is not None):
            return record
        there = self.get(record.id)
        if there.spec != spec:
            raise Conflict(f"the idempotency key {once!r} already stands for job {there.id}, which is another: send a key of its own with each job")
        return there

    def _open(self, record: JobRecord, fields: Mapping[str, Any], *, only_new: bool = False) -> bool:
        pipe = self._redis.pipeline(transaction=True)
        if only_new:
            pipe.watch(self.key(record.id))
            if pipe.exists(self.key(record.id)):
                pipe.reset()
                return False
            pipe.multi()
        pipe.hset(self.key(record.id), mapping={name: json.dumps(value) for name, value in fields.items()})
        pipe.zadd(JOBS_INDEX, {record.id: record.created})
        pipe.sadd(open_jobs_key(record.spec.room), record.id)
        pipe.persist(self.metrics_key(record.id))
        try:
            pipe.execute()
        except broker_door.WatchError:
            return False
        if self._queues is None:
            return True
        try:
            self._queues.send(RunJob(room=record.spec.room, job_id=record.id))
        except TransientError as error:
            # The job stands, and its room looks by itself: a caller who were told of a failure would submit it twice.
            logger("jobs").warning("the room could not be woken, it will see the job by itself", job=record.id, error=str(error))
        return True

    def get(self, job_id: str) -> JobRecord:
        """One record.

        Raises: NotFound, Conflict where another version recorded what this one does not know.
        """
        fields = self._redis.hgetall(self.key(job_id))
        if not fields:
            raise NotFound(f"no job {job_id!r}: list the jobs with `semantide jobs`")
        return _record(fields)

    def readable(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """Records of these jobs, without those that another version recorded: they wait for it, and hold no others up."""
        records = []
        for job_id in job_ids:
            with suppress(Conflict):
                records.append(self.get(job_id))
        return records

    def recent(self, *, kind: str | None = None, state: str | None = None, limit: int = 100, strict: bool = False) -> list[JobRecord]:
        """Newest first, without what another version recorded and this one does not know.

        Raises: Conflict for such a record, where ``strict``.
        """
        records: list[JobRecord] = []
        begin = 0
        while names := self._redis.zrevrange(JOBS_INDEX, begin, begin + _RECORDS_PER_LOOK - 1):
            begin += len(names)
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.hgetall(self.key(name.decode()))
            for fields in pipe.execute():
                if not fields:
                    continue
                try:
                    record = _record(fields)
                except Conflict:
                    if strict:
                        raise
                    continue
                if (kind is None or record.spec.kind == kind) and (state is None or record.state == state):
                    records.append(record)
                    if len(records) == limit:
                        return records
        return records

    def cancel(self, job_id: str) -> JobRecord:
        """Ask a job to stop; a queued one ends at once.

        Raises: NotFound, Conflict when it has already ended.
        """
        record = self.get(job_id)
        if record.state in ENDED:
            raise Conflict(f"job {job_id} has already {record.state}: there is nothing to cancel")
        self.write(job_id, cancel_requested=True)
        if record.state == "queued":
            self.end(record, "cancelled", error="cancelled before it started")
        return self.get(job_id)

    def resume(self, job_id: str) -> JobRecord:
        """Start a failed or cancelled job again from its folder.

        Raises: NotFound, Conflict when it is still running or has succeeded.
        """
        record = self.get(job_id)
        if record.state not in ("failed", "cancelled"):
            raise Conflict(f"job {job_id} is {record.state}: only a failed or cancelled job can be resumed")
        fresh = {"state": "queued", "cancel_requested": False, "error": None, "attempt": 0, "finished": None, "resumes": record.resumes + 1, "npujob": ""}
        self._open(record, fresh)
        return self.get(job_id)

    def end(self, record: JobRecord, state: str, *, error: str | None = None, outcome: JobOutcome | None = None) -> None:
        """Record how a job ended."""
        fields: dict[str, Any] = {"state": state, "error": error, "finished": now_ms()}
        if outcome is not None:
            fields |= {"artifacts": outcome.artifacts, "result": outcome.result}
        pipe = self._redis.pipeline()
        pipe.hset(self.key(record.id), mapping={name: json.dumps(value) for name, value in fields.items()})
        pipe.srem(open_jobs_key(record.spec.room), record.id)
        pipe.hincrby(ENDED_JOBS, f"{record.spec.room}/{state}", 1)
        pipe.expire(self.metrics_key(record.id), METRICS_SECONDS)
        pipe.execute()

    def forget(self, record: JobRecord) -> bool:
        """Take away all that the broker has of a job that has ended; whether it is gone. One that was resumed meanwhile stays."""
        key = self.key(record.id)

        def apply(pipe: Any) -> bool:
            state, finished = pipe.hmget(key, "state", "finished")
            pipe.multi()
            if state is None or json.loads(state) not in ENDED or json.loads(finished or b"null") != record.finished:
                return state is None
            pipe.delete(key, self.metrics_key(record.id), self.ranks_key(record.id))
            pipe.zrem(JOBS_INDEX, record.id)
            return True

        return bool(self._redis.transaction(apply, key, value_from_callable=True))

    @staticmethod
    def metrics_key(job_id: str) -> str:
        """The Redis stream of a job's live metrics."""
        return f"semantide:job:{job_id}:metrics"

    @staticmethod
    def ranks_key(job_id: str) -> str:
        """The Redis hash of what ranks say of their steps."""
        return f"semantide:job:{job_id}:ranks"

    def step_seconds(self, job_id: str) -> dict[int, float]:
        """Seconds that each rank computed for a step of late, without its waits for others."""
        return {int(rank): float(seconds) for rank, seconds in self._redis.hgetall(self.ranks_key(job_id)).items()}

    def metrics(self, job_id: str, after: int = -1) -> list[dict[str, float]]:
        """Metric rows with ``step`` > ``after``; of rows that a resumed run repeated, the last one."""
        rows: dict[tuple[int, tuple[str, ...]], dict[str, float]] = {}
        # From the newest back, so that somebody who follows a long run reads only what is new.
        last = "+"
        while entries := self._redis.xrevrange(self.metrics_key(job_id), max=last, count=_RECORDS_PER_LOOK):
            for _, entry in entries:
                row = json.loads(entry[b"row"])
                if row["step"] <= after:
                    return _in_order(rows)
                rows.setdefault((row["step"], tuple(sorted(row))), row)
            last = f"({entries[-1][0].decode()}"
        return _in_order(rows)


def _record(fields: Mapping[bytes, bytes]) -> JobRecord:
    told = {name.decode(): json.loads(value) for name, value in fields.items()}
    try:
        return JobRecord.model_validate(told)
    except ValidationError as error:
        newer = [each for each in error.errors() if each["type"] == "extra_forbidden" or each["loc"] == ("spec", "kind")]
        if not newer:  # damaged
            raise
        first = newer[0]
        raise Conflict(
            f"job {told.get('id')!r} was recorded by another version of this software, which knows more than this one "
            f"({'.'.join(map(str, first['loc']))} is {str(first.get('input'))[:60]!r}): that version shows and runs it"
        ) from error


def _in_order(rows: Mapping[tuple[int, tuple[str, ...]], dict[str, float]]) -> list[dict[str, float]]:
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


class JobContext:
    """What the code of a job sees of the world."""

    def __init__(self, record: JobRecord, settings: Settings, store: ArtifactStore, client: Any, queues: Queues) -> None:
        self.id, self.spec, self.settings, self.store, self.broker = record.id, record.spec, settings, store, client
        self.workdir = settings.data_dir.absolute() / "jobs" / record.id
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._jobs, self._queues = Jobs(client), queues
        self._stop = threading.Event()
        self._last_progress = 0.0
        self._unsent: list[str] = []
        self._discarded: list[Path] = []
        self._log = logger(f"job.{record.spec.kind}")

    def progress(self, done: float, total: float, unit: str = "", stage: str = "") -> None:
        """Say how far the job is; cheap, written a few times a second."""
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_SECONDS or done >= total:
            self._last_progress = now
            self._quietly(lambda: self._jobs.write(self.id, done=done, total=total, unit=unit, stage=stage))

    def configured(self, config: Any) -> None:
        """Keep the whole configuration, a dataclass or a mapping, for the job's report: the spec has only what was changed of a recipe."""
        values = dict(config) if isinstance(config, Mapping) else asdict(config)
        write_whole(self.workdir / CONFIG_FILE, json.dumps(values, indent=1, sort_keys=True, default=str))

    def metric(self, step: int, **values: float) -> None:
        """Append one row of live metrics; kept back while the broker is away."""
        self._unsent.append(json.dumps({"step": step, **values}))

        def flush() -> None:
            pipe = self.broker.pipeline(transaction=True)
            for row in self._unsent:
                pipe.xadd(Jobs.metrics_key(self.id), {"row": row}, maxlen=_METRICS_KEPT, approximate=True)
            pipe.execute()
            self._unsent.clear()

        self._quietly(flush)

    def step_seconds(self, rank: int, seconds: float) -> None:
        """Say how long a rank computes for a step, without its waits for others: a machine that is slow is found by it."""

        def tell() -> None:
            pipe = self.broker.pipeline(transaction=True)
            pipe.hset(Jobs.ranks_key(self.id), str(rank), f"{seconds:.6g}")
            pipe.expire(Jobs.ranks_key(self.id), _RANKS_SECONDS)
            pipe.execute()

        self._quietly(tell)

    def _quietly(self, write: Callable[[], None]) -> None:
        # A broker that is away must not cost hours of training: what could not be said now is said later.
        try:
            write()
        except broker_door.RedisError as error:
            self._log.warning("the broker is away, the job goes on", error=str(error))

    def check_cancelled(self) -> None:
        """Call it often.

        Raises: JobCancelled when the job shall stop now.
        """
        if self.stopping:
            raise JobCancelled(f"job {self.id} was asked to stop")

    def stop(self) -> None:
        """Make the next ``check_cancelled`` raise."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return self._stop.is_set()

    def send(self, message: Message) -> None:
        """Put a message on its queue.

        Raises: BrokerUnavailable; let it through, the job is then started again.
        """
        self._queues.send(message)

    def discard(self, folder: Path) -> None:
        """Remove a folder once the job's outcome is kept: before, a restart may still need it."""
        self._discarded.append(folder)

    def tidy(self) -> None:
        """Remove what was discarded."""
        for folder in self._discarded:
            shutil.rmtree(folder, ignore_errors=True)


def end_of_file(path: Path, num_bytes: int) -> str:
    """The last bytes of a log as text; empty where there is none. However long it grew, no more than these are read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - num_bytes))
            return stream.read(num_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, and still there after a loss of power."""
    temporary = path.with_name(f".{path.name}.incoming")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
