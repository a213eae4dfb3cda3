"""What becomes of one job: its phase, and what must be done to its pods. Pure; where a gang goes is decided for all jobs together (``reconcile.py``, ``waiting_line.py``).

    Pending -> Placing -> Running -> Succeeded
       ^         |          |
       +-- Restarting <-----+        a pod, node or NPU was lost; somebody of higher priority needs the room; another size or spec
    Suspended while ``suspend`` is set; Failed when restarts are used up, time is over or the work itself is wrong

The status is written first and what it asks for is done after, again in every round until it is so: an operator that dies in between is carried on by the next.
Once Succeeded or Failed a job stays so, whatever becomes of its pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from semantide.operators.actions import Action, AnnotatePod, Create, DeletePod, Event
from semantide.operators.conditions import since, with_conditions
from semantide.operators.faults import cause_of, fault_of, npu_failed
from semantide.operators.job_pods import gang_manifests, gang_name, gang_remains, job_revision
from semantide.operators.job_reports import heard, slowness
from semantide.operators.node import Node
from semantide.operators.pods import USELESS, Pod, seconds_of, time_of
from semantide.operators.rank_table import TOLD_ANNOTATION, has_ranks, rank_table_manifest
from semantide.operators.resources import (
    JobPhase,
    NodeUntil,
    NPUJob,
    NPUJobStatus,
    PodPlacement,
)
from semantide.operators.settings import OperatorSettings

STUCK_SECONDS = 60.0
"""How long past its own time a pod may take to go before it is forgotten, seconds."""
_CLEARED_AT_ONCE = 20


@dataclass(frozen=True)
class Step:
    """A job's new status and what to do once that is written; ``before`` is done first. ``waits``: its gang asks for a place."""

    status: NPUJobStatus
    actions: tuple[Action, ...] = ()
    waits: bool = False
    before: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Look:
    """What one round knows of a job's surroundings. ``now`` is seconds since 1970-01-01 UTC, ``steady`` the same moment by the clock that tells since when pods are
    as they are; ``refusal`` is what the API server said when it would not write something for it."""

    job: NPUJob
    pods: Sequence[Pod]
    nodes: Mapping[str, Node]
    now: float
    steady: float
    settings: OperatorSettings
    refusal: str = ""

    @property
    def gang(self) -> dict[str, Pod]:
        """The pods of the present gang by name."""
        return {pod.name: pod for pod in self.pods if pod.attempt == self.job.status.attempt}

    def on_lost_node(self, pod: Pod) -> bool:
        """Whether nobody is left on the pod's node who could end it."""
        return bool(pod.node) and (pod.node not in self.nodes or self.nodes[pod.node].gone)

    def alive(self, pod: Pod) -> bool:
        """Whether the pod may still work or hold its NPUs."""
        return not pod.finished and not self.on_lost_node(pod)


def advance(look: Look) -> Step:
    """One look at a job."""
    job, now = look.job, look.now
    status = heard(job, job.status).model_copy(update={"observed_generation": job.metadata.generation})
    if job.deleting:
        return Step(status, ends(look, look.pods))
    if job.ended:
        # Ranks that outlived the others go; what has finished stays for its logs.
        return Step(status, ends(look, [pod for pod in look.pods if not pod.finished]))
    if status.phase in ("Placing", "Running"):
        status = _finished(look, status)
        if status.placement and len(status.finished_ranks) == len(status.placement):
            return _end(look, status, "Succeeded", "Completed", f"all {_pods(len(status.placement))} ended well")
    if job.spec.deadline_seconds and status.start_time and now - (seconds_of(status.start_time) or now) > job.spec.deadline_seconds:
        return _end(look, status, "Failed", "DeadlineExceeded", f"it did not end within deadlineSeconds {job.spec.deadline_seconds}; its last checkpoint stays")
    if job.spec.suspend:
        if status.phase == "Suspended":
            return Step(status, ends(look, look.pods))
        return _stop(look, status, "Suspended", "Suspended", "suspended on request; it goes on from its last checkpoint when suspend is false again")
    match status.phase:
        case "Pending":
            status = status if status.queue_time else status.model_copy(update={"queue_time": time_of(now)})
            return _wait(look, _concluded(look, status, "Pending", "Waiting", status.message))
        case "Suspended":
            return _wait(look, _concluded(look, _queued(look, status), "Pending", "Resumed", "resumed"))
        case "Restarting":
            left = [pod for pod in look.pods if look.alive(pod)]
            forgotten = [pod for pod in look.pods if not pod.finished]
            if left:
                return Step(status, ends(look, forgotten))
            pending = _concluded(look, _queued(look, status), "Pending", "Waiting", status.message)
            return Step(pending, ends(look, forgotten), waits=True)
        case _:
            return _tend(look, status)


def placed(look: Look, step: Step, placement: Sequence[PodPlacement]) -> Step:
    """The step of a job whose gang has found its places."""
    job, status = look.job, step.status
    attempt = status.attempt + 1
    nodes = len({pod.node for pod in placement})
    where = f"on {nodes} node{'' if nodes == 1 else 's'}" if job.spec.scheduler == "own" else f"for {job.spec.scheduler} to place"
    message = f"{_pods(len(placement))} {where}"
    if len(placement) < job.spec.world_size:
        message += f", {job.spec.world_size - len(placement)} fewer than worldSize {job.spec.world_size} for want of room"
    status = status.model_copy(
        update={
            "attempt": attempt,
            "placement": tuple(placement),
            "finished_ranks": (),
            "revision": job_revision(job),
            "resumed_from": status.checkpoint,
            "restart_time": None,
            "reason_time": None,
            "placed_time": time_of(look.now),
            # Those it keeps off now: what was learnt of them is still so.
            "slow": tuple(slow for slow in status.slow if slow.node not in {pod.node for pod in placement}),
            "imbalance": None,
        }
    )
    status = _concluded(look, status, "Placing", "Placed", message)
    try:
        manifests = gang_manifests(job, placement, attempt, look.settings, look.now)
    except ValueError as error:
        return refused(look, step, str(error))
    creates = tuple(Create(manifest) for manifest in manifests)
    # One attempt's finished pods are kept for their logs.
    old = [pod for pod in look.pods if pod.attempt < status.attempt - 1]
    told = message if attempt == 1 else f"{message}, gang {attempt}"
    return Step(status, (*step.actions, *creates, *ends(look, old), _event(job, "Placed", told)))


def cleared(look: Look, step: Step) -> Step:
    """The step that also takes away what stood beside earlier gangs, once no pod of theirs is alive."""
    status = step.status
    over = min([status.attempt - 1, *(pod.attempt - 1 for pod in look.pods if look.alive(pod))])
    gangs = range(status.cleared + 1, min(over, status.cleared + _CLEARED_AT_ONCE) + 1)
    remains = tuple(action for attempt in gangs for action in gang_remains(look.job, attempt, look.settings))
    if not remains or look.job.deleting:
        return step
    # Before the status says so: what an operator that dies in between has left is then found again.
    return replace(step, status=status.model_copy(update={"cleared": gangs[-1]}), before=(*step.before, *remains))


def refused(look: Look, step: Step, reason: str) -> Step:
    """The step of a job that goes on waiting, and says why; what is free changes all the time, and is not written each time."""
    told = seconds_of(step.status.reason_time)
    if told is not None and 0 <= look.now - told < look.settings.reason_seconds:
        return replace(step, waits=False)
    status = _concluded(look, step.status, "Pending", "Waiting", reason)
    if status.message != step.status.message:
        status = status.model_copy(update={"reason_time": time_of(look.now)})
    return replace(step, status=status, waits=False)


def make_room(look: Look, step: Step, beneficiary: str) -> Step:
    """The step of a job that leaves its place to another, or to itself in another size; it saves a checkpoint when its pods are asked to end."""
    job = look.job
    if beneficiary == job.key:
        wish = job.spec.most_pods
        told = _stop(
            look,
            step.status,
            "Restarting",
            "Growing",
            f"there is room for more than its {_pods(len(step.status.placement))}: it goes on larger from a checkpoint",
        )
        return Step(told.status.model_copy(update={"wish": wish}), (*step.actions, *told.actions))
    told = _stop(look, step.status, "Restarting", "Preempted", f"made room for {beneficiary}; it goes on from its checkpoint when there is room again")
    return Step(told.status.model_copy(update={"wish": 0}), (*step.actions, *told.actions))


def _tend(look: Look, status: NPUJobStatus) -> Step:
    """A gang that is being placed or runs."""
    job, now, gang = look.job, look.now, look.gang
    if not status.placement:
        return _lost(look, status, "its placement is unknown", counts=False)
    if status.revision != job_revision(job):
        return _stop(look, status, "Restarting", "SpecChanged", "its spec was changed: it goes on with the new one from a checkpoint")
    if not job.spec.least_pods <= len(status.placement) <= job.spec.most_pods:
        return _stop(look, status, "Restarting", "Resized", f"it runs with {_pods(len(status.placement))}, which its spec no longer allows")
    for pod in gang.values():
        if pod.exit_status == USELESS and not npu_failed(pod, look.nodes.get(pod.node)):
            return _end(
                look, status, "Failed", "WorkIsWrong", f"rank {pod.rank} says that trying again changes nothing: {pod.cause or f'exit status {USELESS}'}"
            )
    faults = [fault for place in status.placement if (fault := fault_of(status, place, gang, look.nodes))]
    if faults:
        cause = cause_of(faults)
        status = _avoiding(look, status, {cause.node: cause.message} if cause.node else {})
        return _lost(look, status, cause.message, counts=any(fault.counts for fault in faults), saves=all(fault.saves for fault in faults))
    missing = {place.pod for place in status.placement} - set(gang) - {status.placement[rank].pod for rank in status.finished_ranks}
    up = not missing and all(pod.phase in ("Running", "Succeeded") for pod in gang.values())
    ranks = _tell_ranks(look, status)
    actions = ends(look, [pod for pod in look.pods if pod.attempt < status.attempt and not pod.finished])
    if status.phase == "Placing":
        # Ranks that were not told where the others are do not run, whatever their pods say.
        if not up or ranks:
            return _await(look, status, missing, (*actions, *ranks))
        status = status.model_copy(
            update={"start_time": status.start_time or time_of(now), "failed_placings": 0, "placement": tuple(_seen(place, gang) for place in status.placement)}
        )
        message = _running(status)
        status = _concluded(look, status, "Running", "Running", message)
        actions = (*actions, _event(job, "Running", message if status.attempt == 1 else f"{message}, gang {status.attempt}"))
    else:
        refused = f"; what it needs cannot be written: {look.refusal}" if look.refusal else ""
        status = _concluded(look, slowness(job, status, look.settings.slow_ratio, now), "Running", "Running", _running(status) + refused)
    return Step(status, (*actions, *ranks))


def _await(look: Look, status: NPUJobStatus, missing: set[str], actions: tuple[Action, ...]) -> Step:
    """Not all pods run yet: create what is missing, and give up a place that turns out to be none."""
    job, now, settings = look.job, look.now, look.settings
    own = job.spec.scheduler == "own"
    if look.refusal:
        # A quota, a policy of admission, a missing right: what was made so far must not hold its room.
        return _lost(look, _fallen(status), f"its pods, or what they need, cannot be made: {look.refusal}", counts=False)
    refusing = [pod for pod in look.gang.values() if pod.unschedulable_since is not None]
    if own:
        late = [pod for pod in refusing if look.steady - (pod.unschedulable_since or look.steady) > settings.unschedulable_seconds]
        if late:
            places = {place.pod: place.node for place in status.placement}
            status = _avoiding(look, status, {places[pod.name]: pod.waits_for for pod in late if pod.name in places})
            return _lost(
                look, _fallen(status), f"Kubernetes' scheduler refuses {late[0].name} on {places.get(late[0].name, '?')}: {late[0].waits_for}", counts=False
            )
    waits = next((pod for pod in look.gang.values() if pod.waits_for), None)
    if _placing_seconds(look, status, refusing) > settings.placing_seconds:
        cause = f": {waits.name} waits for {waits.waits_for}" if waits else ""
        return _lost(look, _fallen(status), f"not all pods ran within {settings.placing_seconds:.0f} seconds{cause}", counts=not refusing)
    manifests = gang_manifests(job, status.placement, status.attempt, settings, now) if missing else []
    creates = tuple(Create(manifest) for manifest in manifests if manifest["kind"] != "Pod" or manifest["metadata"]["name"] in missing)
    message = f"{waits.name} waits for {waits.waits_for}" if waits else f"{len(look.gang)} of {_pods(len(status.placement))} made, waiting for all to run"
    return Step(_concluded(look, status, "Placing", "Placed", message), (*actions, *creates))


def _avoiding(look: Look, status: NPUJobStatus, reasons: Mapping[str, str]) -> NPUJobStatus:
    """Use these nodes last for a while, and say why."""
    until = time_of(look.now + look.settings.avoid_seconds)
    new = (NodeUntil(node=node, until=until, reason=reason[:200]) for node, reason in reasons.items())
    return status.model_copy(update={"avoid": (*(entry for entry in status.avoid if entry.node not in reasons), *new)})


def _fallen(status: NPUJobStatus) -> NPUJobStatus:
    """One more placing in a row that did not hold."""
    return status.model_copy(update={"failed_placings": status.failed_placings + 1})


def _placing_seconds(look: Look, status: NPUJobStatus, refusing: Sequence[Pod]) -> float:
    """How long all pods of a gang have been meant to run. One that another scheduler places may stand long in that one's line, where it holds nothing; once a first pod
    is on its node the others must follow."""
    placing = look.now - (seconds_of(status.placed_time) or look.now)
    if look.job.spec.scheduler == "own":
        return placing
    on_nodes = [look.steady - pod.bound_since for pod in look.gang.values() if pod.bound_since is not None]
    return max(on_nodes) if on_nodes else 0.0 if refusing else placing


def _lost(look: Look, status: NPUJobStatus, cause: str, *, counts: bool, saves: bool = False) -> Step:
    """A gang that cannot go on: all of it ends, and starts again after a pause; ``saves`` where it can still save a checkpoint."""
    job, settings, now = look.job, look.settings, look.now
    policy = job.spec.restart_policy
    ran = since(status.conditions, "Running")
    steady = ran is not None and now - (seconds_of(ran) or now) >= settings.steady_seconds and status.checkpoint != status.resumed_from
    recent = (0 if steady else status.recent_restarts) + counts
    if recent > policy.limit:
        return _end(
            look,
            status,
            "Failed",
            "RestartLimit",
            f"{cause}; it was started again {recent - 1} times, restartPolicy.limit is {policy.limit}; its last checkpoint stays",
        )
    doublings = min(max(recent - 1, status.failed_placings - 1, 0), 30)
    pause = min(policy.backoff_seconds * 2.0**doublings, max(settings.backoff_limit_seconds, policy.backoff_seconds))
    if look.refusal:
        pause = max(pause, settings.unschedulable_seconds)
    status = status.model_copy(update={"restarts": status.restarts + counts, "recent_restarts": recent, "restart_time": time_of(now + pause), "wish": 0})
    message = f"{cause}; all ranks start again from the last checkpoint" + (f" ({recent} of {policy.limit})" if counts else "")
    status = _concluded(look, status, "Restarting", "Lost", message)
    # Without one of its ranks a gang cannot save anything, so the others need no time for it.
    return Step(status, (*ends(look, look.pods, None if saves else settings.lost_stop_seconds), _event(job, "Restarting", message, warn=True)))


def _stop(look: Look, status: NPUJobStatus, phase: JobPhase, reason: str, message: str) -> Step:
    """Let a gang end in its own time, with a last checkpoint."""
    kept = status.placement if phase == "Restarting" else ()
    status = _concluded(look, status.model_copy(update={"placement": kept, "restart_time": None}), phase, reason, message)
    return Step(status, (*ends(look, look.pods), _event(look.job, reason, message)))


def _end(look: Look, status: NPUJobStatus, phase: Literal["Succeeded", "Failed"], reason: str, message: str) -> Step:
    status = _concluded(look, status.model_copy(update={"completion_time": time_of(look.now)}), phase, reason, message)
    left = [pod for pod in look.pods if not pod.finished]
    return Step(status, (*ends(look, left, look.settings.lost_stop_seconds), _event(look.job, reason, message, warn=phase == "Failed")))


def _queued(look: Look, status: NPUJobStatus) -> NPUJobStatus:
    """Back in line, with the waiting of earlier times."""
    joined, began = seconds_of(status.queue_time), seconds_of(status.placed_time)
    waited = status.waited_seconds + (max(0.0, began - joined) if joined and began else 0.0)
    return status.model_copy(update={"queue_time": time_of(look.now), "waited_seconds": waited, "placed_time": None, "reason_time": None, "placement": ()})


def _wait(look: Look, status: NPUJobStatus) -> Step:
    """In line; not before what is left of an earlier gang has ended."""
    left = [pod for pod in look.pods if not pod.finished]
    avoid = tuple(entry for entry in status.avoid if (seconds_of(entry.until) or 0.0) > look.now)
    return Step(status.model_copy(update={"avoid": avoid}), ends(look, left), waits=not any(look.alive(pod) for pod in left))


def ends(look: Look, pods: Sequence[Pod], grace_seconds: int | None = None) -> tuple[Action, ...]:
    """Delete these pods: in their own time, at once where their node cannot answer or their time is long over."""
    result = []
    for pod in pods:
        stuck = pod.delete_by is not None and look.steady > pod.delete_by + STUCK_SECONDS
        if look.on_lost_node(pod) or stuck:
            result.append(DeletePod(pod.namespace, pod.name, pod.uid, 0))
        elif not pod.deleting:
            result.append(DeletePod(pod.namespace, pod.name, pod.uid, grace_seconds))
    return tuple(result)


def _finished(look: Look, status: NPUJobStatus) -> NPUJobStatus:
    """Remember which ranks ended well: their pods may be collected before the others have ended."""
    done = {pod.rank for pod in look.gang.values() if pod.phase == "Succeeded"} | set(status.finished_ranks)
    return status.model_copy(update={"finished_ranks": tuple(sorted(rank for rank in done if rank < len(status.placement)))})


def _seen(place: PodPlacement, gang: Mapping[str, Pod]) -> PodPlacement:
    """A place as another scheduler has chosen it."""
    pod = gang.get(place.pod)
    return place if place.node or pod is None else PodPlacement(pod=place.pod, node=pod.node, npus=pod.npus)


def _tell_ranks(look: Look, status: NPUJobStatus) -> tuple[Action, ...]:
    """Once every pod has an address, the table of ranks; and a touch of the pods, at which their kubelets read it."""
    job = look.job
    pods = sorted(look.gang.values(), key=lambda pod: pod.rank)
    if len(pods) < len(status.placement) or not all(pod.address for pod in pods) or not has_ranks(job, len(pods)):
        return ()
    untold = [pod for pod in pods if TOLD_ANNOTATION not in pod.annotations and not pod.finished]
    if not untold:
        return ()
    table = rank_table_manifest(job, gang_name(job, status.attempt), pods, look.settings)
    return (Create(table), *(AnnotatePod(pod.namespace, pod.name, pod.uid, {TOLD_ANNOTATION: "completed"}) for pod in untold))


def _running(status: NPUJobStatus) -> str:
    nodes = len({place.node for place in status.placement})
    message = f"{_pods(len(status.placement))} on {nodes} node{'' if nodes == 1 else 's'}"
    here = {place.node for place in status.placement}
    if slow := [slow for slow in status.slow if slow.node in here]:
        worst = max(slow, key=lambda slow: slow.ratio)
        message += f"; {worst.node} takes {worst.ratio:.2f} times as long as the others"
    return message


def _concluded(look: Look, status: NPUJobStatus, phase: JobPhase, reason: str, message: str) -> NPUJobStatus:
    answers = {
        "Placed": phase in ("Placing", "Running", "Succeeded"),
        "Running": phase == "Running",
        "Suspended": phase == "Suspended",
        "Succeeded": phase == "Succeeded",
        "Failed": phase == "Failed",
    }
    conditions = with_conditions(status.conditions, answers, reason, message, look.job.metadata.generation, look.now)
    # Of a job that has ended the last figure stays; a gang that has yet to run has none.
    imbalance = status.imbalance if phase in ("Running", "Succeeded", "Failed") else None
    return status.model_copy(update={"phase": phase, "message": message, "conditions": conditions, "imbalance": imbalance})


def _event(job: NPUJob, reason: str, message: str, *, warn: bool = False) -> Event:
    return Event(job.kind, job.namespace, job.name, job.metadata.uid, reason, message, "Warning" if warn else "Normal")


def _pods(count: int) -> str:
    return f"{count} pod{'' if count == 1 else 's'}"
