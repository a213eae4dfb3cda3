"""The cluster as people look at it: nodes with what runs on each NPU, who waits and why, and how services do. For the console; nothing is decided by it."""

from __future__ import annotations

from typing import Any

from semantide.operators.node import Node
from semantide.operators.pods import Pod, seconds_of
from semantide.operators.resources import NPUJob, NPUService
from semantide.operators.snapshot import Snapshot


def view(snapshot: Snapshot | None) -> dict[str, Any]:
    """What a round saw, as JSON; without one, of a process that does not lead, nothing of the cluster."""
    if snapshot is None:
        return {"time": None, "nodes": [], "jobs": [], "services": []}
    owners = {job.metadata.uid: f"job {job.key}" for job in snapshot.jobs} | {service.metadata.uid: f"service {service.key}" for service in snapshot.services}
    holders = {pod.key: owners.get(pod.owner, f"pod {pod.key}") for pod in snapshot.pods}
    here: dict[str, list[str]] = {}
    for pod in snapshot.pods:
        if pod.owner in owners and pod.node and not _over(pod):
            here.setdefault(pod.node, []).append(owners[pod.owner])
    line = sorted((job for job in snapshot.jobs if job.status.phase == "Pending"), key=lambda job: (-job.spec.priority, job.status.queue_time or ""))
    others = [job for job in snapshot.jobs if job.status.phase != "Pending"]
    return {
        "time": snapshot.now,
        "nodes": [_node(node, holders, here.get(node.name, [])) for node in sorted(snapshot.nodes, key=lambda node: node.name)],
        "jobs": [_job(job, snapshot.now) for job in [*line, *others]],
        "services": [_service(service) for service in snapshot.services],
    }


def _over(pod: Pod) -> bool:
    return pod.phase in ("Succeeded", "Failed")


def _node(node: Node, holders: dict[str, str], here: list[str]) -> dict[str, Any]:
    npus = [
        {"index": npu.index, "ring": npu.ring, "healthy": npu.healthy, "holder": npu.holder and holders.get(npu.holder, f"pod {npu.holder}")}
        for npu in node.npus
    ]
    return {"name": node.name, "unusable": node.unusable, "gone": node.gone, "slow": node.slow, "rack": node.rack, "npus": npus, "work": sorted(set(here))}


def _job(job: NPUJob, now: float) -> dict[str, Any]:
    waits = job.status.phase == "Pending"
    since = seconds_of(job.status.queue_time)
    return {
        "name": job.key,
        "phase": job.status.phase,
        "message": job.status.message,
        "priority": job.spec.priority,
        "waits_seconds": max(0.0, now - since) if waits and since is not None else None,
        "restarts": job.status.restarts,
        "nodes": sorted({place.node for place in job.status.placement}),
    }


def _service(service: NPUService) -> dict[str, Any]:
    status = service.status
    return {
        "name": service.key,
        "phase": status.phase,
        "message": status.message,
        "replicas": status.replicas,
        "ready": status.ready_replicas,
        "nodes": sorted({place.node for place in status.placement}),
    }
