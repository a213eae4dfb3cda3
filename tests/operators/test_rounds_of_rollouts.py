"""A rollout ends, however little room there is beside the old replicas, and never more replicas are missing than the service allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.errors import PermanentError
from tests.operators.conftest import World

Worlds = Callable[..., Any]
_ROUND_SECONDS = 10.0


def ready(lab: Any) -> int:
    """Replicas that answer at this moment."""
    return sum(
        "deletionTimestamp" not in body["metadata"]
        and any(entry["type"] == "Ready" and entry["status"] == "True" for entry in body["status"].get("conditions") or ())
        for body in lab.pods("shop", "service")
    )


def revisions(lab: Any) -> set[str]:
    """The revisions of the replicas that are there."""
    return {body["metadata"]["labels"]["semantide.io/revision"] for body in lab.pods("shop", "service")}


def roll(lab: Any, rounds: int = 40, **change: Any) -> int:
    """Let a change come through; the fewest replicas that answered meanwhile."""
    lab.change("NPUService", "shop", **change)
    fewest = ready(lab)
    for _ in range(rounds):
        lab.turn(1, _ROUND_SECONDS)
        fewest = min(fewest, ready(lab))
    return fewest


@settings(max_examples=15, deadline=None)
@given(
    nodes=st.integers(1, 3),
    capacity=st.integers(1, 4),
    size=st.integers(1, 2),
    replicas=st.integers(1, 5),
    busy=st.integers(0, 3),
    strategy=st.sampled_from(["Surge", "InPlace"]),
    missing=st.integers(1, 2),
)
def test_every_rollout_ends(nodes: int, capacity: int, size: int, replicas: int, busy: int, strategy: str, missing: int) -> None:
    lab = World([f"n{number}" for number in range(nodes)], capacity)
    for number in range(busy):
        lab.submit(f"job-{number}", restartPolicy={"limit": 0})
    lab.settle()
    lab.serve("shop", replicas, replicas, size, rollout={"strategy": strategy, "maxUnavailable": missing})
    lab.settle()
    before, old = ready(lab), revisions(lab)
    fewest = before
    lab.change("NPUService", "shop", model="models/next")
    for _ in range(40 + 14 * replicas):
        lab.turn(1, _ROUND_SECONDS)
        fewest = min(fewest, ready(lab))
        if ready(lab) == before and not revisions(lab) & old:
            break
    assert ready(lab) == before and (not before or fewest >= before - missing)
    assert not revisions(lab) & old, lab.status("shop", "NPUService")["message"]


def test_surge_goes_on_in_place_where_no_room_comes(world: Worlds) -> None:
    lab = world(["a"], surge_seconds=120)
    lab.serve("shop", 2, 2, npus=4)
    lab.settle()
    assert roll(lab, 11, model="models/next") == 2, "it waits for room beside the old ones"
    assert "120 seconds" in lab.status("shop", "NPUService")["message"]
    assert roll(lab, 20) == 1
    status = lab.status("shop", "NPUService")
    assert status["updatedReplicas"] == 2 and status["phase"] == "Running" and "crampedTime" not in status
    assert any(event["reason"] == "InPlace" for event in lab.cluster.of("Event"))


def test_surge_that_may_lack_none_waits_and_says_what_would_help(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", 2, 2, npus=4, rollout={"maxUnavailable": 0})
    lab.settle()
    assert roll(lab, model="models/next") == 2
    assert "rollout.maxUnavailable 1" in lab.status("shop", "NPUService")["message"]
    lab.nodes.add("b")
    assert roll(lab, 20) == 2 and lab.status("shop", "NPUService")["updatedReplicas"] == 2


def test_several_old_replicas_make_way_for_a_larger_one_where_they_may(world: Worlds) -> None:
    lab = world(["a"])
    lab.serve("shop", 4, 4, npus=2, rollout={"maxUnavailable": 2})
    lab.settle()
    old = revisions(lab)
    roll(lab, npusPerReplica=4)
    assert ready(lab) == 2 and not revisions(lab) & old
    lab.change("NPUService", "shop", npusPerReplica=2, rollout={"maxUnavailable": 1})
    lab.turn(60, _ROUND_SECONDS)
    assert ready(lab) == 4
    roll(lab, npusPerReplica=4)
    assert ready(lab) == 4, "the room of one is not enough, so it is not given up"


@pytest.mark.parametrize("broken", [False, True])
def test_a_quota_for_the_old_replicas_alone_is_no_wall(world: Worlds, broken: bool) -> None:
    lab = world(["a", "b"])
    lab.serve("shop", 3, 3, npus=2)
    lab.settle()
    old = revisions(lab)

    def quota(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "Pod") and (broken or len(lab.pods("shop", "service")) >= 3):
            raise PermanentError(f"pods {name!r} is forbidden: exceeded quota: npus, requested: 2, used: 6, limited: 6")

    lab.cluster.fails = quota
    assert roll(lab, model="models/next") == 2
    assert (ready(lab), revisions(lab) & old) == ((2, old) if broken else (3, set()))


def test_jobs_that_make_room_go_before_old_replicas_do(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", npus=2)
    lab.serve("shop", 3, 3, npus=2, priority=1)
    lab.settle()
    assert roll(lab, model="models/next") == 3 and lab.status("shop", "NPUService")["updatedReplicas"] == 3
