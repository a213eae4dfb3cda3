"""What a job says of itself in the annotations of its NPUJob: how far it is, its checkpoint, and how long its pods' steps take. Pure; nonsense is passed over."""

from __future__ import annotations

from json import JSONDecodeError, loads
from math import isfinite
from statistics import median_low
from typing import Any

from semantide.operators.pods import time_of
from semantide.operators.resources import (
    CHECKPOINT_ANNOTATION,
    IMBALANCE_ANNOTATION,
    PROGRESS_ANNOTATION,
    STEP_SECONDS_ANNOTATION,
    NPUJob,
    NPUJobStatus,
    Progress,
    SlowNode,
)
from semantide.operators.slow_nodes import faded


def heard(job: NPUJob, status: NPUJobStatus) -> NPUJobStatus:
    """What the job says of itself in its annotations; what cannot be read is passed over."""
    said = job.metadata.annotations
    update: dict[str, Any] = {}
    if checkpoint := said.get(CHECKPOINT_ANNOTATION):
        update["checkpoint"] = checkpoint
    try:
        if PROGRESS_ANNOTATION in said:
            update["progress"] = Progress.model_validate(loads(said[PROGRESS_ANNOTATION]))
    except (ValueError, OverflowError, RecursionError):
        pass
    if status.phase == "Running":
        update["imbalance"] = _imbalance(job, status)
    return status.model_copy(update=update)


def _imbalance(job: NPUJob, status: NPUJobStatus) -> float | None:
    """How unequal the steps of the gang that runs are; None as long as it has not said it itself: what stands there until then is an earlier gang's."""
    said = job.metadata.annotations
    if STEP_SECONDS_ANNOTATION in said and not _step_seconds(job, status):
        return None
    try:
        imbalance = float(said.get(IMBALANCE_ANNOTATION, "nan"))
    except ValueError:
        return None
    return max(0.0, imbalance) if isfinite(imbalance) else None


def _step_seconds(job: NPUJob, status: NPUJobStatus) -> dict[int, float] | None:
    """Seconds of a step by pod of the gang that runs; None where an earlier one said them, or nobody can read them."""
    try:
        said = loads(job.metadata.annotations.get(STEP_SECONDS_ANNOTATION, "{}"))
        if said.pop("attempt", status.attempt) != status.attempt:
            return None  # an earlier gang's, which had other places
        return {int(pod): float(value) for pod, value in said.items() if 1e-9 < float(value) < 1e9}
    except (JSONDecodeError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return None


def slowness(job: NPUJob, status: NPUJobStatus, slow_ratio: float, now: float) -> NPUJobStatus:
    """Which nodes of the gang are slower than the others; what earlier gangs said of nodes that it is not on stays, and fades."""
    seconds = _step_seconds(job, status)
    if seconds is None:
        return status
    by_node: dict[str, float] = {}
    for place, pod in enumerate(status.placement):
        if seconds.get(place, 0.0) > 0 and pod.node:
            by_node[pod.node] = max(by_node.get(pod.node, 0.0), seconds[place])
    if len(by_node) < 2:
        return status
    usual = median_low(by_node.values())
    slow = tuple(SlowNode(node=node, ratio=round(value / usual, 2)) for node, value in sorted(by_node.items()) if value / usual >= slow_ratio)
    here = {pod.node for pod in status.placement}
    if slow == tuple(entry for entry in status.slow if entry.node in here):
        return status
    believed = {entry.node: faded(entry.ratio, status.slow_time, now) for entry in status.slow if entry.node not in here}
    slow = (*(SlowNode(node=node, ratio=round(ratio, 2)) for node, ratio in believed.items() if ratio >= slow_ratio), *slow)
    return status.model_copy(update={"slow": slow, "slow_time": time_of(now) if slow else None})
