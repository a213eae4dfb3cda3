"""The NPUJob of a job, and what follows from what both say. Pure: the clients are in ``shared/cluster_jobs.py``.

    body(record, deployment)        the custom resource that asks for the job's pods
    next_step(record, found)        what to do about a job and its NPUJob: Create, Delete, End, Note or nothing

A job that has ended is the truth, whatever its NPUJob says; an NPUJob that has ended ends a job that has not. Names are those of ``operators/resources.py``,
which a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from semantide.shared.contracts import ENDED, JOB_ROOMS, Contract, JobRecord, JobState
from semantide.shared.errors import BadData
from semantide.shared.pod_template import merged

GROUP, VERSION, PLURAL, KIND = "semantide.io", "v1alpha1", "npujobs", "NPUJob"
ROOM_LABEL = f"{GROUP}/room"
MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "semantide"
PROGRESS_ANNOTATION = f"{GROUP}/progress"
CHECKPOINT_ANNOTATION = f"{GROUP}/checkpoint"
IMBALANCE_ANNOTATION = f"{GROUP}/imbalance"
STEP_SECONDS_ANNOTATION = f"{GROUP}/step-seconds"

_SEVERAL_PODS = ("train", "align")  # kinds whose work ranks can share
_ENDING_SECONDS = 60.0  # for the pods of a job that has ended to see it themselves


class Deployment(Contract):
    """What the NPUJobs of one deployment have in common.

    ``default`` and, over it, ``kinds[kind]`` are parts of an NPUJob's spec: image, profile, npusPerPod, template, scheduler, ... ``labels`` tell two deployments
    in one namespace apart; with one of ``semantide.io/release`` the template has all that pods need, and the operator adds nothing of its own release. An empty ``namespace`` is this process's own. NPUJobs that have ended are kept for ``keepSeconds``.
    """

    namespace: str = ""
    labels: dict[str, str] = Field(default={})
    default: dict[str, Any] = Field(default={})
    kinds: dict[str, dict[str, Any]] = Field(default={})
    keep_seconds: float = Field(default=86400.0, ge=0, alias="keepSeconds")


@dataclass(frozen=True)
class Found:
    """What the cluster holds of a job. ``ours``: made by ``body``, and not by hand."""

    name: str
    job_id: str = ""
    room: str = ""
    ours: bool = True
    phase: str = ""
    message: str = ""
    restarts: int = 0
    pods: int = 1
    attempt: int = 0
    deleting: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Found:
        """What matters of an NPUJob as the API server answers it."""
        metadata, spec, status = resource["metadata"], resource.get("spec", {}), resource.get("status", {})
        return cls(
            name=metadata["name"],
            job_id=spec.get("jobId") or metadata["name"],
            room=spec.get("room") or JOB_ROOMS.get(spec.get("kind", ""), ""),
            ours=(metadata.get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGED_BY,
            phase=status.get("phase", ""),
            message=status.get("message", ""),
            restarts=int(status.get("restarts", 0)),
            attempt=int(status.get("attempt", 0)),
            pods=len(status.get("placement") or ()) or int(spec.get("worldSize", 1)),
            deleting="deletionTimestamp" in metadata,
            annotations=metadata.get("annotations") or {},
        )

    @property
    def ended(self) -> bool:
        """It will not go on by itself."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Create:
    """Make the job's NPUJob."""


@dataclass(frozen=True)
class Delete:
    """Take an NPUJob away; its pods are asked to stop."""

    name: str


@dataclass(frozen=True)
class End:
    """The job has ended so."""

    state: JobState
    error: str


@dataclass(frozen=True)
class Note:
    """Fields of the record that the cluster has changed."""

    fields: Mapping[str, Any]


Step = Create | Delete | End | Note


def name_of(record: JobRecord) -> str:
    """Name of the NPUJob: a resumed job has a new one, so that what is left of the last run is in nobody's way."""
    return record.id if not record.resumes else f"{record.id}-r{record.resumes}"


def body(record: JobRecord, deployment: Deployment, attempts: int) -> dict[str, Any]:
    """The NPUJob that asks for a job's pods.

    Raises: BadData for a number of processes that pods cannot share, and for several pods of a kind of work that only one can do.
    """
    own = deployment.kinds.get(record.spec.kind, {})
    spec = _merged(deployment.default, own)
    several = record.spec.kind in _SEVERAL_PODS
    if not several:
        _refuse_several_pods(record, own)
    if "template" in spec:
        spec["template"] = merged(deployment.default.get("template") or {}, own.get("template") or {})
    wish = record.spec.cluster
    npus = spec.get("npusPerPod", 0) if wish.npus_per_pod is None else wish.npus_per_pod
    processes = record.spec.config.get("processes") or 0
    pods = wish.pods or spec.get("worldSize", 1)
    if several and isinstance(processes, int) and processes > 0 and wish.pods is None:
        if processes < npus:
            npus = processes
        pods, left = divmod(processes, max(1, npus))
        if left:
            raise BadData(f"{processes} processes cannot be shared by pods of {npus} NPUs: give a multiple of {npus}, or another number of NPUs a pod")
    if not several:
        pods = 1  # what a deployment asks of all kinds
        spec.pop("elastic", None)
    spec |= {
        "kind": record.spec.kind,
        "jobId": record.id,
        "room": record.spec.room,
        "parameters": record.spec.model_dump(mode="json", include={"recipe", "config", "inputs", "seed"}),
        "command": [*spec.get("command", ["semantide", "pod"]), record.id],
        "worldSize": pods,
        "npusPerPod": npus,
    }
    spec.setdefault("restartPolicy", {"limit": attempts - 1})
    if wish.priority:
        spec["priority"] = wish.priority
    if wish.deadline_seconds:
        spec["deadlineSeconds"] = wish.deadline_seconds
    if several and (wish.least_pods or wish.most_pods):
        spec["elastic"] = {"min": min(wish.least_pods or pods, pods), "max": max(wish.most_pods or pods, pods)}
    elif "elastic" in spec:
        within = spec["elastic"]
        spec["elastic"] = {"min": min(within.get("min", pods), pods), "max": max(within.get("max", pods), pods)}
    labels = {**deployment.labels, MANAGED_BY_LABEL: MANAGED_BY, ROOM_LABEL: record.spec.room}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name_of(record), "labels": labels}, "spec": spec}


def _refuse_several_pods(record: JobRecord, own: Mapping[str, Any]) -> None:
    kind, wish = record.spec.kind, record.spec.cluster
    within = own.get("elastic") or {}
    asked = {
        **{f"cluster.{name}": getattr(wish, name) for name in ("pods", "least_pods", "most_pods")},
        f"jobKinds.{kind}.worldSize": own.get("worldSize"),
        **{f"jobKinds.{kind}.elastic.{name}": within.get(name) for name in ("min", "max")},
    }
    if wrong := {name: value for name, value in asked.items() if isinstance(value, int) and value > 1}:
        name, value = next(iter(wrong.items()))
        raise BadData(f"{name} is {value}, and a job of kind {kind} runs in one pod: only {' and '.join(_SEVERAL_PODS)} are shared by several; leave it out")


def found_of(record: JobRecord, npujobs: Mapping[str, Found]) -> Found | None:
    """The NPUJob of a job's present run: by name, or one that somebody made by hand for this job."""
    by_name = npujobs.get(record.npujob or name_of(record))
    return by_name or next((found for found in npujobs.values() if found.job_id == record.id and not found.ours), None)


def earlier_of(record: JobRecord, npujobs: Mapping[str, Found]) -> Found | None:
    """An NPUJob of an earlier run of the job: while there is one its pods may still write where the next run's would."""
    return next((found for found in npujobs.values() if found.job_id == record.id and found.ours and found.name != name_of(record)), None)


def next_step(record: JobRecord, found: Found | None, earlier: Found | None = None) -> Step | None:
    """What to do about a job that has not ended. ``found`` must have been read before ``record``: pods record an end before they end."""
    assert record.state not in ENDED, record.state
    if record.cancel_requested:
        if found is None:
            return End("cancelled", "cancelled on request" if record.npujob else "cancelled before it started")
        return _noted(record, stage="its pods end") if found.deleting else Delete(found.name)
    if found is None and not record.npujob and earlier is not None:
        return _noted(record, stage=f"waits for the pods of NPUJob {earlier.name} to end")
    if found is None:
        if record.npujob:
            return End(
                "failed", f"its NPUJob {record.npujob} was deleted by somebody else: `semantide jobs resume {record.id}` goes on from its last checkpoint"
            )
        return Create()
    if found.phase == "Failed":
        return End("failed", f"NPUJob {found.name}: {found.message or 'it failed'}")
    if found.phase == "Succeeded":
        return End("failed", f"the pods of NPUJob {found.name} ended well and left no outcome: was {record.id} run by another version?")
    running = found.phase in ("Running", "Restarting")
    fields: dict[str, Any] = {"npujob": found.name, "state": "running" if running else "queued", "attempt": found.restarts + 1 if running else record.attempt}
    if found.phase != "Running":
        # Why it waits stands where a running job says what it does.
        fields |= {"stage": ": ".join(text for text in (found.phase.lower() or "waits for the operator", found.message) if text)}
    return _noted(record, **fields)


def _noted(record: JobRecord, **fields: Any) -> Note | None:
    changed = {name: value for name, value in fields.items() if getattr(record, name) != value}
    return Note(changed) if changed else None


def step_after_end(record: JobRecord, found: Found, now_ms: int, keep_seconds: float) -> Delete | None:
    """What to do about an NPUJob whose job has ended, or was resumed under another name."""
    if found.deleting or not found.ours:
        return None
    if record.state not in ENDED:
        return Delete(found.name) if found.name != name_of(record) else None
    if record.state == "cancelled" and not found.ended:
        return Delete(found.name)  # while it waited: its pods must not begin
    seconds = (now_ms - (record.finished or 0)) / 1000
    return Delete(found.name) if seconds > (keep_seconds if found.ended else _ENDING_SECONDS) else None


def annotations_of(record: JobRecord, step_seconds: Mapping[int, float], pods: int, checkpoint: str, attempt: int = 0) -> dict[str, str]:
    """What the operator shows of a running job: progress, checkpoint, seconds of a step by pod, and how unequal they are.

    A pod is as slow as its slowest rank; ranks are numbered through pod by pod. ``attempt`` is the gang whose steps they are: another one has other places.
    """
    gang = {"attempt": attempt} if attempt else {}
    progress = {"done": record.done, "total": record.total, "unit": record.unit, "stage": record.stage}
    said = {PROGRESS_ANNOTATION: json.dumps(progress), STEP_SECONDS_ANNOTATION: json.dumps(gang)}
    if checkpoint:
        said[CHECKPOINT_ANNOTATION] = checkpoint
    if step_seconds and pods > 0:
        ranks = max(step_seconds) + 1
        share = max(1, -(-ranks // pods))
        by_pod: dict[int, float] = {}
        for rank, seconds in sorted(step_seconds.items()):
            by_pod[rank // share] = max(by_pod.get(rank // share, 0.0), seconds)
        mean = sum(by_pod.values()) / len(by_pod)
        said[STEP_SECONDS_ANNOTATION] = json.dumps({**gang, **{str(pod): round(seconds, 6) for pod, seconds in by_pod.items()}})
        said[IMBALANCE_ANNOTATION] = f"{max(by_pod.values()) / mean - 1 if mean else 0.0:.4f}"
    return said


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping over another; what is a mapping in both is merged in turn."""
    merged = dict(under)
    for name, value in over.items():
        merged[name] = _merged(merged[name], value) if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping) else value
    return merged
