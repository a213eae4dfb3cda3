"""The operator's line and placement at the size of a large cluster: safety over random ticks, fragmentation, and how long a look takes.

    python tests/benchmarks/placement.py [--quick] [--json] [--ticks 10000] [--nodes 1000]

safety          every tick jobs arrive, end and lose pods, NPUs fail and recover, nodes are cordoned and come back; what the line decides is
                carried out by a cluster that keeps its own books and counts double placements, over-commits, partial gangs and starved jobs
                (any that waits while it could have run alone for longer than ``STARVED_TICKS``, or that never ends)
fragmentation   one cluster for each strategy takes and gives back pods of 1 to 8 NPUs at random until a quarter of its NPUs is free; then: the share
                of the pods of 8 that the free NPUs could hold in whole nodes for which there is room
look            a gang of 512 NPUs on 5,000 nodes, from objects as the watch holds them and from nothing
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stopwatch import finish  # type: ignore[import-not-found]

from semantide.operators import rings
from semantide.operators.fleet import Fleet
from semantide.operators.node import Node
from semantide.operators.placement import Placement, place
from semantide.operators.request import Request, Shape
from semantide.operators.resources import PodPlacement
from semantide.operators.waiting_line import Policy, Running, Waiting, decide

RESOURCE = "huawei.com/Ascend910"
TICK_SECONDS = 30.0
STARVED_TICKS = 1500
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WEIGHTS = (30, 15, 15, 20, 8, 5, 3, 2, 1, 1)


def cluster(count: int) -> list[Node]:
    """Nodes of two rings in racks of 8 and super-pods of 48."""
    return [Node(f"n{at:05}", capacity=8, ring_size=4, resource_name=RESOURCE, super_pod=str(at // 48), rack=str(at // 8)) for at in range(count)]


@dataclass
class Books:
    """What the cluster itself knows: who holds each NPU, and what went wrong."""

    nodes: dict[str, Node]
    holders: dict[tuple[str, int], str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    changed: set[str] = field(default_factory=set)

    def fleet(self) -> Fleet:
        """What the operator sees."""
        for name in self.changed:
            held = {npu: holder for npu in range(8) if (holder := self.holders.get((name, npu))) is not None}
            self.nodes[name] = replace(self.nodes[name], held=held)
        self.changed.clear()
        return Fleet(self.nodes.values())

    def change(self, name: str, healthy: int, unusable: str) -> None:
        """A node fares differently."""
        if (healthy, unusable) != (self.nodes[name].healthy, self.nodes[name].unusable):
            self.nodes[name] = replace(self.nodes[name], healthy=healthy, unusable=unusable)

    def start(self, request: Request, pods: tuple[PodPlacement, ...]) -> None:
        """Check a start against everything that may not happen."""
        if not request.fewest <= len(pods) <= len(request.pods) or len({pod.pod for pod in pods}) != len(pods):
            self.faults["partial gangs"] += 1
        for pod in pods:
            node = self.nodes[pod.node]
            if len(pod.npus) != request.shape.npus or node.unusable or any(not node.healthy >> npu & 1 or npu >= node.capacity for npu in pod.npus):
                self.faults["over-commits"] += 1
            if request.shape.npus <= node.ring and len({npu // node.ring for npu in pod.npus}) > 1:
                self.faults["rings crossed"] += 1
            for npu in pod.npus:
                if (pod.node, npu) in self.holders:
                    self.faults["double placements"] += 1
                self.holders[pod.node, npu] = request.key
            self.changed.add(pod.node)

    def end(self, pods: tuple[PodPlacement, ...]) -> None:
        """Give back what a gang held."""
        for pod in pods:
            for npu in pod.npus:
                del self.holders[pod.node, npu]
            self.changed.add(pod.node)


def safety(ticks: int, count: int, seed: int) -> tuple[Counter[str], dict[str, float]]:
    """Random ticks; afterwards nothing new comes and everything must end."""
    rng, policy = random.Random(seed), Policy()
    books = Books({node.name: node for node in cluster(count)})
    line: dict[str, Waiting] = {}
    running: dict[str, Running] = {}
    left: dict[str, int] = {}
    looks: list[float] = []
    longest = restarts = busy = submitted = 0
    tick, names = 0, list(books.nodes)
    mean_npus = sum(size * weight for size, weight in zip(SIZES, WEIGHTS, strict=True)) / sum(WEIGHTS)
    arrivals = 0.75 * count * 8 / mean_npus / 90  # a job needs 90 ticks in the mean
    while tick < ticks or line or running:
        now = tick * TICK_SECONDS
        if tick < ticks:
            for _ in range(int(arrivals) + (rng.random() < arrivals % 1)):
                submitted += 1
                key, npus = f"t/j{submitted:06}", rng.choices(SIZES, WEIGHTS)[0]
                each = min(npus, 8)
                pods = tuple(f"{key[2:]}-{rank}" for rank in range(npus // each))
                least = max(1, len(pods) // 2) if rng.random() < 0.2 else 0
                request = Request(key, pods, Shape(npus=each, resource_name=RESOURCE), least)
                line[key] = Waiting(request, rng.choice((0, 0, 0, 0, 1, 5)), now, restartable=rng.random() < 0.8)
                left[key] = max(1, int(rng.expovariate(1 / 90)))
            name = rng.choice(names)
            books.change(name, ~(1 << rng.randrange(8)) if rng.random() < 0.1 else -1, "cordoned" if rng.random() < 0.05 else "")
        elif tick == ticks:
            for name in names:
                books.change(name, -1, "")
        lost = rng.choice(list(running)) if running and rng.random() < 0.2 else ""  # a pod of it is killed
        for key, gang in list(running.items()):
            sick = key == lost or (not gang.leaving and any(not books.nodes[pod.node].healthy >> npu & 1 for pod in gang.pods for npu in pod.npus))
            if gang.leaving or sick:
                waited = gang.waited + gang.started - gang.since
                line[key] = Waiting(gang.request, gang.priority, now, waited, after=now + 60 if sick else 0.0, restartable=gang.restartable)
                restarts += 1
            else:
                left[key] -= 1
                if left[key] > 0:
                    continue
                del left[key]
            books.end(gang.pods)
            del running[key]
        fleet = books.fleet()
        began = time.perf_counter()
        decision = decide(line.values(), list(running.values()), fleet, now, policy)
        looks.append(time.perf_counter() - began)
        for found in decision.starts:
            gang = line.pop(found.key)
            books.start(gang.request, found.pods)
            running[found.key] = Running(gang.request, found.pods, gang.priority, gang.since, gang.waited, now, gang.restartable)
        for preemption in decision.preemptions:
            victim = running.get(preemption.victim)
            if victim is None or not victim.restartable or victim.leaving:
                books.faults["wrong victims"] += 1
            else:
                running[preemption.victim] = replace(victim, leaving=True)
        if set(decision.reasons) != set(line):
            books.faults["silent waits"] += 1
        for gang in line.values():
            longest = max(longest, int((now - gang.since) / TICK_SECONDS))
            if now - gang.since == STARVED_TICKS * TICK_SECONDS:
                books.faults["starved jobs"] += 1
        busy += len(books.holders) if tick < ticks else 0
        tick += 1
        if tick > ticks + 20_000:
            books.faults["starved jobs"] += len(line)
            break
    figures = {"jobs": submitted, "restarts": restarts, "longest_wait_ticks": longest, "look_median": statistics.median(looks), "look_longest": max(looks)}
    return books.faults, figures | {"busy": 100 * busy / (ticks * count * 8)}


Strategy = Callable[[Fleet, Shape], int | None]


def first_fit(fleet: Fleet, shape: Shape) -> int | None:
    """The first node by name."""
    return next(iter(sorted(fleet.room(shape))), None)


def binpack(fleet: Fleet, shape: Shape) -> int | None:
    """The fullest node."""
    return min(fleet.room(shape), key=lambda number: (fleet.free[number].bit_count(), number), default=None)


def least_loss(fleet: Fleet, shape: Shape) -> int | None:
    """Where place() puts it."""
    found = place(Request("t/p", ("p",), shape), fleet)
    return fleet.numbers[found.pods[0].node] if isinstance(found, Placement) else None


def fragmentation(strategy: Strategy, count: int, steps: int, seed: int) -> float:
    """Share of the eights that would fit if what is free lay together, over many states with a quarter free."""
    rng, fleet, pods, shares = random.Random(seed), Fleet(cluster(count)), list[tuple[PodPlacement, Shape]](), []
    total = count * 8
    for step in range(steps):
        free = sum(mask.bit_count() for mask in fleet.free)
        if free <= total // 4 and step > steps // 3:
            whole = sum(mask == 0xFF for mask in fleet.free)
            shares.append(whole / (free // 8))
        if free > total // 4:
            shape = Shape(npus=rng.choices((1, 2, 4, 8), (40, 25, 20, 15))[0], resource_name=RESOURCE)
            number = strategy(fleet, shape)
            if number is not None:
                pods.append((PodPlacement(pod="p", node=fleet.nodes[number].name, npus=fleet.take(number, shape)), shape))
                continue
        at = rng.randrange(len(pods))
        pods[at], pods[-1] = pods[-1], pods[at]
        pod, shape = pods.pop()
        fleet.give_back([pod], shape)
    return statistics.mean(shares)


def gang_of_512(count: int, runs: int, wrong: list[str]) -> dict[str, float]:
    """Median milliseconds to place 64 pods of 8 NPUs on nodes that are half busy, with everything remembered and with nothing."""
    rng = random.Random(0)
    nodes = [replace(node, held={npu: "x/y" for npu in range(8) if rng.random() < 0.5} if rng.random() < 0.7 else {}) for node in cluster(count)]
    request = Request("t/gang", tuple(map(str, range(64))), Shape(npus=8, resource_name=RESOURCE))
    warm, cold = [], []
    for _ in range(runs):
        for cache in (rings.choose, rings.pods_that_fit, rings.worth, rings.largest_run):
            cache.cache_clear()
        fresh = [replace(node) for node in nodes]
        began = time.perf_counter()
        found = place(request, fresh)
        cold.append(time.perf_counter() - began)
        fleet = Fleet(nodes)
        place(request, fleet)
        began = time.perf_counter()
        again = place(request, fleet)
        warm.append(time.perf_counter() - began)
        if not isinstance(found, Placement) or found != again or len({pod.node for pod in found.pods}) != 64:
            wrong.append("the gang of 512 was not placed whole")
    return {"warm": 1000 * statistics.median(warm), "cold": 1000 * statistics.median(cold)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.threads = 1
    if options.quick:
        options.ticks, options.nodes = min(options.ticks, 300), min(options.nodes, 200)
    wrong: list[str] = []
    faults, figures = safety(options.ticks, options.nodes, 0)
    wrong += [f"{number} {fault}" for fault, number in faults.items()]
    measures: dict[str, dict[str, Any]] = {
        name.replace(" ", "_"): {"value": faults[name], "unit": "", "better": "lower", "at_least": 0, "runs": options.ticks}
        for name in ("double placements", "over-commits", "partial gangs", "rings crossed", "starved jobs", "wrong victims", "silent waits")
    }
    measures["npus_busy_during_ticks"] = {"value": figures["busy"], "unit": "%", "better": "higher", "runs": options.ticks}
    measures["longest_wait"] = {"value": figures["longest_wait_ticks"], "unit": "ticks", "better": "lower", "runs": options.ticks}
    measures["jobs"] = {"value": figures["jobs"], "unit": "", "better": "higher", "runs": options.ticks}
    measures["restarts"] = {"value": figures["restarts"], "unit": "", "better": "lower", "runs": options.ticks}
    measures["look_median"] = {"value": 1000 * figures["look_median"], "unit": "ms", "better": "lower", "runs": options.ticks}
    measures["look_longest"] = {"value": 1000 * figures["look_longest"], "unit": "ms", "better": "lower", "runs": options.ticks}
    strategies = {"ours": least_loss, "first_fit": first_fit, "binpack": binpack}
    size, steps, seeds = (50, 1500, 1) if options.quick else (128, 12_000, 3)
    shares = {name: statistics.mean(fragmentation(strategy, size, steps, seed) for seed in range(seeds)) for name, strategy in strategies.items()}
    measures["eights_that_fit_at_a_quarter_free"] = {
        "value": 100 * shares["ours"], "unit": "%", "better": "higher", "baseline": "first-fit", "at_least": round(100 * shares["first_fit"], 2), "runs": seeds
    }  # fmt: skip
    for name in ("first_fit", "binpack"):
        measures[f"eights_that_fit_at_a_quarter_free_{name}"] = {"value": 100 * shares[name], "unit": "%", "better": "higher", "runs": seeds}
    taken = gang_of_512(5000, 5 if options.quick else 15, wrong)
    measures["gang_of_512_on_5000_nodes"] = {"value": taken["cold"], "unit": "ms", "better": "lower", "at_least": 1000, "aim": 100, "runs": 15}
    measures["gang_of_512_on_5000_nodes_again"] = {"value": taken["warm"], "unit": "ms", "better": "lower", "runs": 15}
    return finish("placement", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
