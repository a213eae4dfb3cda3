"""Whole lives of services: replicas that are placed, replaced, moved, scaled and lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.balancing import ReplicaLoad
from semantide.operators.pods import time_of
from semantide.shared.errors import PermanentError

Worlds = Callable[..., Any]


def ready(lab: Any, name: str = "shop") -> int:
    """Replicas that answer at this moment."""
    return sum(
        "deletionTimestamp" not in body["metadata"]
        and any(entry["type"] == "Ready" and entry["status"] == "True" for entry in body["status"].get("conditions") or ())
        for body in lab.pods(name, "service")
    )


def test_replicas_are_spread_and_have_a_name(world: Worlds) -> None:
    lab = world(["a", "b", "c"])
    lab.serve("shop", low=3, high=3)
    lab.settle()
    status = lab.status("shop", "NPUService")
    assert status["phase"] == "Running" and status["readyReplicas"] == 3
    assert sorted(place["node"] for place in status["placement"]) == ["a", "b", "c"]
    (front,) = lab.cluster.of("Service")
    selector = ",".join(f"{key}={value}" for key, value in front["spec"]["selector"].items())
    assert selector == status["selector"] and front["metadata"]["name"] == "shop"
    assert len(lab.cluster.list("Pod", "lab", selector).items) == 3
    assert {entry["type"]: entry["status"] for entry in status["conditions"]} == {
        "Available": "True",
        "Complete": "True",
        "Suspended": "False",
        "Refused": "False",
    }


def test_surge_never_has_fewer_replicas_than_asked(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.serve("shop", low=2, high=2, npus=4)
    lab.settle()
    before = {body["metadata"]["uid"] for body in lab.pods("shop", "service")}
    lab.change("NPUService", "shop", model="models/next")
    for _ in range(30):
        lab.turn(1, 1.0)
        assert ready(lab) >= 2
    status = lab.status("shop", "NPUService")
    assert status["phase"] == "Running" and status["updatedReplicas"] == 2
    assert not before & {body["metadata"]["uid"] for body in lab.pods("shop", "service")}


def test_surge_keeps_old_replicas_that_are_not_ready_for_a_moment(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.serve("shop", low=3, high=3, npus=4)
    lab.settle()
    before = {body["metadata"]["name"] for body in lab.pods("shop", "service")}
    lab.change("NPUService", "shop", model="models/next")

    def all_ready(answer: bool) -> None:
        told = {"type": "Ready", "status": str(answer), "lastTransitionTime": time_of(lab.now)}
        for body in lab.pods("shop", "service"):
            lab.cluster.set_status("Pod", "lab", body["metadata"]["name"], conditions=[told])

    def alive() -> set[str]:
        return {body["metadata"]["name"] for body in lab.pods("shop", "service") if "deletionTimestamp" not in body["metadata"]}

    all_ready(False)
    lab.operator.turn()
    lab.operator.turn()
    assert before < alive() and len(alive()) == 4, "one of the new revision beside all old ones"
    lab.nodes.run()
    lab.nodes.run()
    lab.operator.turn()
    assert len(before & alive()) == 2, "one new replica is ready: one old one goes"
    all_ready(False)
    lab.now += 290
    lab.operator.turn()
    assert len(before & alive()) == 2
    lab.now += 20
    lab.operator.turn()
    assert not before & alive(), "they have not answered for long"
    lab.settle()
    assert ready(lab) == 2, "the one of the new revision that was told to be unready stays"


def test_in_place_needs_no_spare_room_and_surge_says_that_it_does(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", low=2, high=2, npus=4)
    lab.settle()
    lab.change("NPUService", "shop", model="models/next")
    lab.settle()
    status = lab.status("shop", "NPUService")
    assert status["updatedReplicas"] == 0 and ready(lab) == 2
    assert "InPlace" in status["message"] and status["phase"] == "Rolling"
    lab.change("NPUService", "shop", rollout={"strategy": "InPlace", "maxUnavailable": 1})
    fewest = 2
    for _ in range(30):
        lab.turn(1, 1.0)
        fewest = min(fewest, ready(lab))
    assert lab.status("shop", "NPUService")["updatedReplicas"] == 2 and fewest == 1


@pytest.mark.parametrize(("strategy", "left"), [("Surge", 2), ("InPlace", 1)])
def test_a_revision_that_never_gets_ready_replaces_nothing_more(world: Worlds, strategy: str, left: int) -> None:
    lab = world(["a", "b"])
    lab.serve("shop", low=2, high=2, npus=2, rollout={"strategy": strategy, "maxUnavailable": 1})
    lab.settle()
    good = {body["metadata"]["name"] for body in lab.pods("shop", "service")}
    running = lab.nodes.run

    def broken() -> None:
        running()
        for body in lab.pods("shop", "service"):
            if body["metadata"]["name"] not in good and body["status"]["phase"] == "Running":
                lab.cluster.set_status("Pod", "lab", body["metadata"]["name"], conditions=[{"type": "Ready", "status": "False"}])

    lab.nodes.run = broken
    lab.change("NPUService", "shop", model="models/broken")
    lab.turn(30, 1.0)
    assert ready(lab) == left
    lab.change("NPUService", "shop", model="")
    lab.turn(30, 1.0)
    assert ready(lab) >= left


def test_lost_replicas_come_again_elsewhere(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.serve("shop", low=2, high=2)
    lab.settle()
    lab.nodes.ready("a", False)
    lab.turn(10, 30.0)
    status = lab.status("shop", "NPUService")
    assert status["readyReplicas"] == 2 and {place["node"] for place in status["placement"]} == {"b"}
    for body in lab.pods("shop", "service"):
        lab.cluster.remove(body)
    lab.settle()
    assert lab.status("shop", "NPUService")["readyReplicas"] == 2


def test_a_replica_that_the_scheduler_refuses_is_placed_elsewhere(world: Worlds) -> None:
    lab = world(["a", "b"], unschedulable_seconds=30.0, avoid_seconds=300.0)
    lab.serve("shop", npus=4)
    lab.operator.turn()
    (first,) = lab.pods("shop", "service")
    full = first["metadata"]["annotations"]["semantide.io/node"]
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": f"{full} is full", "lastTransitionTime": time_of(lab.now)}
    lab.cluster.set_status("Pod", "lab", first["metadata"]["name"], conditions=[told])
    lab.now += 29
    lab.operator.turn()
    assert [body["metadata"]["uid"] for body in lab.pods("shop", "service")] == [first["metadata"]["uid"]]
    lab.now += 2
    lab.settle()
    status = lab.status("shop", "NPUService")
    (place,) = status["placement"]
    assert status["phase"] == "Running" and place["node"] == ({"a", "b"} - {full}).pop() and place["pod"] != first["metadata"]["name"]
    lab.change("NPUService", "shop", replicas={"min": 2, "max": 2})
    lab.settle()
    nodes = [place["node"] for place in lab.status("shop", "NPUService")["placement"]]
    assert len(nodes) == 2 and lab.status("shop", "NPUService")["avoid"][0]["node"] == full
    lab.now += 300
    lab.turn(2, 1.0)
    assert not lab.status("shop", "NPUService").get("avoid")


def test_suspend_and_scale_down(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", low=3, high=3)
    lab.settle()
    lab.change("NPUService", "shop", replicas={"min": 1, "max": 1})
    lab.settle()
    assert ready(lab) == 1
    lab.change("NPUService", "shop", suspend=True)
    lab.settle()
    assert lab.phase("shop", "NPUService") == "Suspended" and not lab.pods("shop", "service")
    lab.change("NPUService", "shop", suspend=False)
    lab.settle()
    assert lab.phase("shop", "NPUService") == "Running" and ready(lab) == 1


def test_measured_load_drives_replicas_and_moves_one_that_lags(world: Worlds) -> None:
    lab = world(["a", "b", "c"])
    lab.serve("shop", low=2, high=4, target={"queueDepth": 4})
    lab.settle()

    def say(depths: list[float]) -> None:
        names = sorted(body["metadata"]["name"] for body in lab.pods("shop", "service"))
        lab.operator.measured({"lab/shop": tuple(ReplicaLoad(name, depth) for name, depth in zip(names, depths, strict=False))})

    say([20.0, 20.0])
    lab.turn(10, 1.0)
    assert lab.status("shop", "NPUService")["replicas"] == 4
    for _ in range(20):
        say([0.0] * len(lab.pods("shop", "service")))
        lab.turn(1, 400.0)
    assert 2 <= lab.status("shop", "NPUService")["replicas"] < 4


@pytest.mark.parametrize("old", ["leads anew", "is not told any more"])
def test_what_was_measured_long_ago_drives_nothing(world: Worlds, old: str) -> None:
    lab = world(["a", "b", "c"])
    lab.serve("shop", low=2, high=4, target={"queueDepth": 4})
    lab.settle()
    lab.operator.measured({"lab/shop": tuple(ReplicaLoad(body["metadata"]["name"], 20.0) for body in lab.pods("shop", "service"))})
    if old == "leads anew":
        lab.operator.forget()
    else:
        lab.now += 3 * lab.settings.load_seconds + 1
    lab.turn(10, 60.0)
    assert lab.status("shop", "NPUService")["replicas"] == 2


def test_services_take_free_npus_before_jobs_do(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", npus=8)
    lab.serve("shop", npus=8)
    lab.settle()
    assert lab.phase("shop", "NPUService") == "Running" and lab.phase("train") == "Pending"


def test_without_a_most_the_least_is_the_number_and_may_be_none(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", replicas={"min": 2})
    for wanted in (2, 0, 3):
        lab.change("NPUService", "shop", replicas={"min": wanted})
        lab.turn(20, 10.0)
        assert ready(lab) == wanted and lab.phase("shop", "NPUService") == "Running"


def test_a_service_that_may_shrink_to_nothing_keeps_one_whose_load_is_measured(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", low=0, high=4)
    lab.settle()
    assert ready(lab) == 1


def test_replicas_take_the_room_of_jobs_of_lower_priority_after_a_checkpoint(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", npus=4, priority=1)
    lab.submit("firm", npus=2, restartPolicy={"limit": 0})
    lab.submit("spare", npus=2)
    lab.settle()
    lab.serve("shop", npus=4, priority=2)
    lab.operator.turn()
    status = lab.status("shop", "NPUService")
    assert "lab/train saves its state and makes room" in status["message"] and status["phase"] == "Pending"
    assert "made room for NPUService lab/shop" in lab.status("train")["message"] and lab.phase("firm") == lab.phase("spare") == "Running"
    lab.submit("sly", npus=4, priority=9)
    for _ in range(6):
        lab.turn(1, 1.0)
        assert not lab.pods("sly"), "the room is the service's"
    assert lab.phase("shop", "NPUService") == "Running" and lab.phase("train") == "Pending"
    lab.change("NPUService", "shop", suspend=True)
    lab.turn(8, 20.0)
    assert lab.phase("sly") == "Running"


def test_replicas_without_a_priority_take_nothing_and_hold_nobody_up(world: Worlds) -> None:
    lab = world(["a"], patience_seconds=60)
    lab.submit("train", npus=6)
    lab.settle()
    lab.serve("shop", npus=4)
    lab.turn(3, 1.0)
    lab.submit("small", npus=2)
    lab.turn(4, 1.0)
    assert lab.phase("train") == lab.phase("small") == "Running" and lab.phase("shop", "NPUService") == "Pending"
    lab.end("train")
    lab.turn(6, 1.0)
    assert lab.phase("shop", "NPUService") == "Running"


def test_a_service_takes_no_more_than_its_next_replica_needs(world: Worlds) -> None:
    lab = world(["a", "b"])
    for name in ("one", "two", "three", "four"):
        lab.submit(name, npus=4)
    lab.settle()
    lab.serve("shop", npus=4, priority=1, low=2, high=2)
    lab.operator.turn()
    assert sum("made room" in lab.status(name)["message"] for name in ("one", "two", "three", "four")) == 1
    lab.turn(12, 1.0)
    assert lab.status("shop", "NPUService")["readyReplicas"] == 2
    assert sorted(lab.phase(name) for name in ("one", "two", "three", "four")) == ["Pending", "Pending", "Running", "Running"]


def _say(lab: Any, *depths: float) -> None:
    names = sorted(body["metadata"]["name"] for body in lab.pods("shop", "service"))
    lab.operator.measured({"lab/shop": tuple(ReplicaLoad(name, depth) for name, depth in zip(names, depths, strict=False))})


def test_a_move_without_room_is_given_up_and_the_service_grows_when_it_must(world: Worlds) -> None:
    lab = world(["a", "b"], npus=1)
    lab.serve("shop", low=2, high=4, target={"queueDepth": 20})
    lab.settle()
    lab.now += 400
    _say(lab, 25.0, 0.0)
    lab.operator.turn()
    status = lab.status("shop", "NPUService")
    assert any("lags behind" in body["message"] for body in lab.cluster.of("Event")) and "moving" not in status
    lab.turn(3, 10.0)
    assert lab.phase("shop", "NPUService") == "Running" and ready(lab) == 2
    for name in "cd":
        lab.nodes.add(name)
    _say(lab, 60.0, 60.0)
    lab.turn(8, 10.0)
    assert lab.status("shop", "NPUService")["readyReplicas"] == 4


def test_a_rollout_that_takes_long_may_grow_and_does_nothing_else(world: Worlds) -> None:
    lab = world(["a", "b", "c"])
    lab.serve("shop", low=2, high=4, npus=4, target={"queueDepth": 4})
    lab.settle()
    lab.change("NPUService", "shop", model="models/next")
    running, lab.nodes.run = lab.nodes.run, lambda: None
    lab.turn(2, 1.0)
    assert lab.phase("shop", "NPUService") == "Rolling"
    lab.now += 400
    _say(lab, 0.0, 0.0)
    lab.turn(3, 400.0)
    assert lab.status("shop", "NPUService")["wish"] == 2
    _say(lab, 20.0, 20.0)
    lab.operator.turn()
    assert lab.status("shop", "NPUService")["wish"] == 4
    lab.nodes.run = running
    lab.settle()
    assert lab.status("shop", "NPUService")["updatedReplicas"] == 4 == ready(lab)


def test_places_of_replicas_that_a_quota_forbids_are_free_when_nobody_asks_for_them(world: Worlds) -> None:
    lab = world(["a", "b"])

    def quota(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "Pod") and name.startswith("shop") and len(lab.pods("shop", "service")) >= 2:
            raise PermanentError("exceeded quota: pods=2")

    lab.cluster.fails = quota
    lab.serve("shop", low=4, high=4, npus=4)
    lab.turn(6, 1.0)
    assert ready(lab) == 2 and len(lab.status("shop", "NPUService")["placement"]) == 4
    lab.submit("train", pods=2, npus=4)
    lab.turn(3, 1.0)
    assert lab.phase("train") == "Pending", "their places are kept"
    lab.change("NPUService", "shop", replicas={"min": 3, "max": 3})
    lab.turn(3, 1.0)
    assert len(lab.status("shop", "NPUService")["placement"]) == 3
    lab.change("NPUService", "shop", replicas={"min": 2, "max": 2})
    lab.turn(6, 1.0)
    assert lab.phase("train") == "Running" and lab.phase("shop", "NPUService") == "Running" and ready(lab) == 2


@pytest.mark.parametrize("order", [("a-late", "z-early"), ("z-early", "a-late")])
@pytest.mark.parametrize(("priorities", "first"), [({"a-late": 0, "z-early": 5}, "z-early"), ({"a-late": 0, "z-early": 0}, "a-late")])
def test_the_last_npu_is_the_more_important_services_whoever_was_heard_of_first(
    world: Worlds, order: tuple[str, str], priorities: dict[str, int], first: str
) -> None:
    lab = world(["a"], npus=1)
    for name in order:
        lab.serve(name, priority=priorities[name])
    lab.settle()
    assert {name: len(lab.pods(name, "service")) for name in order} == {name: int(name == first) for name in order}


def test_a_place_that_was_given_away_is_nobody_elses_although_its_replica_is_not_there_yet(world: Worlds) -> None:
    lab = world(["a"], npus=1)

    def forbids(verb: str, kind: str, name: str) -> None:
        if verb == "create" and kind == "Pod" and name.startswith("first"):
            raise PermanentError("pods is forbidden: exceeded quota")

    lab.cluster.fails = forbids
    lab.serve("first")
    lab.turn(3, 1.0)
    assert lab.status("first", "NPUService")["placement"]
    lab.serve("second", priority=9)
    lab.turn(1)
    assert not lab.pods("second", "service") and not lab.status("second", "NPUService").get("placement"), "two would have one NPU"
