"""What becomes of one service: how many replicas there should be, which of them go, and which are still to be placed. Pure.

    Surge     a replica of the new revision beside the old ones; an old one goes when a new one is ready (where there is no room: ``service_rollouts.py``)
    InPlace   an old one goes first, and a new one takes its room: needs no spare NPUs, and answers with fewer replicas meanwhile

A new revision that does not become ready replaces nothing: under Surge with room no old replica goes, else no more than ``maxUnavailable``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from semantide.operators.actions import Action, Create, DeletePod, Event
from semantide.operators.balancing import Balance, ReplicaLoad, balance, service_load
from semantide.operators.conditions import with_conditions
from semantide.operators.job_states import STUCK_SECONDS
from semantide.operators.node import Node
from semantide.operators.pods import Pod, seconds_of, time_of
from semantide.operators.resources import NODE_ANNOTATION, NodeUntil, NPUService, NPUServiceStatus, PodPlacement, ServicePhase
from semantide.operators.service_pods import replica_manifests, replica_prefix, revision_remains, service_manifest, service_revision, service_selector
from semantide.operators.settings import OperatorSettings

_UNMEASURED = "Unmeasured"
_UNREADY_SECONDS = 300.0  # a broker that is away for less makes replicas unready, and is no reason to end them


@dataclass(frozen=True)
class ServiceLook:
    """What one round knows of a service's surroundings. ``now`` is seconds since 1970-01-01 UTC, ``steady`` the same moment by the clock that tells since when pods
    are as they are; ``loads`` are of the replicas that answered; ``fronted``: its Service is there;
    ``refusal`` is what the API server said when it would not write something for it, ``unmeasured`` why none of its replicas shows its load."""

    service: NPUService
    pods: Sequence[Pod]
    nodes: Mapping[str, Node]
    now: float
    steady: float
    settings: OperatorSettings
    loads: Sequence[ReplicaLoad] = ()
    fronted: bool = True
    refusal: str = ""
    unmeasured: str = ""

    def lost(self, pod: Pod) -> bool:
        """Whether the pod's node cannot answer any more."""
        return bool(pod.node) and (pod.node not in self.nodes or self.nodes[pod.node].gone)

    def refused(self, pod: Pod) -> bool:
        """Whether Kubernetes' scheduler has long said that the pod does not fit where it was placed."""
        since = pod.unschedulable_since
        return since is not None and not pod.node and not pod.deleting and self.steady - since > self.settings.unschedulable_seconds


@dataclass(frozen=True)
class ServiceStep:
    """A service's new status and what to do once that is written; ``before`` is done first. ``wanted`` are names of replicas to be placed, or that found no room;
    ``avoid`` nodes to be used last."""

    status: NPUServiceStatus
    actions: tuple[Action, ...] = ()
    before: tuple[Action, ...] = ()
    wanted: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


def advance_service(look: ServiceLook) -> ServiceStep:
    """One look at a service."""
    service = look.service
    status = service.status.model_copy(update={"observed_generation": service.metadata.generation})
    if service.deleting:
        return ServiceStep(status, ends(look, look.pods))
    status, plan = _wish(look, status)
    revision = service_revision(service, look.settings)
    refused = [pod for pod in look.pods if look.refused(pod)]
    status = _avoiding(look, status, refused)
    failed = [pod for pod in look.pods if pod.finished or look.lost(pod) or _npu_failed(look, pod) or pod in refused]
    staying = [pod for pod in look.pods if pod not in failed and not pod.deleting]
    new = [pod for pod in staying if pod.revision == revision and pod.name != status.moving]
    old = [pod for pod in staying if pod not in new]
    wished = 0 if service.spec.suspend else status.wish
    planned = _planned(look, status, revision)[: max(0, wished - len(new))]
    leaving = list(staying) if service.spec.suspend else _leaving(look, new, old, wished)
    surge = 1 if old and service.spec.rollout.strategy == "Surge" else 0
    after = len(staying) + len(planned) - len(leaving)
    wanted = max(0, min(wished - len(new) - len(planned), wished + surge - after))
    moving = status.moving if any(pod.name == status.moving for pod in look.pods) else ""
    avoid = frozenset((*(pod.node for pod in look.pods if pod.name == moving), *(entry.node for entry in status.avoid)))
    kept = [PodPlacement(pod=pod.name, node=pod.node or _place(status, pod).node, npus=pod.npus) for pod in staying if pod not in leaving]
    ready = sum(pod.ready for pod in staying)
    cramped = status.cramped_time or (time_of(look.now) if planned and quota_forbids(look) else None)
    status = status.model_copy(
        update={
            "replicas": len(staying),
            "ready_replicas": ready,
            "updated_replicas": len(new),
            "placement": (*kept, *planned),
            "moving": moving,
            "cramped_time": cramped if any(pod.revision != revision for pod in old) else None,
            "load": service_load(look.loads),
            "selector": ",".join(f"{key}={value}" for key, value in service_selector(service).items()),
        }
    )
    phase, reason, message = _summary(look, new, old, ready, wished)
    status = concluded(look, status, phase, reason, message)
    actions: tuple[Action, ...] = (
        *ends(look, [*failed, *leaving, *(pod for pod in look.pods if pod.deleting and pod not in failed)]),
        *_made(look, planned, revision),
        *(
            _event(service, "Refused", f"Kubernetes' scheduler refuses {pod.name} on {_place_asked(pod)}: {pod.waits_for}; it is placed anew")
            for pod in refused
        ),
        *((_event(service, "Scaled", plan.reason),) if plan.reason and plan.replicas != service.status.wish else ()),
        *((_event(service, "Moving", plan.reason),) if plan.move and plan.reason else ()),
        # The last, for its name may be somebody else's.
        *(() if look.fronted else (Create(service_manifest(service)),)),
    )
    status, before = _without_old_templates(look, status, revision)
    return ServiceStep(status, actions, before, _names(look, status, revision, wanted), avoid)


def replicas_placed(look: ServiceLook, step: ServiceStep, places: Sequence[PodPlacement]) -> ServiceStep:
    """The step of a service some of whose wanted replicas have found their places."""
    revision = service_revision(look.service, look.settings)
    status = step.status.model_copy(update={"placement": (*step.status.placement, *places)})
    try:
        made = _made(look, places, revision)
    except ValueError as error:
        return replace(no_room(look, step, str(error)), wanted=())
    return replace(step, status=status, actions=(*step.actions, *made), wanted=step.wanted[len(places) :])


def no_room(look: ServiceLook, step: ServiceStep, reason: str) -> ServiceStep:
    """The step of a service whose wanted replicas, or some of them, find no room. A replica that was to move stays then where it is."""
    if step.wanted and step.status.moving:
        step = replace(step, status=step.status.model_copy(update={"moving": ""}), wanted=step.wanted[:-1])
    status, rollout = step.status, look.service.spec.rollout
    if step.wanted and status.updated_replicas < status.replicas:
        status = status.model_copy(update={"cramped_time": status.cramped_time or time_of(look.now)})
        if not rollout.max_unavailable and rollout.strategy == "Surge":
            reason += "; with rollout.maxUnavailable 1 an old replica would make way for it"
        elif rollout.strategy == "Surge":
            reason += f"; where that lasts {look.settings.surge_seconds:.0f} seconds old replicas make way, as rollout.strategy InPlace does at once"
    return replace(step, status=concluded(look, status, status.phase, "NoRoom", f"{status.message}; {reason}" if status.message else reason))


def quota_forbids(look: ServiceLook) -> bool:
    """Whether the last thing that the API server would not make for the service was one that a quota has no room for."""
    return "exceeded quota" in look.refusal


def room_made(look: ServiceLook, step: ServiceStep, way: str) -> ServiceStep:
    """The step of a service for whose replicas others make room, or have done so."""
    status = step.status
    return replace(step, status=concluded(look, status, status.phase, "NoRoom", f"{status.message}; {way}"))


def concluded(look: ServiceLook, status: NPUServiceStatus, phase: ServicePhase, reason: str, message: str) -> NPUServiceStatus:
    """The status with phase, message and conditions that say the same."""
    answers = {
        "Available": status.ready_replicas > 0 and phase in ("Running", "Rolling", "Degraded"),
        "Complete": phase == "Running",
        "Suspended": phase == "Suspended",
        "Refused": bool(look.refusal),
    }
    words = {}
    if look.unmeasured or any(condition.type == _UNMEASURED for condition in status.conditions):
        answers[_UNMEASURED], words[_UNMEASURED] = bool(look.unmeasured), look.unmeasured
    conditions = with_conditions(status.conditions, answers, reason, message, look.service.metadata.generation, look.now, words)
    return status.model_copy(update={"phase": phase, "message": message, "conditions": conditions})


def _wish(look: ServiceLook, status: NPUServiceStatus) -> tuple[NPUServiceStatus, Balance]:
    """How many replicas the load asks for, and whether one should run elsewhere."""
    spec, now = look.service.spec, look.now
    changed = seconds_of(status.scale_time)
    loads = list(look.loads) if status.phase in ("Running", "Degraded", "Rolling") else []
    # Where there is none, nothing is measured that could ask for one.
    least = max(spec.replicas.min, min(1, spec.replicas.max))
    settled = next((seconds_of(one.last_transition_time) for one in status.conditions if one.type == "Complete" and one.status == "True"), None)
    ages = [now - moment if moment is not None else float("inf") for moment in (changed, settled)]
    if status.phase == "Rolling":
        ages[1] = 0.0  # it may grow; all else waits until the rollout or the move has ended
    plan = balance(spec, status.wish or least, loads, ages[0], seconds_settled=ages[1])
    if plan.move and not status.moving:
        status = status.model_copy(update={"moving": plan.move, "scale_time": time_of(now)})
    elif plan.move:
        plan = replace(plan, move=None, reason="")
    if plan.replicas != status.wish:
        status = status.model_copy(update={"wish": plan.replicas, "scale_time": time_of(now) if status.wish else status.scale_time})
    return status, plan


def _avoiding(look: ServiceLook, status: NPUServiceStatus, refused: Sequence[Pod]) -> NPUServiceStatus:
    """Keep off nodes that refuse replicas, for a while: others took what was free there."""
    until = time_of(look.now + look.settings.avoid_seconds)
    new = {node: NodeUntil(node=node, until=until, reason=pod.waits_for[:200]) for pod in refused if (node := _place_asked(pod))}
    old = (entry for entry in status.avoid if entry.node not in new and (seconds_of(entry.until) or 0.0) > look.now)
    return status.model_copy(update={"avoid": (*old, *new.values())})


def _place_asked(pod: Pod) -> str:
    return pod.annotations.get(NODE_ANNOTATION, "")


def _leaving(look: ServiceLook, new: Sequence[Pod], old: Sequence[Pod], wished: int) -> list[Pod]:
    """Replicas to end now."""
    rollout = look.service.spec.rollout
    if old:
        may_lack = max(1, rollout.max_unavailable) if rollout.strategy == "InPlace" else 0
        needed = max(0, wished - may_lack - sum(pod.ready for pod in new))
        order = sorted(old, key=lambda pod: (pod.ready, pod.created, pod.name))
        over = max(0, len(old) - needed)
        return [*order[:over], *(pod for pod in order[over:] if _serves_no_more(look, pod))]
    # Those that do not answer go first, then the youngest.
    order = sorted(new, key=lambda pod: (not pod.ready, pod.created, pod.name), reverse=True)
    return order[: max(0, len(new) - wished)]


def _serves_no_more(look: ServiceLook, pod: Pod) -> bool:
    """Whether nothing is lost with a replica: it never ran, or has not answered for long."""
    if pod.ready:
        return False
    return pod.phase == "Pending" or (pod.unready_since is not None and look.steady - pod.unready_since > _UNREADY_SECONDS)


def _planned(look: ServiceLook, status: NPUServiceStatus, revision: str) -> list[PodPlacement]:
    """Places given to replicas that are not there: an earlier round could not create them, or somebody deleted them."""
    there = {pod.name for pod in look.pods}
    prefix = replica_prefix(look.service, revision)

    def holds(place: PodPlacement) -> bool:
        node = look.nodes.get(place.node)
        sound = node is not None and not node.unusable and all(node.healthy >> npu & 1 for npu in place.npus)
        return place.pod not in there and place.pod.startswith(f"{prefix}-") and sound

    return [] if look.service.spec.suspend else [place for place in status.placement if holds(place)]


def _made(look: ServiceLook, places: Sequence[PodPlacement], revision: str) -> tuple[Action, ...]:
    manifests = (replica_manifests(look.service, place, revision, look.settings, look.now) for place in places)
    return tuple(Create(manifest) for several in manifests for manifest in several)


def _names(look: ServiceLook, status: NPUServiceStatus, revision: str, count: int) -> tuple[str, ...]:
    """The first names that no pod has, not even one that is ending."""
    taken = {pod.name for pod in look.pods} | {place.pod for place in status.placement}
    prefix = replica_prefix(look.service, revision)
    names: list[str] = []
    number = 0
    while len(names) < count:
        if f"{prefix}-{number}" not in taken:
            names.append(f"{prefix}-{number}")
        number += 1
    return tuple(names)


def _place(status: NPUServiceStatus, pod: Pod) -> PodPlacement:
    return next((place for place in status.placement if place.pod == pod.name), PodPlacement(pod=pod.name, node=""))


def _npu_failed(look: ServiceLook, pod: Pod) -> bool:
    node = look.nodes.get(pod.node)
    return node is not None and pod.key in node.lost_holders


def ends(look: ServiceLook, pods: Sequence[Pod]) -> tuple[Action, ...]:
    """Delete these pods: in their own time, at once where their node cannot answer or their time is long over."""
    result = []
    for pod in pods:
        stuck = pod.delete_by is not None and look.steady > pod.delete_by + STUCK_SECONDS
        if look.lost(pod) or stuck:
            result.append(DeletePod(pod.namespace, pod.name, pod.uid, 0))
        elif not pod.deleting:
            result.append(DeletePod(pod.namespace, pod.name, pod.uid))
    return tuple(result)


def _without_old_templates(look: ServiceLook, status: NPUServiceStatus, revision: str) -> tuple[NPUServiceStatus, tuple[Action, ...]]:
    """Take away the templates of resource claims of revisions that have no pods any more."""
    if not look.settings.dynamic_resources or not look.service.spec.npus_per_replica:
        return status, ()
    kept = {revision, *(pod.revision for pod in look.pods)}
    revisions = tuple(one for one in status.revisions if one in kept)
    over = tuple(revision_remains(look.service, one) for one in status.revisions if one not in kept)
    return status.model_copy(update={"revisions": revisions if revision in revisions else (*revisions, revision)}), over


def _summary(look: ServiceLook, new: Sequence[Pod], old: Sequence[Pod], ready: int, wished: int) -> tuple[ServicePhase, str, str]:
    service = look.service
    if service.spec.suspend:
        return "Suspended", "Suspended", "suspended on request"
    message = f"{ready} of {wished} replicas ready"
    waits = next((f"{pod.name} waits for {pod.waits_for}" for pod in (*new, *old) if pod.waits_for and not pod.ready), "")
    if waits:
        message += f"; {waits}"
    if look.refusal:
        message += f"; what it needs cannot be written: {look.refusal}"
    reason = "Refused" if look.refusal else "NotReady"
    if not ready and wished:
        return "Pending", reason, message
    outdated = sum(pod.name != service.status.moving for pod in old)
    if old:
        what = f"{outdated} of another revision" if outdated else "one moves to another node"
        return "Rolling", "Rolling", f"{message}, {what}"
    return ("Degraded", reason, message) if ready < wished or look.refusal else ("Running", "Ready", message)


def _event(service: NPUService, reason: str, message: str) -> Event:
    return Event(service.kind, service.namespace, service.name, service.metadata.uid, reason, message)
