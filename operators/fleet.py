"""The nodes while gangs are being placed: what is free on each, taken and given back in memory.

Nodes are numbered; free NPUs are masks and the rest plain numbers in lists, so that a copy for a "what if" costs microseconds.
What depends on a pod's shape alone (which nodes may carry it) is found once per shape and shared by all copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from semantide.operators import rings
from semantide.operators.node import Node
from semantide.operators.request import Shape
from semantide.operators.resources import PodPlacement


@dataclass(frozen=True)
class Candidates:
    """The nodes that may carry pods of one shape, by kind (capacity and ring), and how many others there are for each obstacle.

    ``pods_when_empty``: pods that would fit if nothing ran but what stays for good; ``staying``: without that more would; ``unhealthy``: sick NPUs on these nodes.
    """

    kinds: tuple[tuple[int, int, tuple[int, ...]], ...]
    obstacles: Counter[str]
    pods_when_empty: int
    staying: bool
    unhealthy: int

    @property
    def able(self) -> int:
        """How many nodes there are."""
        return sum(len(numbers) for _, _, numbers in self.kinds)


class Fleet:
    """A cluster's nodes and what is free on them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: Sequence[Node] = sorted(nodes, key=lambda node: node.name)
        self.numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self.free = [node.free for node in self.nodes]
        self._millicores = [node.free_millicores for node in self.nodes]
        self._memory = [node.free_memory_bytes for node in self.nodes]
        self._pods = [node.free_pods for node in self.nodes]
        self.slow = {number: node.slow for number, node in enumerate(self.nodes) if node.slow > 1.0}
        self._candidates: dict[Shape, Candidates] = {}

    def copy(self) -> Self:
        """The same nodes, to try something out on."""
        other = object.__new__(type(self))
        other.nodes, other.numbers, other.slow, other._candidates = self.nodes, self.numbers, self.slow, self._candidates
        other.free, other._millicores, other._memory, other._pods = self.free[:], self._millicores[:], self._memory[:], self._pods[:]
        return other

    def candidates(self, shape: Shape) -> Candidates:
        """Which nodes may carry pods of this shape, whatever they hold now."""
        found = self._candidates.get(shape)
        if found is None:
            kinds: dict[tuple[int, int], list[int]] = {}
            obstacles: Counter[str] = Counter()
            for number, node in enumerate(self.nodes):
                if obstacle := shape.obstacle(node):
                    obstacles[obstacle] += 1
                else:
                    kinds.setdefault((node.capacity, node.ring_size if shape.aligned else 0), []).append(number)
            able = [number for numbers in kinds.values() for number in numbers]
            empty, bare = ({number: self._pods_when_empty(number, shape, kept=kept) for number in able} for kept in (True, False))
            found = Candidates(
                tuple((capacity, ring, tuple(numbers)) for (capacity, ring), numbers in kinds.items()),
                obstacles,
                most := max((sum(inside.values()) for inside in self.domains(empty, shape)), default=0),
                most < max((sum(inside.values()) for inside in self.domains(bare, shape)), default=0),
                sum(node.capacity - (node.healthy & ((1 << node.capacity) - 1)).bit_count() for node in map(self.nodes.__getitem__, able)),
            )
            self._candidates[shape] = found
        return found

    def room(self, shape: Shape) -> dict[int, int]:
        """Nodes that can carry at least one such pod now, and how many."""
        found: dict[int, int] = {}
        free, count = self.free, shape.npus
        for capacity, ring, numbers in self.candidates(shape).kinds:
            if count:
                fits: dict[int, int] = {}
                for number in numbers:
                    mask = free[number]
                    pods = fits.get(mask)
                    if pods is None:
                        pods = fits[mask] = rings.pods_that_fit(mask, capacity, ring, count)
                    if pods:
                        found[number] = pods
            else:
                found.update(dict.fromkeys(numbers, 1 << 30))
        scarce = shape.millicores or shape.memory_bytes
        limits = self._pods
        for number in [number for number, pods in found.items() if scarce or limits[number] < pods]:
            found[number] = self._by_other_means(number, shape, found[number])
            if found[number] < 1:
                del found[number]
        return found

    def domains(self, room: dict[int, int], shape: Shape) -> list[dict[int, int]]:
        """The nodes with room, apart where one gang of this shape may not have some of both."""
        if not shape.together:
            return [room]
        parts: dict[str, dict[int, int]] = {}
        for number, pods in room.items():
            if (value := self.nodes[number].labels.get(shape.together)) is not None:
                parts.setdefault(value, {})[number] = pods
        return [parts[value] for value in sorted(parts)]

    def _pods_when_empty(self, number: int, shape: Shape, *, kept: bool) -> int:
        """How many such pods one node could carry if it carried nothing else; ``kept``: but what stays there for good."""
        node = self.nodes[number]
        pods: float = 1 << 30
        if shape.npus:
            healthy = node.healthy & ((1 << node.capacity) - 1) & ~(node.kept if kept else 0)
            pods = rings.pods_that_fit(healthy, node.capacity, node.ring_size if shape.aligned else 0, shape.npus)
        if shape.millicores:
            pods = min(pods, max(0, node.millicores - node.kept_millicores * kept) // shape.millicores)
        if shape.memory_bytes:
            pods = min(pods, max(0, node.memory_bytes - node.kept_memory_bytes * kept) // shape.memory_bytes)
        return int(pods)

    def _by_other_means(self, number: int, shape: Shape, pods: int) -> int:
        least: float = min(pods, self._pods[number])
        if shape.millicores:
            least = min(least, self._millicores[number] // shape.millicores)
        if shape.memory_bytes:
            least = min(least, self._memory[number] // shape.memory_bytes)
        return int(max(least, 0))

    def loss(self, number: int, shape: Shape, pods: int) -> int:
        """What the node's free NPUs are worth less after so many more pods."""
        if not shape.npus:
            # Pods without NPUs keep off nodes that have some.
            apart = self.nodes[number].capacity << 60
            if shape.millicores or shape.memory_bytes:
                return apart + int(min(self._millicores[number], 1 << 39))  # into the fullest of the others
            # What they will take nobody knows: where the fewest are, and of such nodes where most is free.
            return apart + (int((1 << 20) - min(self._pods[number], 1 << 20)) << 39) + (1 << 39) - int(min(self._millicores[number], 1 << 39))
        node = self.nodes[number]
        ring = node.ring_size if shape.aligned else 0
        before = after = self.free[number]
        for _ in range(pods):
            after &= ~rings.choose(after, node.capacity, ring, shape.npus)
        return rings.worth(before, node.capacity, node.ring_size) - rings.worth(after, node.capacity, node.ring_size)

    def take(self, number: int, shape: Shape) -> tuple[int, ...]:
        """Give one pod its NPUs on this node."""
        node = self.nodes[number]
        chosen = rings.choose(self.free[number], node.capacity, node.ring_size if shape.aligned else 0, shape.npus) if shape.npus else 0
        assert chosen.bit_count() == shape.npus, f"{node.name} has no room for {shape.npus} NPUs"
        self._move(number, shape, chosen, -1)
        return rings.indices_of(chosen)

    def occupy(self, pods: Iterable[PodPlacement], shape: Shape) -> None:
        """Take what these pods have; NPUs that are not free are passed over."""
        for pod in pods:
            if (number := self.numbers.get(pod.node)) is not None:
                self._move(number, shape, rings.mask_of(list(pod.npus)), -1)

    def give_back(self, pods: Iterable[PodPlacement], shape: Shape) -> None:
        """Free what these pods have, as far as it is healthy."""
        for pod in pods:
            if (number := self.numbers.get(pod.node)) is not None:
                self._move(number, shape, rings.mask_of(list(pod.npus)) & self.nodes[number].healthy, 1)

    def close(self, number: int) -> None:
        """Let no further pod onto this node."""
        self.free[number], self._pods[number] = 0, 0

    def _move(self, number: int, shape: Shape, npus: int, sign: int) -> None:
        self.free[number] = self.free[number] | npus if sign > 0 else self.free[number] & ~npus
        self._millicores[number] += sign * shape.millicores
        self._memory[number] += sign * shape.memory_bytes
        self._pods[number] += sign
