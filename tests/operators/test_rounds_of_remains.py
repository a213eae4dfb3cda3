"""What is left of earlier gangs: it is taken away, and nothing new begins beside pods that still work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semantide.shared.errors import PermanentError, TransientError

Worlds = Callable[..., Any]
BESIDE = {"ConfigMap", "Service", "PodGroup", "ResourceClaimTemplate"}


def beside(lab: Any) -> set[tuple[str, str]]:
    return {(kind, name) for kind, _, name in lab.cluster.objects if kind in BESIDE}


@pytest.mark.parametrize(("settings", "spec"), [({}, {}), ({"rendezvous": "dns"}, {}), ({}, {"scheduler": "volcano"})])
def test_only_the_present_gangs_objects_stand_beside_it(world: Worlds, settings: dict[str, Any], spec: dict[str, Any]) -> None:
    lab = world(["a", "b"], **settings)
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 9, "backoffSeconds": 0}, **spec)
    lab.settle()
    first = beside(lab)
    assert first
    for _ in range(3):
        lab.end("train", rank=0, status=1)
        lab.turn(8, 2.0)
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 4, lab.status("train")
    last = beside(lab)
    assert len(last) == len(first) and not first & last
    assert lab.status("train")["cleared"] == 3


def test_an_operator_that_dies_while_it_clears_leaves_nothing(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 9, "backoffSeconds": 0})
    lab.settle()

    def broken(verb: str, kind: str, name: str) -> None:
        if verb == "delete" and kind == "ConfigMap":
            raise TransientError("the API server is away")

    lab.cluster.fails = broken
    lab.end("train", rank=0, status=1)
    lab.turn(8, 2.0)
    assert len(beside(lab)) == 1 and lab.status("train").get("cleared", 0) == 0
    lab.cluster.fails = lambda *_: None
    lab.new_operator()
    lab.turn(8, 2.0)
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
    assert [name.rsplit("-", 1)[1] for _, name in beside(lab)] == ["2"]


def test_an_object_of_somebody_elses_stays_whatever_its_name(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 9, "backoffSeconds": 0})
    lab.settle()
    (table,) = lab.cluster.of("ConfigMap")
    lab.cluster.remove(table)
    mine = {**table, "metadata": {"name": table["metadata"]["name"], "namespace": "lab"}, "data": {"mine": "1"}}
    lab.cluster.create(mine)
    lab.end("train", rank=0, status=1)
    lab.turn(8, 2.0)
    assert lab.status("train")["cleared"] == 1
    assert lab.cluster.get("ConfigMap", "lab", table["metadata"]["name"])["data"] == {"mine": "1"}


def test_pods_of_an_npujob_that_is_gone_hold_up_the_next_one_of_the_same_job(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", npus=8, jobId="job-1")
    lab.settle()
    (old,) = lab.pods("train")
    lab.cluster.remove(lab.cluster.get("NPUJob", "lab", "train"))
    lab.submit("train-r1", npus=8, jobId="job-1")
    lab.submit("other", npus=8, jobId="job-2")
    lab.operator.turn()
    assert not lab.pods("train-r1") and "job-1" in lab.status("train-r1")["message"] and old["metadata"]["name"] in lab.status("train-r1")["message"]
    assert lab.pods("other"), "nobody else waits for it"
    lab.turn(5, 20.0)
    assert lab.phase("train-r1") == "Running"


def test_two_npujobs_of_one_job_run_one_after_the_other(world: Worlds) -> None:
    lab = world(["a"])
    for name in ("first", "second"):
        lab.submit(name, jobId="job-1")
    lab.turn(6, 20.0)
    assert sorted((lab.phase("first"), lab.phase("second"))) == ["Pending", "Running"]
    running = "first" if lab.phase("first") == "Running" else "second"
    lab.end(running)
    lab.turn(6, 20.0)
    assert {lab.phase("first"), lab.phase("second")} == {"Succeeded", "Running"}


def test_pods_go_before_their_job_where_its_deletion_is_a_foreground_one(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2)
    lab.serve("shop")
    lab.settle()
    blocks = {body["kind"]: {owner["blockOwnerDeletion"] for owner in body["metadata"]["ownerReferences"]} for body in lab.cluster.of("Pod")}
    assert blocks == {"Pod": {True}}
    assert all(not owner["blockOwnerDeletion"] for body in lab.cluster.of("ConfigMap") for owner in body["metadata"]["ownerReferences"])


def test_remains_that_may_not_be_deleted_stop_nothing(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 5, "backoffSeconds": 0})
    lab.settle()

    def forbidden(verb: str, kind: str, name: str) -> None:
        if verb == "delete" and kind == "ConfigMap":
            raise PermanentError("may not")

    lab.cluster.fails = forbidden
    lab.end("train", rank=1, status=1)
    lab.turn(10, 5.0)
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
