"""Why a gang finds no room, in words that say what was asked, what is there and what to change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from semantide.operators import rings
from semantide.operators.fleet import Fleet
from semantide.operators.request import Request, Shape

_OBSTACLES_NAMED = 4


@dataclass(frozen=True)
class Survey:
    """What the nodes that may carry pods of one shape have: ``fitting`` pods fit now and ``fitting_empty`` if nothing else ran there but what stays for good;
    ``staying``: without that more would fit.

    ``most``, ``offered`` and ``missing_label`` are looked for where no node may carry any.
    """

    shape: Shape
    nodes: int
    able: int
    with_room: int
    free: int
    largest_ring: int
    fitting: int
    fitting_empty: int
    staying: bool
    unhealthy: int
    most: int
    offered: tuple[str, ...]
    missing_label: str
    obstacles: str

    def ever(self, request: Request) -> bool:
        """Whether the gang would fit if nothing else ran."""
        return self.fitting_empty >= request.fewest

    def refusal(self, request: Request) -> Refusal:
        """Say so to one gang."""
        return Refusal(request.key, self, "; ".join([_asked(request), *self._facts(request), *([self.obstacles] if self.obstacles else [])]))

    def _facts(self, request: Request) -> list[str]:
        shape = self.shape
        if not self.nodes:
            return ["the cluster has no node"]
        if not self.able:
            if shape.npus and not self.most:
                return [f"no node offers {shape.resource_name} ({'there is ' + ', '.join(self.offered) if self.offered else 'is the device plugin running?'})"]
            if shape.npus > self.most:
                return [f"no node has more than {self.most:,}, so ask for at most {self.most:,} a pod and for more pods"]
            return [self.missing_label or f"none of the {_count(self.nodes, 'node')} may carry it"]
        where = f"on the {_count(self.able, 'node')} that may carry {'it' if len(request.pods) == 1 else 'them'}"
        if not self.ever(request):
            sick = f" ({_count(self.unhealthy, 'NPU')} there {'is' if self.unhealthy == 1 else 'are'} unhealthy)" if self.unhealthy else ""
            beside = " but what others keep there for good" if self.staying else ""
            return [f"even when nothing else runs{beside} only {_fit(self.fitting_empty)} {where}{sick}"]
        if not shape.npus:
            return [f"{_fit(self.fitting)} now {where}"]
        free = f"{self.free:,} {'is' if self.free == 1 else 'are'} free on {_count(self.with_room, 'node')}, at most {self.largest_ring:,} of them in one ring"
        return [free, f"{_fit(self.fitting)} now"]


@dataclass(frozen=True)
class Refusal:
    """No room for a gang."""

    key: str
    survey: Survey
    reason: str

    def __str__(self) -> str:
        return self.reason


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _fit(pods: int) -> str:
    return f"{_count(pods, 'such pod')} {'fits' if pods == 1 else 'fit'}"


def _asked(request: Request) -> str:
    pods, fewest, shape = len(request.pods), request.fewest, request.shape
    gang = _count(pods, "pod") if pods == fewest else f"{fewest:,} to {_count(pods, 'pod')}"
    gang += f" with one {shape.together}" if shape.together and pods > 1 else ""
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


def _missing_label(fleet: Fleet, shape: Shape) -> str:
    """What the labels that no node fulfils are instead."""
    for term in shape.terms:
        for expression in term:
            values = Counter(node.labels[expression.key] for node in fleet.nodes if expression.key in node.labels)
            if not any(expression.holds(node.labels) for node in fleet.nodes):
                if expression.place:
                    return f"no node is {expression.place}"
                there = ", ".join(f"{value} on {number:,}" for value, number in values.most_common(_OBSTACLES_NAMED))
                return f"no node has the label {expression}" + (f" (there is {there})" if there else f" (none has {expression.key})")
    return ""


def survey(shape: Shape, fleet: Fleet, fitting: int) -> Survey:
    """Look at all nodes, of which ``fitting`` pods fit now."""
    found = fleet.candidates(shape)
    masks = Counter((fleet.free[number], capacity, ring) for capacity, ring, numbers in found.kinds for number in numbers)
    return Survey(
        shape=shape,
        nodes=len(fleet.nodes),
        able=found.able,
        with_room=sum(count for (free, _, _), count in masks.items() if free),
        free=sum(free.bit_count() * count for (free, _, _), count in masks.items()),
        largest_ring=max((rings.largest_run(*mask) for mask in masks), default=0),
        fitting=fitting,
        fitting_empty=found.pods_when_empty,
        staying=found.staying,
        unhealthy=found.unhealthy,
        most=max((node.capacity for node in fleet.nodes if node.resource_name == shape.resource_name), default=0) if not masks else 0,
        offered=tuple(sorted({node.resource_name for node in fleet.nodes if node.resource_name})) if not masks else (),
        missing_label=_missing_label(fleet, shape) if not masks else "",
        obstacles=f"of the {_count(len(fleet.nodes), 'node')} {_obstacles(found.obstacles)}" if found.obstacles else "",
    )
