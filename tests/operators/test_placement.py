"""Where gangs go."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.operators.affinity import Expression
from semantide.operators.fleet import Fleet
from semantide.operators.node import Node
from semantide.operators.placement import Placement, place
from semantide.operators.refusal import Refusal
from semantide.operators.request import Request, Shape, shape_of
from semantide.operators.rings import pods_that_fit, ring_masks

ASCEND = "huawei.com/Ascend910"


SEEDS = st.integers(0, 1 << 32)


def cluster(rng: random.Random, slow: bool = True) -> list[Node]:
    return [
        Node(
            name=f"n{at}",
            capacity=8,
            ring_size=rng.choice([4, 4, 0]),
            resource_name=ASCEND,
            healthy=~(1 << rng.randrange(30)),
            held={npu: "x/other" for npu in range(8) if rng.random() < busy},
            super_pod=rng.choice(["", "a", "b"]),
            rack=rng.choice(["", "1"]),
            slow=rng.choice([1.0, 1.0, 1.05, 1.5]) if slow else 1.0,
            unusable=rng.choice(["", "", "", "cordoned"]),
            free_millicores=rng.choice([1000.0, 8000.0]),
            free_pods=rng.choice([1, 2, 110]),
        )
        for at in range(rng.randrange(8))
        for busy in [rng.choice([0.0, 0.2, 0.6])]
    ]


def gang(rng: random.Random, spread: bool | None = None) -> Request:
    pods = rng.randint(1, 6)
    shape = Shape(npus=rng.choice([0, 1, 2, 3, 4, 8, 8]), resource_name=ASCEND, aligned=rng.random() < 0.7, millicores=rng.choice([0.0, 600.0]))
    return Request(
        "x/job",
        tuple(f"job-{rank}" for rank in range(pods)),
        shape,
        least=rng.randint(1, pods),
        spread=rng.random() < 0.4 if spread is None else spread,
        beside={name: rng.randint(1, 3) for name in ("n0", "n1", "n99") if rng.random() < 0.3},
        avoid=frozenset(name for name in ("n0", "n2") if rng.random() < 0.2),
    )


def able(request: Request, node: Node) -> int:
    """Pods that fit on one node."""
    shape, most = request.shape, min(float(node.free_pods), node.free_millicores // request.shape.millicores if request.shape.millicores else 99)
    if node.unusable:
        return 0
    if shape.npus:
        most = min(most, pods_that_fit(node.free, node.capacity, node.ring_size if shape.aligned else 0, shape.npus))
    return int(most)


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_all_pods_have_what_they_asked_for_or_none_has_anything(seed: int) -> None:
    rng = random.Random(seed)
    nodes, request = cluster(rng), gang(rng)
    found = place(request, nodes)
    by_name, total = {node.name: node for node in nodes}, sum(able(request, node) for node in nodes)
    if isinstance(found, Refusal):
        assert total < request.fewest and "asks for" in found.reason
        return
    assert request.fewest <= len(found.pods) <= min(total, len(request.pods))
    assert [pod.pod for pod in found.pods] == list(request.pods[: len(found.pods)])
    taken = Counter((pod.node, npu) for pod in found.pods for npu in pod.npus)
    assert not taken or max(taken.values()) == 1
    for name, pods in Counter(pod.node for pod in found.pods).items():
        assert pods <= able(request, by_name[name])
    for pod in found.pods:
        node = by_name[pod.node]
        assert len(pod.npus) == request.shape.npus and all(node.free >> npu & 1 for npu in pod.npus)
        if request.shape.aligned and 0 < request.shape.npus <= node.ring:
            assert len({npu // node.ring for npu in pod.npus}) == 1
    if all(node.slow < 1.1 for node in nodes) and not request.avoid:
        assert len(found.pods) == min(total, len(request.pods))


@given(SEEDS)
@settings(deadline=None)
def test_the_order_of_nodes_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    nodes, request = cluster(rng), gang(rng)
    shuffled = rng.sample(nodes, len(nodes))
    before = Fleet(nodes)
    free = before.free[:]
    assert place(request, before) == place(request, shuffled)
    assert before.free == free  # nothing was taken


@given(SEEDS)
@settings(deadline=None)
def test_a_job_stays_as_close_together_as_it_can(seed: int) -> None:
    rng = random.Random(seed)
    level, request = cluster(rng, slow=False), replace(gang(rng, spread=False), avoid=frozenset())
    found = place(request, level)
    if isinstance(found, Refusal):
        return
    room = {node.name: able(request, node) for node in level}
    used, count = {pod.node for pod in found.pods}, len(found.pods)
    if max(room.values()) >= count:
        assert len(used) == 1
    pods: dict[str, int] = Counter()
    for node in level:
        pods[node.super_pod] += room[node.name]
    least = next(size for size in range(1, 4) if any(sum(pods[name] for name in some) >= count for some in combinations(pods, size)))
    where = {node.name: node.super_pod for node in level}
    assert len({where[name] for name in used}) == least
    order = [where[pod.node] for pod in found.pods]
    assert order == sorted(order)  # ranks follow the topology


@given(st.integers(1, 6), st.integers(1, 12), st.dictionaries(st.integers(0, 5), st.integers(1, 4)))
def test_a_service_is_spread(count: int, pods: int, beside: dict[int, int]) -> None:
    nodes = [Node(f"n{at}", capacity=8, ring_size=4, resource_name=ASCEND, rack=str(at % 2)) for at in range(count)]
    there = {f"n{at}": number for at, number in beside.items() if at < count}
    found = place(Request("s", tuple(map(str, range(pods))), Shape(npus=1, resource_name=ASCEND), least=1, spread=True, beside=there), nodes)
    assert isinstance(found, Placement)
    after = Counter(there) + Counter(pod.node for pod in found.pods)
    new = {pod.node for pod in found.pods}
    assert all(after[name] <= min(after[node.name] for node in nodes) + 1 for name in new)


def node(name: str, free: tuple[int, ...] = tuple(range(8)), **fields: object) -> Node:
    return Node(**{"name": name, "capacity": 8, "ring_size": 4, "resource_name": ASCEND, "held": {npu: "x/o" for npu in range(8) if npu not in free}, **fields})  # type: ignore[arg-type]


def job(pods: int, npus: int, least: int = 0, **fields: object) -> Request:
    return Request("x/job", tuple(f"p{rank}" for rank in range(pods)), Shape(npus=npus, resource_name=ASCEND), least, **fields)  # type: ignore[arg-type]


def nodes_of(found: Placement | Refusal) -> list[str]:
    assert isinstance(found, Placement), found
    return [pod.node for pod in found.pods]


def test_the_smallest_gap_is_filled() -> None:
    nodes = [node("whole"), node("half", (0, 1, 2, 3)), node("pairs", (0, 1, 4, 5)), node("three", (5, 6, 7))]
    assert nodes_of(place(job(1, 4), nodes)) == ["half"]
    assert nodes_of(place(job(1, 3), nodes)) == ["three"]
    assert nodes_of(place(job(1, 2), nodes)) in (["pairs"], ["three"])
    assert nodes_of(place(job(1, 8), nodes)) == ["whole"]
    assert nodes_of(place(job(3, 4), nodes)) == ["half", "whole", "whole"]


def test_slow_nodes_come_last() -> None:
    nodes = [node("a", slow=1.5), node("b"), node("c", slow=1.2)]
    assert nodes_of(place(job(1, 8), nodes)) == ["b"]
    assert nodes_of(place(job(2, 8), nodes)) == ["b", "c"]
    assert nodes_of(place(job(3, 8), nodes)) == ["a", "b", "c"]
    assert nodes_of(place(job(3, 8, least=1), nodes)) == ["a", "b", "c"]  # three at two thirds of the speed are as much as two at 1 / 1.2
    assert nodes_of(place(job(3, 8, least=1), [node("a", slow=4.0), node("b"), node("c")])) == ["b", "c"]
    assert nodes_of(place(job(1, 8, avoid=frozenset({"a"})), [node("a"), node("b")])) == ["b"]


def test_whole_super_pods_are_left_to_larger_gangs() -> None:
    nodes = [node(f"a{at}", super_pod="a") for at in range(4)] + [node(f"b{at}", super_pod="b") for at in range(2)]
    assert {name[0] for name in nodes_of(place(job(2, 8), nodes))} == {"b"}
    assert {name[0] for name in nodes_of(place(job(3, 8), nodes))} == {"a"}
    assert Counter(name[0] for name in nodes_of(place(job(5, 8), nodes))) == {"a": 4, "b": 1}


def test_processors_and_memory_count_too() -> None:
    cpu = shape_of("cpu", "", 0, {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}})
    nodes = [Node("a", free_millicores=5000, millicores=8000), Node("b", free_millicores=9000, millicores=9000), node("npus", free_millicores=64000)]
    assert nodes_of(place(Request("x/j", ("p0", "p1"), cpu), nodes)) == ["a", "a"]  # the fuller one; the node with NPUs stays free for them
    assert Counter(nodes_of(place(Request("x/j", tuple(map(str, range(6))), cpu), nodes[:2]))) == {"a": 2, "b": 4}
    refused = place(Request("x/j", ("p0",), shape_of("cpu", "", 0, {"resources": {"requests": {"cpu": "16"}}})), nodes[:2])
    assert "16 processors" in str(refused) and "too small (8 processors)" in str(refused)


def test_pods_that_ask_for_nothing_do_not_pile_up() -> None:
    nodes = [
        Node(name=name, millicores=16000.0, free_millicores=free, free_pods=pods)
        for name, free, pods in (("a", 4000.0, 100), ("b", 16000.0, 100), ("c", 9000.0, 90))
    ]
    fleet, where = Fleet(nodes), []
    for number in range(20):
        placed = place(Request(f"x/{number}", (f"job-{number}",), Shape()), fleet)
        assert isinstance(placed, Placement)
        fleet.occupy(placed.pods, Shape())
        where.append(placed.pods[0].node)
    assert where[0] == "b" and Counter(where) == {"a": 10, "b": 10}, "where the fewest are, and of those where most is free"
    asking = place(Request("x/asks", ("asks-0",), Shape(millicores=1000.0)), fleet)
    assert isinstance(asking, Placement) and asking.pods[0].node == "a", "what is known is still packed"


def test_a_refusal_says_why() -> None:
    labels = {"accelerator-type": "module-910b-8"}
    nodes = [
        node("a", (0, 1, 4, 5), labels=labels),
        node("b", (6, 7), labels=labels),
        node("c", labels=labels, unusable="cordoned"),
        node("d", (), healthy=0x7F, labels=labels),
    ]
    cases = [
        (
            job(2, 8),
            [
                "asks for 16 huawei.com/Ascend910 (2 pods of 8)",
                "6 are free on 2 nodes, at most 2 of them in one ring",
                "0 such pods fit now",
                "of the 4 nodes 1 is cordoned",
            ],
        ),
        (job(1, 16), ["asks for 16", "no node has more than 8, so ask for at most 8 a pod and for more pods"]),
        (job(3, 8), ["even when nothing else runs only 2 such pods fit on the 3 nodes", "1 NPU there is unhealthy"]),
        (job(6, 4, least=5), ["at least 20 huawei.com/Ascend910 (5 to 6 pods of 4)"]),
    ]
    for request, said in cases:
        refused = place(request, nodes)
        assert isinstance(refused, Refusal) and all(words in refused.reason for words in said), refused
    missing = place(Request("x/j", ("p",), Shape(npus=1, resource_name=ASCEND, terms=((Expression("accelerator-type", "In", ("module-a3-16",)),),))), nodes)
    assert "no node has the label accelerator-type=module-a3-16 (there is module-910b-8 on 4)" in str(missing)
    assert "no node offers nvidia.com/gpu (there is huawei.com/Ascend910)" in str(place(Request("x/j", ("p",), shape_of("nvidia", "", 1, {})), nodes))
    assert "the cluster has no node" in str(place(job(1, 1), []))
    assert "is the device plugin running?" in str(place(job(1, 1), [Node("bare")]))


def test_masks_of_rings_cover_the_node() -> None:
    assert ring_masks(8, 4) == [0x0F, 0xF0] and ring_masks(8, 0) == [0xFF] and ring_masks(6, 4) == [0x0F, 0x30]
