"""What somebody should look at now, told by the answers of the APIs. Where Prometheus runs, the chart's rules watch the same over time, and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RECENT_MS = 3600_000
_WAITING_MS = 600_000
_BACKLOG = 100


@dataclass(frozen=True)
class Alert:
    """``name`` is that of the chart's rule where there is one."""

    name: str
    critical: bool
    said: str
    remedy: str


def alerts_of(
    queues: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    live: Mapping[str, Any] | None,
    variants: Mapping[str, Any] | None,
    waiting_batches: int,
    now_ms: float,
) -> list[Alert]:
    """Critical ones first. ``jobs`` are the newest records."""
    found = []
    for queue, count in queues.get("parked", {}).items():
        if count:
            found.append(
                Alert(
                    "SemantideMessagesParked", False, f"{count} messages of {queue} could not be handled", f"once the cause is gone: semantide requeue {queue}"
                )
            )
    failed = [job for job in jobs if job["state"] == "failed" and now_ms - (job["finished"] or 0) < _RECENT_MS]
    if failed:
        found.append(Alert("SemantideJobsFail", False, f"{len(failed)} jobs failed within the hour, {failed[0]['id']} last", "its page under Jobs says why"))
    stuck = [job for job in jobs if job["state"] == "queued" and now_ms - job["created"] > _WAITING_MS]
    if stuck:
        found.append(
            Alert("SemantideJobsWait", False, f"{len(stuck)} jobs have waited for more than ten minutes", "does their room's worker run, or is it busy?")
        )
    if waiting_batches > _BACKLOG:
        found.append(
            Alert(
                "SemantideBacklogGrows",
                True,
                f"{waiting_batches} accepted batches wait for the event log",
                "does the ingestion worker run, and has its disk room?",
            )
        )
    wrong = [live["error"], live.get("retriever_error")] if live else []
    wrong += [variant["error"] for variant in (variants or {}).get("variants", []) if variant["name"] != "live"]
    found += [Alert("SemantideModelSwapFails", True, str(error), "the model before goes on answering; a rollback settles it") for error in wrong if error]
    return sorted(found, key=lambda alert: not alert.critical)
