"""Who starts, who waits, who makes room."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.operators.fleet import Fleet
from semantide.operators.node import Node
from semantide.operators.placement import Placement, place
from semantide.operators.request import Request, Shape
from semantide.operators.resources import PodPlacement
from semantide.operators.waiting_line import Decision, Policy, Preemption, Running, Waiting, decide, in_order, may_take, standing, victims_for

ASCEND = "huawei.com/Ascend910"
POLICY = Policy(ageing_seconds=600, patience_seconds=60, drain_seconds=1800, regrow_seconds=900)


def nodes(count: int) -> list[Node]:
    return [Node(f"n{at}", capacity=8, ring_size=4, resource_name=ASCEND, super_pod=str(at // 4)) for at in range(count)]


def request(name: str, pods: int, npus: int = 8, least: int = 0) -> Request:
    return Request(name, tuple(f"{name}-{rank}" for rank in range(pods)), Shape(npus=npus, resource_name=ASCEND), least)


def waiting(name: str, pods: int, npus: int = 8, least: int = 0, **fields: float) -> Waiting:
    return Waiting(request(name, pods, npus, least), **fields)  # type: ignore[arg-type]


class Cluster:
    """A cluster that does at once what the line decides; gangs that were told to go are gone at the next step."""

    def __init__(self, count: int) -> None:
        self.nodes, self.fleet, self.now = nodes(count), Fleet(nodes(count)), 0.0
        self.line: dict[str, Waiting] = {}
        self.running: dict[str, Running] = {}
        self.restartable: dict[str, bool] = {}
        self.preempted: Counter[str] = Counter()

    def submit(self, gang: Waiting, restartable: bool = True) -> None:
        self.line[gang.request.key] = replace(gang, since=self.now, restartable=restartable)
        self.restartable[gang.request.key] = restartable

    def end(self, key: str) -> None:
        gang = self.running.pop(key)
        self.fleet.give_back(gang.pods, gang.request.shape)

    def look(self, seconds: float = 10.0) -> Decision:
        self.now += seconds
        for key in [key for key, gang in self.running.items() if gang.leaving]:
            gang = self.running[key]
            self.end(key)
            self.line[key] = Waiting(gang.request, gang.priority, self.now, gang.waited + gang.started - gang.since)
        free = self.fleet.free[:]
        decision = decide(self.line.values(), list(self.running.values()), self.fleet, self.now, POLICY)
        assert self.fleet.free == free
        for found in decision.starts:
            gang = self.line.pop(found.key)
            held = {(pod.node, npu) for other in self.running.values() for pod in other.pods for npu in pod.npus}
            for pod in found.pods:
                assert not held & {(pod.node, npu) for npu in pod.npus}
            assert gang.request.fewest <= len(found.pods) <= len(gang.request.pods)
            self.fleet.occupy(found.pods, gang.request.shape)
            self.running[found.key] = Running(gang.request, found.pods, gang.priority, gang.since, gang.waited, self.now, self.restartable[found.key])
        for preemption in decision.preemptions:
            victim = self.running[preemption.victim]
            assert victim.restartable and not victim.leaving
            self.running[preemption.victim] = replace(victim, leaving=True)
            self.preempted[preemption.victim] += 1
        assert set(decision.reasons) == set(self.line)
        held = Counter((pod.node, npu) for gang in self.running.values() for pod in gang.pods for npu in pod.npus)
        assert not held or max(held.values()) == 1
        assert sum(8 - mask.bit_count() for mask in self.fleet.free) == len(held)
        return decision


def test_the_line_stands_by_priority_and_age() -> None:
    line = [
        waiting("young", 1, since=1000),
        waiting("old", 1, since=0),
        waiting("high", 1, priority=1, since=900),
        waiting("returned", 1, since=1000, waited=1600),
    ]
    assert [gang.request.key for gang in in_order(line, POLICY)] == ["returned", "old", "high", "young"]
    assert standing(line[0], POLICY) < standing(line[1], POLICY)


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 1e5), st.floats(0, 1e5)), max_size=8))
def test_the_order_is_one_of_all(entries: list[tuple[int, float, float]]) -> None:
    line = [waiting(str(at), 1, priority=priority, since=since, waited=waited) for at, (priority, since, waited) in enumerate(entries)]
    assert in_order(line, POLICY) == in_order(reversed(line), POLICY)


def test_smaller_gangs_go_past_one_that_does_not_fit() -> None:
    cluster = Cluster(4)
    cluster.submit(waiting("first", 3))
    cluster.look()
    cluster.submit(waiting("large", 2))
    cluster.submit(waiting("small", 1, 4))
    decision = cluster.look()
    assert [found.key for found in decision.starts] == ["small"]
    assert "asks for 16" in decision.reasons["large"] and not decision.preemptions


def test_the_head_takes_back_what_went_past_it() -> None:
    cluster = Cluster(4)
    cluster.submit(waiting("first", 3))
    cluster.look()
    cluster.submit(waiting("large", 2))
    cluster.submit(waiting("small", 1, 4))
    cluster.look()
    cluster.end("first")  # three nodes are free, and large needs two: it starts; with one node less it would need small's
    assert [found.key for found in cluster.look().starts] == ["large"]

    cluster = Cluster(2)
    cluster.submit(waiting("first", 1))
    cluster.look()
    cluster.submit(waiting("large", 2))
    cluster.submit(waiting("small", 1, 4))
    cluster.look()
    cluster.end("first")
    assert cluster.look().preemptions == ()  # large has not waited long enough
    decision = cluster.look(60)
    assert decision.preemptions == (Preemption("small", "large"),) and "small saves its state and makes room" in decision.reasons["large"]
    cluster.submit(waiting("late", 1, 4))
    decision = cluster.look()
    assert [found.key for found in decision.starts] == ["large"] and cluster.preempted == {"small": 1}
    assert cluster.look().preemptions == ()  # nobody takes it back from large


def test_room_that_is_given_back_is_promised() -> None:
    fleet = Fleet(nodes(2))
    runs = [Running(request("going", 1, 8), (PodPlacement(pod="going-0", node="n0", npus=tuple(range(8))),), leaving=True)]
    fleet.occupy(runs[0].pods, runs[0].request.shape)
    decision = decide([waiting("large", 2, since=0), waiting("small", 1, 4, since=5)], runs, fleet, 10.0, POLICY)
    assert not decision.starts and not decision.preemptions  # small would fit on the other node, but that is large's
    assert "room for it is being given back" in decision.reasons["large"]


def test_higher_priority_takes_room_at_once() -> None:
    cluster = Cluster(2)
    cluster.submit(waiting("low", 2))
    cluster.look()
    cluster.submit(waiting("equal", 1))
    assert not cluster.look(100_000).preemptions
    cluster.submit(waiting("high", 1, priority=1000))
    assert cluster.look().preemptions == (Preemption("low", "high"),)
    assert [found.key for found in cluster.look().starts] == ["high", "equal"]


def test_what_was_waited_for_counts_for_its_holder() -> None:
    victim = Running(request("low", 1), (), priority=0, since=0, started=6000, waited=0)
    assert not may_take(waiting("high", 1, priority=10, since=7000), victim, POLICY, overtakers=False)
    assert may_take(waiting("high", 1, priority=11, since=7000), victim, POLICY, overtakers=False)
    assert not may_take(waiting("high", 1, priority=11, since=7000), replace(victim, restartable=False), POLICY, overtakers=False)
    assert not may_take(waiting("high", 1, priority=11, since=7000), replace(victim, leaving=True), POLICY, overtakers=False)


def test_only_as_many_victims_as_needed() -> None:
    fleet = Fleet(nodes(4))
    runs = []
    for at in range(4):
        for ring in range(2):
            pod = PodPlacement(pod="p", node=f"n{at}", npus=tuple(range(4 * ring, 4 * ring + 4)))
            runs.append(Running(request(f"r{at}{ring}", 1, 4), (pod,), started=float(at)))
            fleet.occupy([pod], runs[-1].request.shape)
    chosen = victims_for(request("new", 1), runs, fleet)
    assert len(chosen) == 2 and len({victim.pods[0].node for victim in chosen}) == 1
    assert victims_for(request("new", 5), runs, fleet) == []
    assert victims_for(request("new", 4), runs[1:], fleet) == []


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=40)
def test_without_any_of_the_victims_it_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    fleet, runs = Fleet(nodes(4)), []
    for at in range(12):
        small = request(f"r{at}", rng.randint(1, 2), rng.choice([1, 2, 4, 8]))
        found = place(small, fleet)
        if isinstance(found, Placement):
            fleet.occupy(found.pods, small.shape)
            runs.append(Running(small, found.pods))
    new = request("new", rng.randint(1, 3), rng.choice([2, 4, 8]))
    chosen = victims_for(new, runs, fleet)
    for left in [*chosen, None]:
        trial = fleet.copy()
        for victim in chosen:
            if victim is not left:
                trial.give_back(victim.pods, victim.request.shape)
        if left is not None:
            assert not isinstance(place(new, trial), Placement)
        elif chosen:
            assert isinstance(place(new, trial), Placement)


@pytest.mark.parametrize("restartable", [True, False])
def test_a_large_gang_starts_however_many_small_ones_come(restartable: bool) -> None:
    cluster, rng, ends = Cluster(4), random.Random(0), dict[str, float]()
    for step in range(600):
        for key in [key for key, end in ends.items() if end <= cluster.now and key in cluster.running and not cluster.running[key].leaving]:
            cluster.end(key)
        if step == 20:
            cluster.submit(waiting("large", 4), restartable)
        for new in range(1 + step % 2):
            cluster.submit(waiting(f"s{step}-{new}", 1, rng.choice([1, 2, 4, 8])), restartable)
        for found in cluster.look(30).starts:
            ends[found.key] = cluster.now + rng.uniform(60, 600)
        if "large" in cluster.running:
            break
    assert "large" in cluster.running
    assert cluster.now <= (3000 if restartable else 6000)


def test_what_never_fits_holds_nobody_up() -> None:
    cluster = Cluster(1)
    cluster.submit(waiting("huge", 2, priority=100))
    cluster.submit(waiting("small", 1))
    decision = cluster.look(10_000)
    assert [found.key for found in decision.starts] == ["small"] and "even when nothing else runs only 1 such pod fits" in decision.reasons["huge"]
    assert not cluster.look(10_000).preemptions


def test_pauses_are_kept() -> None:
    gang = waiting("again", 1, since=0, after=100)
    assert decide([gang], [], Fleet(nodes(1)), 90.5, POLICY).reasons == {"again": "pauses for another 10 seconds before it starts again"}
    assert len(decide([gang], [], Fleet(nodes(1)), 100.0, POLICY).starts) == 1


def test_an_elastic_gang_shrinks_and_grows_again() -> None:
    cluster = Cluster(4)
    cluster.submit(waiting("other", 2))
    cluster.look()
    cluster.submit(waiting("elastic", 4, least=2))
    assert {found.key: len(found.pods) for found in cluster.look().starts} == {"elastic": 2}
    cluster.end("other")
    assert not cluster.look().preemptions  # it has not run long enough
    assert cluster.look(900).preemptions == (Preemption("elastic", "elastic"),)
    assert {found.key: len(found.pods) for found in cluster.look().starts} == {"elastic": 4}
    assert not cluster.look(10_000).preemptions
    cluster.submit(waiting("urgent", 2, priority=50))
    assert cluster.look().preemptions == (Preemption("elastic", "urgent"),)
    assert {found.key: len(found.pods) for found in cluster.look().starts} == {"urgent": 2, "elastic": 2}


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=6)
def test_everybody_ends_and_nobody_holds_a_part(seed: int) -> None:
    rng, cluster = random.Random(seed), Cluster(3)
    left = {}
    for step in range(300):
        if step < 60 and rng.random() < 0.6:
            name, npus = f"j{step}", rng.choice([1, 2, 4, 8])
            pods = rng.randint(1, 3)
            cluster.submit(waiting(name, pods, npus, least=rng.choice([0, 1]), priority=rng.choice([0, 0, 0, 2, 9])), rng.random() < 0.8)
            left[name] = rng.randint(1, 30)
        cluster.look(30)
        for key, gang in list(cluster.running.items()):
            if not gang.leaving:
                left[key] -= 1
                if left[key] <= 0:
                    cluster.end(key)
                    del left[key]
        if step >= 60 and not left:
            break
    assert not left
