"""Where the pods of a gang go: all of them at once, or a reason in plain words why not.

A job is packed: into one node if it fits, else into one super-pod, else into as few as possible, and there into few racks and nodes;
among equals, where the least of the larger gaps is broken. A service is spread: over nodes, then racks and super-pods. Nodes that
are known to be slow come last. Pods are numbered along the topology, so that neighbouring ranks are neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from semantide.operators.fleet import Fleet
from semantide.operators.node import Node
from semantide.operators.refusal import Refusal, survey
from semantide.operators.request import Request
from semantide.operators.resources import PodPlacement

SLOW = 1.1  # a node whose gangs need a tenth more time per step is used last


@dataclass(frozen=True)
class Placement:
    """A gang's pods in the order of their ranks."""

    key: str
    pods: tuple[PodPlacement, ...]


def place(request: Request, nodes: Fleet | Iterable[Node]) -> Placement | Refusal:
    """Find room for a gang; nothing is taken from ``nodes``."""
    fleet = nodes if isinstance(nodes, Fleet) else Fleet(nodes)
    room = _domain(request, fleet)
    fitting = sum(room.values())
    count = min(len(request.pods), fitting)
    if count < request.fewest:
        return survey(request.shape, fleet, fitting).refusal(request)
    if request.spread:
        chosen = _spread(request, fleet, room, count)
    else:
        room, count = _without_slow(request, fleet, room, count)
        chosen = _pack(request, fleet, room, count)
    trial = fleet.copy()
    pods: list[PodPlacement] = []
    for number in sorted(chosen, key=lambda number: (fleet.nodes[number].super_pod, fleet.nodes[number].rack, number)):
        for _ in range(chosen[number]):
            pods.append(PodPlacement(pod=request.pods[len(pods)], node=fleet.nodes[number].name, npus=trial.take(number, request.shape)))
    return Placement(request.key, tuple(pods))


def fits(request: Request, fleet: Fleet) -> bool:
    """Whether there is room, without saying where."""
    return sum(_domain(request, fleet).values()) >= request.fewest


def _domain(request: Request, fleet: Fleet) -> dict[int, int]:
    """The nodes with room for the gang, all those that it may have together: as many pods as it asks for, off nodes that are avoided, in the tightest part."""
    parts = fleet.domains(fleet.room(request.shape), request.shape)
    if len(parts) < 2:
        return parts[0] if parts else {}

    def order(room: dict[int, int]) -> tuple[int, int, int]:
        size = sum(room.values())
        avoided = sum(fleet.nodes[number].name in request.avoid for number in room)
        return -min(len(request.pods), size), avoided, size

    return min(parts, key=order)


def _without_slow(request: Request, fleet: Fleet, room: dict[int, int], count: int) -> tuple[dict[int, int], int]:
    """Leave slow nodes out where the gang fits without them, or runs faster smaller than at their speed."""
    slowness = {number: slow for number, slow in fleet.slow.items() if slow >= SLOW and number in room}
    avoided = (fleet.numbers[name] for name in request.avoid if name in fleet.numbers)
    slowness |= {number: max(slowness.get(number, 1.0), SLOW) for number in avoided if number in room}
    if not slowness:
        return room, count
    for worst in sorted({1.0, *slowness.values()}):
        kept = {number: pods for number, pods in room.items() if slowness.get(number, 1.0) <= worst}
        fits = min(count, sum(kept.values()))
        if fits == count or (fits >= request.fewest and fits * max(slowness.values()) >= count * worst):
            return kept, fits
    return room, count


def _pack(request: Request, fleet: Fleet, room: dict[int, int], count: int) -> dict[int, int]:
    one = [number for number, pods in room.items() if pods >= count]
    if one:
        return {_least_loss(request, fleet, one, count): count}
    return _narrow(request, fleet, room, count, (lambda node: node.super_pod, lambda node: node.rack))


def _narrow(request: Request, fleet: Fleet, room: dict[int, int], count: int, levels: Sequence[Callable[[Node], str]]) -> dict[int, int]:
    """Fill as few domains of the first level as possible, the last of them being the tightest that holds the rest."""
    if not levels:
        return _fill(request, fleet, room, count)
    domains: dict[str, dict[int, int]] = defaultdict(dict)
    for number, pods in room.items():
        domains[levels[0](fleet.nodes[number])][number] = pods
    if len(domains) == 1:
        return _narrow(request, fleet, room, count, levels[1:])
    sizes = sorted((sum(inside.values()), name) for name, inside in domains.items())
    chosen: dict[int, int] = {}
    while count:
        fitting = next(((size, name) for size, name in sizes if size >= count), None)
        size, name = fitting or sizes[-1]
        sizes.remove((size, name))
        part = min(count, size)
        chosen |= _narrow(request, fleet, domains[name], part, levels[1:])
        count -= part
    return chosen


def _fill(request: Request, fleet: Fleet, room: dict[int, int], count: int) -> dict[int, int]:
    """Fill the roomiest nodes whole, and put the rest where it breaks least."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for number, pods in room.items():
        by_size[pods].append(number)
    chosen: dict[int, int] = {}
    for pods in sorted(by_size, reverse=True):
        numbers = by_size[pods]
        whole = min(count // pods, len(numbers))
        if whole < len(numbers):
            numbers = sorted(numbers, key=lambda number: (fleet.loss(number, request.shape, pods), number))
        chosen |= dict.fromkeys(numbers[:whole], pods)
        count -= whole * pods
        if count and whole < len(numbers):
            rest = [number for number, most in room.items() if most >= count and number not in chosen]
            chosen[_least_loss(request, fleet, rest, count)] = count
            count = 0
        if not count:
            break
    return chosen


def _least_loss(request: Request, fleet: Fleet, numbers: Iterable[int], pods: int) -> int:
    """The node that so many pods spoil least; fewest free NPUs and then the first name among equals."""
    if not request.shape.npus:
        return min(numbers, key=lambda number: (fleet.loss(number, request.shape, pods), number))
    known: dict[tuple[int, int, int], tuple[int, int]] = {}
    best: tuple[tuple[int, int], int] | None = None
    for number in numbers:
        node, free = fleet.nodes[number], fleet.free[number]
        alike = (free, node.capacity, node.ring_size)
        cost = known.get(alike)
        if cost is None:
            cost = known[alike] = (fleet.loss(number, request.shape, pods), free.bit_count())
        if best is None or (cost, number) < best:
            best = (cost, number)
    assert best is not None, "there is a node with room"
    return best[1]


def _spread(request: Request, fleet: Fleet, room: dict[int, int], count: int) -> dict[int, int]:
    """One pod after the other, each where the fewest of its service are."""
    on_node, in_rack, in_super_pod = defaultdict(int, request.beside), defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
    for name, pods in request.beside.items():
        if (number := fleet.numbers.get(name)) is not None:
            node = fleet.nodes[number]
            in_rack[node.super_pod, node.rack] += pods
            in_super_pod[node.super_pod] += pods
    chosen: dict[int, int] = {}

    def order(number: int) -> tuple[object, ...]:
        node = fleet.nodes[number]
        slow = node.slow if node.slow >= SLOW else 1.0
        crowd = (on_node[node.name], slow, node.name in request.avoid, in_super_pod[node.super_pod], in_rack[node.super_pod, node.rack])
        return (*crowd, fleet.loss(number, request.shape, chosen.get(number, 0) + 1), number)

    for _ in range(count):
        number = min((number for number, most in room.items() if chosen.get(number, 0) < most), key=order)
        node = fleet.nodes[number]
        chosen[number] = chosen.get(number, 0) + 1
        on_node[node.name] += 1
        in_rack[node.super_pod, node.rack] += 1
        in_super_pod[node.super_pod] += 1
    return chosen
