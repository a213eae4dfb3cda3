"""The operator dies at any point, writes fail, nodes and pods go: what is to be true stays true, and everything ends as it should."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.shared.errors import TransientError
from tests.operators.conftest import ASCEND, World

NODES, NPUS = ["a", "b", "c", "d"], 4


class _Death(BaseException):
    """The process is gone: nothing catches this."""


def check(lab: World) -> None:
    """No NPU has two holders, no node more than it has, no gang runs in part or twice."""
    held: dict[tuple[str, int], str] = {}
    gangs: dict[str, set[str]] = {}
    for body in lab.cluster.of("Pod"):
        metadata = body["metadata"]
        if body["status"]["phase"] in ("Succeeded", "Failed"):
            continue
        node = metadata["annotations"]["semantide.io/node"]
        # A pod that is asked to go may be forgotten early on a node that does not answer: only that is no double holding.
        for npu in metadata["annotations"]["semantide.io/npus"].split(","):
            other = held.setdefault((node, int(npu)), metadata["name"])
            assert other == metadata["name"], f"NPU {npu} of {node} is held by {other} and {metadata['name']}"
        if "deletionTimestamp" not in metadata:
            gangs.setdefault(metadata["labels"]["semantide.io/job"], set()).add(metadata["labels"]["semantide.io/attempt"])
    assert all(npu < NPUS for _, npu in held)
    assert all(len(attempts) == 1 for attempts in gangs.values()), gangs


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_everything_ends_right(seed: int) -> None:
    draw = random.Random(seed)
    lab = World(NODES, NPUS, unschedulable_seconds=5.0, node_grace_seconds=10.0)
    assert lab.nodes.resource == ASCEND
    sizes = {}
    for number in range(draw.randint(1, 8)):
        pods, npus = draw.choice([(1, 1), (1, 4), (2, 2), (2, 4), (3, 4), (4, 1)])
        elastic = {"elastic": {"min": 1, "max": pods}} if draw.random() < 0.3 else {}
        sizes[f"job{number}"] = pods
        lab.submit(f"job{number}", pods, npus, priority=draw.choice([0, 0, 5]), restartPolicy={"limit": 1000, "backoffSeconds": draw.choice([0, 3])}, **elastic)
    deadly = 0.02

    def die(verb: str, kind: str, name: str) -> None:
        if kind == "Lease":
            return
        if draw.random() < deadly:
            raise _Death
        if draw.random() < deadly:
            raise TransientError("the API server is away")

    lab.cluster.fails = die
    for _ in range(60):
        step(lab, draw)
    lab.cluster.fails = lambda verb, kind, name: None
    for name in NODES:
        lab.nodes.ready(name, True)
    for name in sizes:
        if lab.status(name).get("phase") == "Suspended" or lab.cluster.get("NPUJob", "lab", name)["spec"].get("suspend"):
            lab.change("NPUJob", name, suspend=False)
    lab.new_operator()
    for _ in range(400):
        lab.turn(1, 5.0)
        check(lab)
        for name in sizes:
            if lab.phase(name) == "Running":
                lab.end(name)
        if all(lab.phase(name) == "Succeeded" for name in sizes):
            break
    assert {name: lab.phase(name) for name in sizes} == dict.fromkeys(sizes, "Succeeded")
    assert not [body for body in lab.cluster.of("Pod") if body["status"]["phase"] not in ("Succeeded", "Failed")]


def step(lab: World, draw: random.Random) -> None:
    """One round, which may not live to its end, and one misfortune."""
    try:
        lab.operator.turn()
    except TransientError:
        pass
    except _Death:
        lab.new_operator()
    quiet(lab, lab.nodes.run)
    check(lab)
    lab.now += draw.choice([0.5, 2.0, 15.0])
    chance = draw.random()
    alive = [body for body in lab.cluster.of("Pod") if body["status"]["phase"] == "Running"]
    if chance < 0.1 and alive:
        quiet(lab, lambda: lab.nodes.end("lab", draw.choice(alive)["metadata"]["name"], draw.choice([1, 75, 137])))
    elif chance < 0.15 and alive:
        quiet(lab, lambda: lab.cluster.remove(draw.choice(alive)))
    elif chance < 0.22:
        quiet(lab, lambda: lab.nodes.ready(draw.choice(NODES), draw.random() < 0.6))
    elif chance < 0.27:
        name = draw.choice([body["metadata"]["name"] for body in lab.cluster.of("NPUJob")])
        quiet(lab, lambda: lab.change("NPUJob", name, suspend=draw.random() < 0.5))


def quiet(lab: World, work: Callable[[], Any]) -> None:
    """What is not the operator's own does not fail."""
    fails, lab.cluster.fails = lab.cluster.fails, lambda verb, kind, name: None
    try:
        work()
    finally:
        lab.cluster.fails = fails
