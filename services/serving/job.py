"""Long work of this room: the look for what a stack keeps no longer."""

from __future__ import annotations

import time
from dataclasses import asdict

from semantide.services.serving.retention import Policy, Retention
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.retention_account import RetentionAccount

_TOLD = 1000  # names of each kind in the job's result


def run(job: JobContext) -> JobOutcome:
    """Do the job's work: ``retention``.

    Raises: ValueError for a wrong config, StoreUnavailable, JobCancelled.
    """
    if job.spec.kind != "retention":
        raise ValueError(f"serving runs no jobs of kind {job.spec.kind!r}: it runs retention")
    unknown = sorted(set(job.spec.config) - {"dry_run"})
    dry = job.spec.config.get("dry_run", False)
    if unknown or not isinstance(dry, bool):
        raise ValueError(f"a retention job got {', '.join(unknown) or f'dry_run={dry!r}'}: it knows `dry_run`, true or false")
    policy = Policy.of(job.settings)
    job.configured({**asdict(policy), "dry_run": dry})
    work = Retention(job.store, job.broker, job.settings.data_dir.absolute(), policy, dry=dry)
    job.progress(0, 3, "steps", "artifacts")
    work.artifacts(job.check_cancelled, job.id)
    job.progress(1, 3, "steps", "jobs")
    work.jobs(job.check_cancelled)
    job.progress(2, 3, "steps", "uploads")
    work.uploads()
    removed = work.removed
    if not dry:
        counts = {"artifacts": len(removed.artifacts), "jobs": len(removed.jobs), "uploads": len(removed.uploads)}
        RetentionAccount(job.broker).add(job.id, counts, removed.artifact_bytes + removed.upload_bytes, time.time())
    job.progress(3, 3, "steps", "done")
    told = {name: value[:_TOLD] if isinstance(value, list) else value for name, value in asdict(removed).items()}
    counts = {f"num_{name}": len(value) for name, value in asdict(removed).items() if isinstance(value, list)}
    return JobOutcome(result={"dry_run": dry, **counts, **told})
