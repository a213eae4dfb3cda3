"""A job whose work several processes do: what each of them, a rank, is and leaves for the process that launched them.

job's process (records the outcome) -> launches ranks -> ``services.local rank <id>`` each -> the room's ``job.run(JobContext)`` once more
ranks/outcome.json   what the first rank made
ranks/error-3.json   how a rank failed, and when; whether another one was lost, or its device failed
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import ConnectionLost
from semantide.shared.config import Settings
from semantide.shared.device_faults import device_failed
from semantide.shared.errors import BrokerUnavailable, JobCancelled, PermanentError, RankLost, SemantideError, StoreUnavailable
from semantide.shared.job_lock import hold
from semantide.shared.jobs import AGAIN, JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues
from semantide.shared.telemetry import continued_trace, logger


def run_rank(job_id: str, rank: int, run: Callable[[JobContext], JobOutcome], settings: Settings, store: ArtifactStore, client: Any, queues: Queues) -> int:
    """The body of one rank's process; the exit status is 0 when its part is done."""
    record = Jobs(client).get(job_id)
    context = JobContext(record, settings, store, client, queues)
    signal.signal(signal.SIGTERM, lambda *_: context.stop())
    log = logger(f"job.{record.spec.kind}")
    folder = context.workdir / "ranks"
    folder.mkdir(exist_ok=True)
    try:
        hold(folder / f"lock-{rank}", wait=True)  # a rank of an earlier attempt may still be ending
        with continued_trace(record.trace, f"job {record.spec.kind} rank {rank}"):
            outcome = run(context)
    except JobCancelled:
        return AGAIN
    except (BrokerUnavailable, *ConnectionLost) as cause:
        # No fault of the job's: all start again, from the last checkpoint.
        log.warning("the broker is away", job=job_id, rank=rank, error=str(cause))
        return AGAIN
    except StoreUnavailable as cause:
        # Counted as a crash, as in a job of one process: it may be so again and again.
        log.warning("the store is away", job=job_id, rank=rank, error=str(cause))
        return 1
    except Exception as cause:
        log.exception("rank failed", job=job_id, rank=rank)
        whose = {"lost": isinstance(cause, RankLost), "device": device_failed(cause)}
        said = {"rank": rank, "kind": type(cause).__name__, "message": str(cause), **whose, "time": time.time()}
        _keep(folder / f"error-{rank}.json", said)
        return 1
    if rank == 0:
        _keep(folder / "outcome.json", {"artifacts": outcome.artifacts, "result": outcome.result})
    return 0


def forget_ranks(workdir: Path) -> None:
    """Remove what ranks of earlier attempts left."""
    for path in (workdir / "ranks").glob("*.json"):
        path.unlink()


def rank_outcome(workdir: Path) -> JobOutcome:
    """What the first rank made."""
    return JobOutcome(**json.loads((workdir / "ranks" / "outcome.json").read_text()))


def rank_failure(workdir: Path) -> SemantideError | None:
    """What the first rank to fail said, where its fault was more than that another one was lost; None where a device failed, which may have been the cause of all else."""
    said = [json.loads(path.read_text()) for path in (workdir / "ranks").glob("error-*.json")]
    if any(error.get("device") for error in said):
        return None
    own = sorted((error for error in said if not error["lost"]), key=lambda error: float(error["time"]))
    return PermanentError(f"rank {own[0]['rank']}: {own[0]['kind']}: {own[0]['message']}") if own else None


def _keep(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".incoming")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
