"""The body of a job's process: it runs what the room does for the job, once at a time, and records how that ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

from semantide.shared import broker as broker_door
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import JobState
from semantide.shared.device_faults import device_failed
from semantide.shared.errors import BrokerUnavailable, JobCancelled, RankLost, StoreUnavailable
from semantide.shared.job_ending import end_job
from semantide.shared.job_lock import hold
from semantide.shared.jobs import AGAIN, JobContext, JobOutcome, Jobs, write_whole
from semantide.shared.queues import Queues
from semantide.shared.redaction import Redaction
from semantide.shared.telemetry import continued_trace, logger


def run_job(job_id: str, run: Callable[[JobContext], JobOutcome], settings: Settings, store: ArtifactStore, client: Any, queues: Queues) -> int:
    """The body of a job's process; the exit status is 0 when its end was recorded, ``AGAIN`` when it shall be started again."""
    jobs = Jobs(client)
    record = jobs.get(job_id)
    context = JobContext(record, settings, store, client, queues)
    signal.signal(signal.SIGTERM, lambda *_: context.stop())
    log = logger(f"job.{record.spec.kind}")
    kept = context.workdir / "outcome.json"
    state: JobState = "succeeded"
    error: str | None = None
    outcome: JobOutcome | None = None
    try:
        if not hold(context.workdir / "lock"):
            log.warning("another process still runs this job", job=job_id)
            return AGAIN
        if kept.exists():
            outcome = JobOutcome(**json.loads(kept.read_text()))
        else:
            with continued_trace(record.trace, f"job {record.spec.kind}"):
                outcome = run(context)
            write_whole(kept, json.dumps({"artifacts": outcome.artifacts, "result": outcome.result}))
            context.tidy()
    except JobCancelled:
        if not _patiently(lambda: jobs.get(job_id).cancel_requested):
            return AGAIN
        state, error = "cancelled", "cancelled on request; `semantide jobs resume` goes on from its last checkpoint"
    except (BrokerUnavailable, *broker_door.ConnectionLost) as cause:
        # No fault of the job's: it goes on from its folder when the broker is back.
        log.warning("the broker is away, the job will be started again", job=job_id, error=str(cause))
        return AGAIN
    except (RankLost, StoreUnavailable) as cause:
        # Counted as a crash: it may be so again and again.
        log.warning("the job will be started again", job=job_id, error=str(cause))
        return 1
    except Exception as cause:
        log.exception("job failed", job=job_id)
        if device_failed(cause):
            # Counted as a crash: another device, or this one when it is reset, may do better.
            log.warning("a device failed, the job will be started again", job=job_id)
            return 1
        state, error = "failed", Redaction.of(settings).text(f"{type(cause).__name__}: {cause}")
    while True:
        try:
            end_job(jobs, record, store, context.workdir, state, error=error, outcome=outcome)
            return 0
        except broker_door.ConnectionLost:
            if context.stopping:
                return AGAIN
            time.sleep(0.5)


def _patiently(ask: Callable[[], bool]) -> bool:
    """Ask the broker a few times; no answer counts as no."""
    for _ in range(10):
        try:
            return ask()
        except broker_door.ConnectionLost:
            time.sleep(0.5)
    return False
