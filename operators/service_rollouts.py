"""A rollout that finds no room beside the old replicas: which of these make way for new ones. Pure.

Nobody makes way on a guess: an old replica goes only when a new one is known to fit where it was (or where several of one node were), or when a quota allows no pod
more; when no other change of the service is under way; and after ``surge_seconds``, in which jobs may have ended. So no more replicas than ``rollout.maxUnavailable``
are missing at a time, and a revision that does not become ready takes the place of no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from semantide.operators.actions import Event
from semantide.operators.fleet import Fleet
from semantide.operators.placement import fits
from semantide.operators.pods import Pod, seconds_of
from semantide.operators.request import Request, Shape
from semantide.operators.resources import PodPlacement
from semantide.operators.service_pods import service_revision
from semantide.operators.service_states import ServiceLook, ServiceStep, concluded, ends, quota_forbids


def in_place(look: ServiceLook, step: ServiceStep, request: Request | None, fleet: Fleet) -> ServiceStep:
    """The step of a service whose ``request`` for new replicas found no room in the ``fleet``, or (None) whose new ones a quota forbids: old ones make way for the first
    of them, where that helps."""

    def helps(pods: Sequence[Pod]) -> bool:
        return request is None or fits(replace(request, pods=request.pods[:1], least=1), _without(fleet, pods, request.shape))

    leaving = next((pods for pods in _groups(look, step) if helps(pods)), ())
    if not leaving:
        return step
    names = {pod.name for pod in leaving}
    status = step.status.model_copy(update={"placement": tuple(place for place in step.status.placement if place.pod not in names)})
    said = f"there is no room beside the old replicas: {', '.join(sorted(names))} {'makes' if len(names) == 1 else 'make'} way for a new one"
    service = look.service
    told = Event(service.kind, service.namespace, service.name, service.metadata.uid, "InPlace", said)
    status = concluded(look, status, status.phase, "InPlace", f"{status.message}; {said}")
    # First, for what a quota forbids stops what comes after it.
    return replace(step, status=status, actions=(*ends(look, leaving), told, *step.actions), wanted=())


def _groups(look: ServiceLook, step: ServiceStep) -> Iterator[Sequence[Pod]]:
    """Old replicas that may go together, the best ones to lose first: one, or some of one node."""
    rollout = look.service.spec.rollout
    most = rollout.max_unavailable if rollout.strategy == "Surge" else max(1, rollout.max_unavailable)
    since = seconds_of(step.status.cramped_time)
    if not most or since is None or look.now - since < look.settings.surge_seconds:
        return
    revision = service_revision(look.service, look.settings)
    old = sorted((pod for pod in look.pods if pod.revision != revision), key=lambda pod: (pod.ready, pod.created, pod.name))
    placed, there = {place.pod for place in step.status.placement}, {pod.name for pod in look.pods}
    forbidden = quota_forbids(look) and there < placed and len(there) > step.status.wish - most
    if not (there == placed or forbidden) or not all(pod.ready for pod in look.pods if pod not in old):
        return  # what is on its way may be the room, or the replica that is missing
    yield from ((pod,) for pod in old)
    for _, on_node in groupby(sorted(old, key=lambda pod: pod.node), key=lambda pod: pod.node):
        pods = tuple(on_node)
        yield from (pods[:count] for count in range(2, min(most, len(pods)) + 1))


def _without(fleet: Fleet, pods: Sequence[Pod], shape: Shape) -> Fleet:
    """The fleet once these pods have gone."""
    after = fleet.copy()
    for pod in pods:
        after.give_back([PodPlacement(pod=pod.name, node=pod.node, npus=pod.npus)], replace(shape, millicores=pod.millicores, memory_bytes=pod.memory_bytes))
    return after
