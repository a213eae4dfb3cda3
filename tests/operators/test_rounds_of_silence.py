"""A node is lost when it has been silent for its grace by the operator's own clock, whatever other clocks say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.pods import time_of

Worlds = Callable[..., Any]


@pytest.mark.parametrize("skew", [-86_400.0, -30.0, 0.0, 30.0, 86_400.0])
def test_the_nodes_clock_decides_nothing(world: Worlds, skew: float) -> None:
    lab = world(["a", "b"], node_grace_seconds=20)
    lab.submit("train", npus=8)
    lab.settle()
    (place,) = lab.status("train")["placement"]
    told = {"type": "Ready", "status": "Unknown", "lastTransitionTime": time_of(lab.now + skew)}
    lab.cluster.set_status("Node", "", place["node"], conditions=[told])
    lab.turn(1, 15.0)
    lab.turn(1, 4.0)
    assert lab.phase("train") == "Running"
    lab.turn(2, 4.0)
    assert lab.phase("train") == "Restarting" and place["node"] in lab.status("train")["message"]


def test_a_node_that_answered_in_between_has_its_whole_grace_again(world: Worlds) -> None:
    lab = world(["a", "b"], node_grace_seconds=20)
    lab.submit("train", npus=8)
    lab.settle()
    (place,) = lab.status("train")["placement"]
    for _ in range(3):
        lab.nodes.ready(place["node"], False)
        lab.turn(1, 15.0)
        lab.nodes.ready(place["node"], True)
        lab.turn(1, 1.0)
    lab.nodes.ready(place["node"], False)
    lab.turn(1, 15.0)
    lab.turn(1, 1.0)
    assert lab.phase("train") == "Running"


def test_a_new_operator_begins_to_count_anew(world: Worlds) -> None:
    lab = world(["a", "b"], node_grace_seconds=20)
    lab.submit("train", npus=8)
    lab.settle()
    (place,) = lab.status("train")["placement"]
    lab.nodes.ready(place["node"], False)
    lab.turn(1, 15.0)
    lab.new_operator()
    lab.turn(2, 9.0)
    assert lab.phase("train") == "Running"
    lab.turn(2, 9.0)
    assert lab.phase("train") == "Restarting"


@pytest.mark.parametrize("npus", [0, 8])
@pytest.mark.parametrize(("silent", "lost"), [(1, True), (5, True), (7, False), (10, False)])
def test_where_most_nodes_fall_silent_at_once_it_is_not_they(world: Worlds, npus: int, silent: int, lost: bool) -> None:
    lab = world([f"n{number}" for number in range(10)], npus, node_grace_seconds=20)
    lab.nodes._npus = 0
    lab.nodes.add("control-plane", **{"node-role.kubernetes.io/control-plane": ""})
    lab.nodes._npus = npus
    for number in range(10):
        lab.submit(f"job-{number}", npus=npus, template={"nodeSelector": {"disk": f"d{number}"}}, restartPolicy={"backoffSeconds": 1})
        node = lab.cluster.get("Node", "", f"n{number}")
        lab.cluster.replace({**node, "metadata": {**node["metadata"], "labels": {"disk": f"d{number}"}}})
    lab.settle()
    before = {body["metadata"]["uid"] for body in lab.cluster.of("Pod")}
    assert len(before) == 10
    for number in range(silent):
        lab.nodes.ready(f"n{number}", False)
    lab.turn(6, 10.0)
    assert (before != {body["metadata"]["uid"] for body in lab.cluster.of("Pod")}) == lost


@pytest.mark.parametrize("skew", [-86_400.0, -90.0, 0.0, 90.0, 86_400.0])
def test_no_other_clock_says_how_long_a_pod_has_been_as_it_is(world: Worlds, skew: float) -> None:
    lab = world(["a", "b"], unschedulable_seconds=30, stop_seconds=40)
    lab.cluster.clock = lambda: lab.now + skew  # the API server's, the scheduler's and the kubelets'
    lab.submit("refused", npus=8)
    lab.operator.turn()
    (pod,) = lab.pods("refused")
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full", "lastTransitionTime": time_of(lab.now + skew)}
    lab.cluster.set_status("Pod", "lab", pod["metadata"]["name"], conditions=[told])
    lab.now += 29
    lab.operator.turn()
    assert lab.phase("refused") == "Placing"
    lab.now += 2
    lab.operator.turn()
    assert lab.phase("refused") == "Restarting"
    lab.change("NPUJob", "refused", suspend=True)
    lab.submit("stuck", npus=8)
    lab.settle()
    (pod,) = lab.pods("stuck")
    lab.change("NPUJob", "stuck", suspend=True)
    lab.operator.turn()
    for seconds, there in ((99, True), (2, False)):  # its own 40 seconds, and a minute
        lab.now += seconds
        lab.operator.turn()
        assert bool(lab.pods("stuck")) == there


@pytest.mark.parametrize("skew", [-86_400.0, 0.0, 86_400.0])
def test_no_other_clock_says_how_long_another_scheduler_may_take(world: Worlds, skew: float) -> None:
    lab = world(["a", "b"], placing_seconds=100)
    lab.cluster.clock = lambda: lab.now + skew
    lab.submit("theirs", pods=2, npus=4, scheduler="volcano")
    lab.operator.turn()
    lab.now += 500
    first, second = lab.pods("theirs")
    for body in (first, second):
        told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": time_of(lab.now + skew)}
        lab.cluster.set_status("Pod", "lab", body["metadata"]["name"], conditions=[told])
    lab.operator.turn()
    assert lab.phase("theirs") == "Placing", "in that one's line it holds nothing"
    lab.cluster.bind("lab", first["metadata"]["name"], "a")
    for seconds, phase in ((99, "Placing"), (2, "Restarting")):
        lab.now += seconds
        lab.operator.turn()
        assert lab.phase("theirs") == phase
