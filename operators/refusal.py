"""Why a gang finds no room, in words that say what was asked, what is there and what to change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from semantide.operators import rings
from semantide.operators.fleet import Fleet
from semantide.operators.request import Request, Shape

_OBSTACLES_NAMED = 4


@dataclass(frozen=True)
class Refusal:
    """No room. ``ever`` says whether the gang would fit if nothing else ran on the nodes that may carry it."""

    key: str
    reason: str
    ever: bool
    asked: int
    free: int
    largest_ring: int
    pods_that_fit: int

    def __str__(self) -> str:
        return self.reason


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _asked(request: Request) -> str:
    pods, fewest, shape = len(request.pods), request.fewest, request.shape
    gang = _count(pods, "pod") if pods == fewest else f"{fewest:,} to {_count(pods, 'pod')}"
    if shape.npus:
        total = request.npus if pods == fewest else shape.npus * fewest
        return f"asks for {'' if pods == fewest else 'at least '}{total:,} {shape.resource_name} ({gang} of {shape.npus:,})"
    needs = [f"{shape.millicores / 1000:g} processors"] if shape.millicores else []
    needs += [f"{shape.memory_bytes / 2**30:.3g} GiB"] if shape.memory_bytes else []
    return f"asks for {gang}{' of ' + ' and '.join(needs) if needs else ''}"


def _obstacles(obstacles: Counter[str]) -> str:
    named = [f"{number:,} {'is' if number == 1 else 'are'} {obstacle}" for obstacle, number in obstacles.most_common(_OBSTACLES_NAMED)]
    rest = sum(obstacles.values()) - sum(number for _, number in obstacles.most_common(_OBSTACLES_NAMED))
    return ", ".join(named) + (f", {rest:,} have other obstacles" if rest else "")


def _values_of(fleet: Fleet, shape: Shape) -> str:
    """What the labels that no node fulfils are instead."""
    for term in shape.terms:
        for expression in term:
            values = Counter(node.labels[expression.key] for node in fleet.nodes if expression.key in node.labels)
            if not any(expression.holds(node.labels) for node in fleet.nodes):
                there = ", ".join(f"{value} on {number:,}" for value, number in values.most_common(_OBSTACLES_NAMED))
                return f"no node has the label {expression}" + (f" (there is {there})" if there else f" (none has {expression.key})")
    return ""


def refusal(request: Request, fleet: Fleet, room: dict[int, int]) -> Refusal:
    """Say why ``room`` (pods that fit, by node) is too little."""
    shape, asked = request.shape, _asked(request)
    found = fleet.candidates(shape)
    numbers = [number for _, _, kind in found.kinds for number in kind]
    free = sum(fleet.free[number].bit_count() for number in numbers)
    largest = max((rings.largest_run(fleet.free[number], capacity, ring) for capacity, ring, kind in found.kinds for number in kind), default=0)
    fitting = sum(room.values())
    empty = sum(
        rings.pods_that_fit(fleet.nodes[number].healthy & ((1 << capacity) - 1), capacity, ring, shape.npus) if shape.npus else 1 << 30
        for capacity, ring, kind in found.kinds
        for number in kind
    )
    parts, ever = [asked], empty >= request.fewest
    if not fleet.nodes:
        parts.append("the cluster has no node")
    elif not numbers:
        parts.append(_values_of(fleet, shape) or f"none of {_count(len(fleet.nodes), 'node')} may carry it")
        most = max((node.capacity for node in fleet.nodes if node.resource_name == shape.resource_name), default=0)
        if shape.npus and not most:
            others = sorted({node.resource_name for node in fleet.nodes if node.resource_name})
            parts.append(f"no node offers {shape.resource_name}" + (f" (there is {', '.join(others)})" if others else " (is the device plugin running?)"))
        elif shape.npus > most:
            parts.append(f"no node has more than {most:,}, so ask for at most {most:,} a pod and for more pods")
    elif not ever:
        sick = sum(fleet.nodes[number].capacity - (fleet.nodes[number].healthy & ((1 << fleet.nodes[number].capacity) - 1)).bit_count() for number in numbers)
        parts.append(
            f"even when nothing else runs only {_count(empty, 'such pod')} {'fits' if empty == 1 else 'fit'} on the {_count(len(numbers), 'node')} that may carry "
            f"{'it' if len(request.pods) == 1 else 'them'}" + (f" ({_count(sick, 'NPU')} there {'is' if sick == 1 else 'are'} unhealthy)" if sick else "")
        )
    elif shape.npus:
        parts.append(
            f"{free:,} {'is' if free == 1 else 'are'} free on {_count(sum(fleet.free[number] != 0 for number in numbers), 'node')}, at most {largest:,} of them in one ring"
        )
        parts.append(f"{fitting:,} such {'pod fits' if fitting == 1 else 'pods fit'} now")
    else:
        parts.append(f"{_count(fitting, 'such pod')} {'fits' if fitting == 1 else 'fit'} on {_count(len(numbers), 'node')}")
    if found.obstacles:
        parts.append(f"of {_count(len(fleet.nodes), 'node')} {_obstacles(found.obstacles)}")
    return Refusal(request.key, "; ".join(parts), ever, request.npus, free, largest, fitting)
