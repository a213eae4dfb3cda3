"""One round: from what is to what shall be done. Pure, and the same whoever runs it, so that an operator may die at any point of carrying it out.

reconcile(resource, pods, nodes, now, settings)   one job or service alone
reconcile_all(snapshot, settings)                 all of them: states first, then services' replicas, then the line of waiting jobs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from semantide.operators.actions import Action, PatchStatus
from semantide.operators.affinity import Neighbourhood
from semantide.operators.conditions import with_conditions
from semantide.operators.fleet import Fleet
from semantide.operators.job_pods import pod_names
from semantide.operators.job_states import Look, Step, advance, cleared, make_room, placed, refused
from semantide.operators.node import Node
from semantide.operators.placement import Placement, place
from semantide.operators.pod_template import child_labels, full_template
from semantide.operators.pods import Pod, seconds_of
from semantide.operators.request import Request, Shape, shape_of
from semantide.operators.resources import Condition, NPUJob, NPUService, PodPlacement
from semantide.operators.service_rollouts import in_place
from semantide.operators.service_states import ServiceLook, ServiceStep, advance_service, no_room, quota_forbids, replicas_placed, room_made
from semantide.operators.settings import OperatorSettings
from semantide.operators.slow_nodes import slow_nodes
from semantide.operators.snapshot import Invalid, Snapshot
from semantide.operators.waiting_line import Decision, Policy, Running, Waiting, decide

# As Kubernetes' own controller judges a zone (--unhealthy-zone-threshold): of more than two nodes this share.
_FEW_NODES = 2
_TROUBLE_SHARE = 0.55


@dataclass(frozen=True)
class Round:
    """What to do, by resource (kind, namespace and name), each resource's actions in order; what the line looks like; and what the operator stumbled over."""

    actions: Mapping[str, tuple[Action, ...]]
    decision: Decision = field(default_factory=Decision)
    stumbles: Mapping[str, Exception] = field(default_factory=dict)


def reconcile(
    resource: NPUJob | NPUService, pods: Sequence[Pod], nodes: Sequence[Node], now: float, settings: OperatorSettings | None = None
) -> tuple[Action, ...]:
    """What to do about one resource that has the nodes for itself."""
    jobs, services = ((resource,), ()) if isinstance(resource, NPUJob) else ((), (resource,))
    snapshot = Snapshot(now, jobs, services, tuple(pods), tuple(nodes), fronts=frozenset({resource.metadata.uid}))
    return reconcile_all(snapshot, settings or OperatorSettings()).actions.get(_label(resource), ())


def reconcile_all(snapshot: Snapshot, settings: OperatorSettings) -> Round:
    """What to do about everything."""
    slow = slow_nodes(snapshot.jobs, snapshot.now)
    nodes = {node.name: replace(node, slow=max(node.slow, slow.get(node.name, 1.0))) for node in snapshot.nodes}
    if _in_trouble(snapshot):
        # Restarting what may well run on would only lose its work.
        nodes = {name: replace(node, gone=False) for name, node in nodes.items()}
    owned: dict[tuple[str, str], list[Pod]] = defaultdict(list)
    for pod in snapshot.pods:
        owned[pod.namespace, pod.owner].append(pod)  # a pod of another namespace that names an owner here is none of its own
    fleet = Fleet(nodes.values())
    steady = snapshot.now if snapshot.steady is None else snapshot.steady
    looks = {
        job.key: Look(job, owned[job.namespace, job.metadata.uid], nodes, snapshot.now, steady, settings, snapshot.refusals.get(_label(job), ""))
        for job in snapshot.jobs
    }
    stumbles = dict(snapshot.unread)
    steps = {key: _step(look, stumbles) for key, look in looks.items()}
    for key, step in steps.items():
        if step.status.phase in ("Placing", "Running"):  # what has ended only remembers its places
            places = [place for rank, place in enumerate(step.status.placement) if rank not in step.status.finished_ranks]
            _reserve(fleet, looks[key].job, places, looks[key].pods, settings)
    service_looks = {
        service.key: ServiceLook(
            service,
            owned[service.namespace, service.metadata.uid],
            nodes,
            snapshot.now,
            steady,
            settings,
            snapshot.loads.get(service.key, ()),
            service.metadata.uid in snapshot.fronts,
            snapshot.refusals.get(_label(service), ""),
            snapshot.unmeasured.get(service.key, ""),
        )
        for service in snapshot.services
    }
    around = Neighbourhood(snapshot.pods, nodes)
    service_steps = _serve(service_looks, around, fleet, stumbles)
    alive = [pod for pod in snapshot.pods if not pod.node or (pod.node in nodes and not nodes[pod.node].gone)]
    lacking = _lacking(service_looks, service_steps, around, snapshot.now)
    decision = _line(looks, steps, alive, around, lacking.values(), fleet, snapshot.now, _policy(settings), stumbles)
    for start in decision.starts:
        fleet.occupy(start.pods, _shape_held(looks[start.key].job, settings))
    for key, service_look in service_looks.items():
        if way := decision.reasons.get(_label(service_look.service)):
            service_steps[key] = room_made(service_look, service_steps[key], way)
        elif (gang := lacking.get(key)) or quota_forbids(service_look):
            service_steps[key] = in_place(service_look, service_steps[key], gang.request if gang else None, fleet)
    actions = {_label(look.job): _actions(look.job, cleared(look, steps[key])) for key, look in looks.items()}
    actions |= {_label(look.service): _actions(look.service, service_steps[key]) for key, look in service_looks.items()}
    for invalid in snapshot.invalid:
        metadata = invalid.body["metadata"]
        actions[f"{invalid.body['kind']} {metadata.get('namespace', 'default')}/{metadata['name']}"] = _unreadable(invalid, snapshot.now)
    return Round({key: done for key, done in actions.items() if done}, decision, stumbles)


def _in_trouble(snapshot: Snapshot) -> bool:
    """Whether so many of the nodes that do our work are silent at once that it is the cluster, and not them. Those of its control plane may answer all the same."""
    ours = {resource.metadata.uid for resource in (*snapshot.jobs, *snapshot.services)}
    carrying = {pod.node for pod in snapshot.pods if pod.owner in ours}
    with_npus = any(node.capacity for node in snapshot.nodes)
    gone = [node.gone for node in snapshot.nodes if node.capacity or node.name in carrying or not with_npus]
    return all(gone) if sum(gone) <= _FEW_NODES else sum(gone) >= _TROUBLE_SHARE * len(gone)


def _step(look: Look, stumbles: dict[str, Exception]) -> Step:
    """The job's step; one job that the operator stumbles over must not stop the others."""
    try:
        return advance(look)
    except Exception as error:
        stumbles[_label(look.job)] = error
        return Step(look.job.status.model_copy(update={"message": _stumbling(error)}))


def _stumbling(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"the operator stumbles over this and leaves it as it is ({type(error).__name__}: {error})"


def _label(resource: NPUJob | NPUService) -> str:
    return f"{resource.kind} {resource.key}"


def _reserve(fleet: Fleet, resource: NPUJob | NPUService, places: Sequence[PodPlacement], pods: Sequence[Pod], settings: OperatorSettings) -> None:
    """Take the places that were given to pods which are not there yet."""
    there = {pod.name for pod in pods}
    missing = [place for place in places if place.pod not in there and place.node]
    if missing:
        fleet.occupy(missing, _shape_held(resource, settings))


def _shape(resource: NPUJob | NPUService, settings: OperatorSettings, around: Neighbourhood | None = None) -> Shape:
    """The shape of its pods, near the others ``around`` that its template wants."""
    npus = resource.spec.npus_per_pod if isinstance(resource, NPUJob) else resource.spec.npus_per_replica
    # Claims know devices by their class: the name of a plugin's resource says nothing then.
    name = "" if settings.dynamic_resources else resource.spec.resource_name
    template = full_template(resource, settings)
    near, together = ((), "") if around is None else around.wanted(template, resource.namespace, child_labels(resource, template))
    return shape_of(resource.spec.profile, name, npus, template, near, together)


def _shape_held(resource: NPUJob | NPUService, settings: OperatorSettings, around: Neighbourhood | None = None) -> Shape:
    """The shape of pods that were placed; they hold their NPUs even where the operator's own part of their template can no longer be read."""
    try:
        return _shape(resource, settings, around)
    except ValueError:
        return Shape(npus=resource.spec.npus_per_pod if isinstance(resource, NPUJob) else resource.spec.npus_per_replica)


def _serve(looks: Mapping[str, ServiceLook], around: Neighbourhood, fleet: Fleet, stumbles: dict[str, Exception]) -> dict[str, ServiceStep]:
    """Every service's step; replicas are placed before jobs, for somebody waits for their answers: those of higher priority first, and all after the places that
    were given away before are taken."""
    steps: dict[str, ServiceStep] = {}
    order = sorted(looks, key=lambda key: (-looks[key].service.spec.priority, key))

    def stumbled(key: str, step: ServiceStep | None, error: Exception) -> ServiceStep:
        look = looks[key]
        stumbles[_label(look.service)] = error
        status = look.service.status.model_copy(update={"message": ""})
        return replace(no_room(look, step or ServiceStep(status), _stumbling(error)), wanted=())

    for key in order:
        look, step = looks[key], None
        try:
            step = advance_service(look)
            _reserve(fleet, look.service, step.status.placement, look.pods, look.settings)
            steps[key] = step
        except Exception as error:
            steps[key] = stumbled(key, step, error)
    for key in order:
        try:
            if steps[key].wanted:
                steps[key] = _place_replicas(looks[key], steps[key], around, fleet)
        except Exception as error:
            steps[key] = stumbled(key, steps[key], error)
    return steps


def _place_replicas(look: ServiceLook, step: ServiceStep, around: Neighbourhood, fleet: Fleet) -> ServiceStep:
    beside: dict[str, int] = defaultdict(int)
    for entry in step.status.placement:
        beside[entry.node] += 1
    shape = _shape(look.service, look.settings, around)
    request = Request(look.service.key, step.wanted, shape, least=1, spread=True, beside=beside, avoid=step.avoid)
    found = place(request, fleet)
    if not isinstance(found, Placement):
        return no_room(look, step, found.reason)
    fleet.occupy(found.pods, request.shape)
    step = replicas_placed(look, step, found.pods)
    if not step.wanted:
        return step
    rest = place(replace(request, pods=step.wanted), fleet)
    return step if isinstance(rest, Placement) else no_room(look, step, rest.reason)


def _lacking(looks: Mapping[str, ServiceLook], steps: Mapping[str, ServiceStep], around: Neighbourhood, now: float) -> dict[str, Waiting]:
    """Services' replicas without room by their service, as the line sees them: under a name that no job has."""
    lacking = {}
    for key, step in steps.items():
        look = looks[key]
        try:
            if step.wanted:
                shape = _shape(look.service, look.settings, around)
                request = Request(_label(look.service), step.wanted, shape, least=1, spread=True, avoid=step.avoid)
                lacking[key] = Waiting(request, look.service.spec.priority, since=now)
        except ValueError:
            continue  # its message says what is wrong with the template
    return lacking


def _policy(settings: OperatorSettings) -> Policy:
    return Policy(settings.ageing_seconds, settings.patience_seconds, settings.drain_seconds, regrow_seconds=settings.steady_seconds)


def _line(
    looks: Mapping[str, Look],
    steps: dict[str, Step],
    pods: Iterable[Pod],
    around: Neighbourhood,
    serving: Iterable[Waiting],
    fleet: Fleet,
    now: float,
    policy: Policy,
    stumbles: dict[str, Exception],
) -> Decision:
    """Let the line move, and change the steps of those that start, make room or go on waiting; ``pods`` are all that may be alive, ``serving`` replicas without
    room."""
    waiting: list[Waiting] = []
    running: list[Running] = []
    busy = _busy(looks, steps, pods)
    for key, look in looks.items():
        step = steps[key]
        try:
            if step.waits and (seconds_of(step.status.restart_time) or 0.0) > now:
                continue  # after a loss; its message still says what happened
            if step.waits and (other := _other(look.job, busy)):
                steps[key] = refused(look, step, f"waits for {other} to end, which works for the same job {look.job.spec.job_id}")
                continue
            if step.waits and look.job.spec.scheduler != "own":
                names = pod_names(look.job, step.status.attempt + 1, look.job.spec.world_size)
                steps[key] = placed(look, step, [PodPlacement(pod=name, node="") for name in names])
            elif step.waits:
                waiting.append(_waiting(look, step, around))
            elif (gang := _running(look, step, around)) is not None:
                running.append(gang)
        except Exception as error:
            steps[key] = _unplaced(look, step, error, stumbles)
    decision = decide(waiting, running, fleet, now, policy, serving)
    for start in decision.starts:
        look, step = looks[start.key], steps[start.key]
        try:
            steps[start.key] = placed(look, step, start.pods)
        except Exception as error:
            steps[start.key] = _unplaced(look, step, error, stumbles)
    for preemption in decision.preemptions:
        steps[preemption.victim] = make_room(looks[preemption.victim], steps[preemption.victim], preemption.beneficiary)
    for key, reason in decision.reasons.items():
        if key in steps and steps[key].waits:
            steps[key] = refused(looks[key], steps[key], reason)
    return decision


def _unplaced(look: Look, step: Step, error: Exception, stumbles: dict[str, Exception]) -> Step:
    """The step of a job for which no gang can be made: it says why; one that waits for nothing is left as it is. Nobody else is stopped."""
    if not (step.waits and isinstance(error, ValueError)):
        stumbles[_label(look.job)] = error
    return refused(look, step, _stumbling(error)) if step.waits else step


def _busy(looks: Mapping[str, Look], steps: Mapping[str, Step], pods: Iterable[Pod]) -> dict[tuple[str, str], dict[str, str]]:
    """Who works for which job (namespace and id): by owner, in words. Pods may outlive their NPUJob."""
    busy: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for pod in pods:
        if pod.work and not pod.finished:
            busy[pod.namespace, pod.work][pod.owner] = f"pod {pod.name}"
    for key, look in looks.items():
        if look.job.spec.job_id and steps[key].status.phase in ("Placing", "Running", "Restarting"):
            busy[look.job.namespace, look.job.spec.job_id][look.job.metadata.uid] = f"NPUJob {look.job.name}"
    return busy


def _other(job: NPUJob, busy: dict[tuple[str, str], dict[str, str]]) -> str:
    """Who else works for the job's record; where nobody does, nobody else may begin in this round."""
    if not job.spec.job_id:
        return ""
    workers = busy[job.namespace, job.spec.job_id]
    found = next((said for owner, said in workers.items() if owner != job.metadata.uid), "")
    if not found:
        workers[job.metadata.uid] = f"NPUJob {job.name}"
    return found


def _waiting(look: Look, step: Step, around: Neighbourhood) -> Waiting:
    job, status = look.job, step.status
    names = pod_names(job, status.attempt + 1, max(status.wish, job.spec.world_size))
    avoid = frozenset(entry.node for entry in status.avoid)
    request = Request(job.key, names, _shape(job, look.settings, around), least=min(len(names), job.spec.least_pods), avoid=avoid)
    since = seconds_of(status.queue_time) or look.now
    # What was missing may be there by now, so it may try again after a long wait.
    holds = not status.failed_placings or look.now - since >= look.settings.drain_seconds
    return Waiting(request, job.spec.priority, since, status.waited_seconds, restartable=job.spec.restart_policy.limit > 0, holds=holds)


def _running(look: Look, step: Step, around: Neighbourhood) -> Running | None:
    """The gang as the line sees it; None for one that holds nothing, or that another scheduler placed."""
    job, status = look.job, step.status
    if job.spec.scheduler != "own":
        return None
    holds = status.phase in ("Placing", "Running")
    if holds:
        pods = tuple(place for rank, place in enumerate(status.placement) if rank not in status.finished_ranks)
    else:
        pods = tuple(PodPlacement(pod=pod.name, node=pod.node, npus=pod.npus) for pod in look.pods if look.alive(pod))
    if not pods:
        return None
    names = pod_names(job, status.attempt, job.spec.most_pods if holds and not status.finished_ranks else len(pods))
    started = seconds_of(status.placed_time) or look.now
    start, deadline = seconds_of(status.start_time), job.spec.deadline_seconds
    return Running(
        request=Request(job.key, names, _shape_held(job, look.settings, around), least=min(len(names), job.spec.least_pods)),
        pods=pods,
        priority=job.spec.priority,
        since=seconds_of(status.queue_time) or started,
        waited=status.waited_seconds,
        started=started,
        restartable=job.spec.restart_policy.limit > 0,
        leaving=not holds or job.deleting,
        ends=start + deadline if start and deadline else None,
    )


def _actions(resource: NPUJob | NPUService, step: Step | ServiceStep) -> tuple[Action, ...]:
    """The status before what it asks for, so that whoever comes next knows what was meant."""
    if step.status == resource.status:
        return (*step.before, *step.actions)
    metadata = resource.metadata
    patch = PatchStatus(resource.kind, metadata.namespace, metadata.name, metadata.uid, metadata.resource_version, step.status.to_body())
    return (*step.before, patch, *step.actions)


def _unreadable(invalid: Invalid, now: float) -> tuple[Action, ...]:
    """Say what is wrong with a resource; its pods, and what else its status says, are left as they are."""
    metadata, old = invalid.body["metadata"], dict(invalid.body.get("status") or {})
    if old.get("message") == invalid.reason:
        return ()
    try:
        known = tuple(Condition.model_validate(condition) for condition in old.get("conditions") or ())
    except ValueError:
        known = ()
    generation = metadata.get("generation", 0)
    conditions = with_conditions(known, {"Accepted": False}, "InvalidSpec", invalid.reason, generation, now)
    status = {**old, "message": invalid.reason, "conditions": [condition.to_body() for condition in conditions], "observedGeneration": generation}
    name, namespace = metadata["name"], metadata.get("namespace", "default")
    return (PatchStatus(invalid.body["kind"], namespace, name, metadata.get("uid", ""), metadata.get("resourceVersion", ""), status),)
