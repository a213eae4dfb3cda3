"""Pods as the operator sees them: what the API server says of one, read into a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from semantide.operators.device_health import device_indices
from semantide.operators.pod_resources import asked
from semantide.operators.resources import ATTEMPT_LABEL, JOB_KIND, NPUS_ANNOTATION, RANK_LABEL, REVISION_LABEL, SERVICE_KIND, WORK_ANNOTATION

AGAIN = 75
"""Exit status of a pod that shall be started again without counting as a failure: the broker was away, or it was asked to stop (EX_TEMPFAIL)."""
USELESS = 65
"""Exit status of a pod whose work is wrong in itself, so that starting it again changes nothing (EX_DATAERR)."""

REAL_ANNOTATION = "huawei.com/AscendReal"
"""The annotation in which Ascend's device plugin says which devices it really gave a pod."""


def seconds_of(time: str | None) -> float | None:
    """Seconds since 1970-01-01 UTC of an API server's time."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() if time else None


def time_of(seconds: float) -> str:
    """An API server's time, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. ``owner`` is the uid of the resource that it belongs to, ``work`` the id of the job that it works for.

    What others' clocks say is only good to order things by (``ended``, ``created``: seconds since 1970-01-01 UTC). Since when it is unready, refused by the scheduler or bound, and when it
    shall be gone (``delete_by``), is told by the operator's own steady clock, from when it heard of that: see ``sights_of``.
    """

    namespace: str
    name: str
    uid: str
    owner: str = ""
    work: str = ""
    phase: str = "Pending"
    node: str = ""
    address: str = ""
    metrics_port: int = 0
    host_address: str = ""
    delete_by: float | None = None
    ready: bool = False
    unready_since: float | None = None
    attempt: int = 0
    rank: int = 0
    revision: str = ""
    npus: tuple[int, ...] = ()
    millicores: int = 0
    memory_bytes: int = 0
    exit_status: int | None = None
    ended: float | None = None
    created: float = 0.0
    cause: str = ""
    waits_for: str = ""
    unschedulable_since: float | None = None
    bound_since: float | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Namespace and name, one string for the whole cluster."""
        return f"{self.namespace}/{self.name}"

    @property
    def deleting(self) -> bool:
        """Somebody asked for its deletion."""
        return self.delete_by is not None

    @property
    def finished(self) -> bool:
        """Its containers have ended, well or not."""
        return self.phase in ("Succeeded", "Failed")

    @classmethod
    def parse(cls, body: Mapping[str, Any], sights: Mapping[str, float]) -> Pod:
        """The pod in an API server's answer; ``sights`` says since when what ``sights_of`` tells of it is so, by any clock."""
        metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        owner = next((owner["uid"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")), "")
        states = [entry.get("state") or {} for entry in status.get("containerStatuses") or ()]
        ends = [state["terminated"] for state in states if state.get("terminated")]
        # A bad end says more than the good ones beside it.
        end = max(ends, key=lambda end: bool(end.get("exitCode"))) if ends else None
        waiting: Mapping[str, Any] = next((state["waiting"] for state in states if state.get("waiting")), {})
        conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled") or {}
        refused = _refused(scheduled)
        return cls(
            namespace=metadata.get("namespace", "default"),
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            owner=owner,
            work=annotations.get(WORK_ANNOTATION, ""),
            phase=status.get("phase") or "Pending",
            node=spec.get("nodeName") or "",
            address=status.get("podIP") or "",
            metrics_port=next(
                (port["containerPort"] for one in spec.get("containers") or () for port in one.get("ports") or () if port.get("name") == "metrics"), 0
            ),
            host_address=status.get("hostIP") or "",
            delete_by=sights.get("deleting", 0.0) + (metadata.get("deletionGracePeriodSeconds") or 0) if metadata.get("deletionTimestamp") else None,
            ready=_ready(conditions),
            unready_since=sights.get("unready"),
            attempt=_number(labels.get(ATTEMPT_LABEL)),
            rank=_number(labels.get(RANK_LABEL)),
            revision=labels.get(REVISION_LABEL, ""),
            npus=device_indices(annotations.get(NPUS_ANNOTATION, "")),
            millicores=asked(spec, "cpu", 1000),
            memory_bytes=asked(spec, "memory"),
            exit_status=end.get("exitCode") if end else None,
            ended=seconds_of(end.get("finishedAt")) if end else None,
            created=seconds_of(metadata.get("creationTimestamp")) or 0.0,
            cause=status.get("message") or status.get("reason") or (end.get("message") or end.get("reason") or "" if end else ""),
            waits_for=_said(scheduled) if refused else _said(waiting),
            unschedulable_since=sights.get("refused"),
            bound_since=sights.get("bound"),
            annotations=annotations,
            labels=labels,
        )


def sights_of(body: Mapping[str, Any]) -> frozenset[str]:
    """What is true of a pod of ours now and may not last too long: ``deleting``, ``unready``, ``refused`` by the scheduler, ``bound`` to its node."""
    metadata, status = body["metadata"], body.get("status") or {}
    if not any(owner.get("kind") in (JOB_KIND, SERVICE_KIND) for owner in metadata.get("ownerReferences") or ()):
        return frozenset()
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
    facts = {
        "deleting": bool(metadata.get("deletionTimestamp")),
        "unready": not _ready(conditions),
        "refused": _refused(conditions.get("PodScheduled") or {}),
        "bound": bool((body.get("spec") or {}).get("nodeName")),
    }
    return frozenset(name for name, true in facts.items() if true)


def _ready(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    return (conditions.get("Ready") or {}).get("status") == "True"


def _refused(scheduled: Mapping[str, Any]) -> bool:
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def _said(entry: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (entry.get("reason"), entry.get("message")) if part)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
