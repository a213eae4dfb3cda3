"""What has happened to the pods of a gang that makes it start again, and which of several mishaps was the cause of the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semantide.operators.device_health import device_indices
from semantide.operators.node import Node
from semantide.operators.pods import AGAIN, REAL_ANNOTATION, Pod
from semantide.operators.rank_table import TOLD_ANNOTATION
from semantide.operators.resources import NPUJobStatus, PodPlacement


@dataclass(frozen=True)
class Fault:
    """What happened to one pod. ``first`` orders faults by what is most likely a cause and not a consequence, then by time. ``node`` is the
    one to keep off for a while, where it may be the node's fault; ``saves``:
    the pod still has its own time, in which the gang can save a checkpoint together."""

    first: tuple[int, float]
    message: str
    counts: bool = True
    node: str = ""
    saves: bool = False


def fault_of(status: NPUJobStatus, place: PodPlacement, gang: Mapping[str, Pod], nodes: Mapping[str, Node]) -> Fault | None:
    """What happened to the pod of this place; None where it is well, has ended well, or is still to come."""
    pod = gang.get(place.pod)
    rank = int(place.pod.rsplit("-", 1)[1])
    if rank in status.finished_ranks:
        return None
    node = nodes.get(place.node)
    if place.node and (node is None or node.gone):
        return Fault((0, 0.0), f"node {place.node} of rank {rank} is {'gone' if node is None else 'lost: ' + (node.unusable or 'it does not answer')}")
    if pod is None:
        # Another pod of its name would have another address than the table of ranks says, which is written once for each gang.
        known = status.phase == "Running" or any(TOLD_ANNOTATION in other.annotations for other in gang.values())
        return Fault((3, 0.0), f"rank {rank}'s pod {place.pod} was deleted") if known else None
    if npu_failed(pod, node):
        return Fault((1, 0.0), f"an NPU of rank {rank} on node {place.node} failed", node=place.node)
    if pod.deleting:
        return Fault((4, 0.0), f"rank {rank}'s pod {place.pod} on node {place.node} was asked to end from outside", counts=False, saves=True)
    if pod.phase == "Failed":
        if pod.exit_status == AGAIN:
            return Fault((5, pod.ended or 0.0), f"rank {rank} asks to be started again", counts=False)
        how = f"exit status {pod.exit_status}" if pod.exit_status is not None else "it did not end by itself"
        how = f"{how} (out of memory)" if pod.cause == "OOMKilled" else f"{how}: {pod.cause}" if pod.cause and pod.cause != "Error" else how
        return Fault((2, pod.ended or 0.0), f"rank {rank} on node {place.node or '?'} failed, {how}", node=place.node)
    return None


def npu_failed(pod: Pod, node: Node | None) -> bool:
    """Whether an NPU failed that the pod has, or had: what a failed device left undone is no fault of the work, whatever the pod's exit status says."""
    if node is None:
        return False
    had = device_indices(pod.annotations.get(REAL_ANNOTATION, "")) or pod.npus
    return pod.key in node.lost_holders or (pod.phase == "Failed" and any(node.lost >> npu & 1 for npu in had))


def cause_of(faults: Sequence[Fault]) -> Fault:
    """The mishap that most likely came first."""
    return min(faults, key=lambda fault: fault.first)
