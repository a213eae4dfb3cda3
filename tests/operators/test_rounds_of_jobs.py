"""Whole lives of jobs: an operator's rounds over an API server in memory and nodes that run pods."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.pods import time_of

Worlds = Callable[..., Any]


def test_a_job_is_placed_runs_and_succeeds(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    status = lab.status("train")
    assert status["phase"] == "Running"
    assert sorted(place["node"] for place in status["placement"]) == ["a", "b"]
    assert status["observedGeneration"] == 1
    first, second = lab.pods("train")
    environment = {entry["name"]: entry.get("value") for entry in second["spec"]["containers"][0]["env"]}
    assert environment["WORLD_SIZE"] == "16" and environment["RANK"] == "8" and environment["LOCAL_WORLD_SIZE"] == "8"
    table = next(body for body in lab.cluster.of("ConfigMap"))
    assert table["data"]["master-address"] == first["status"]["podIP"]
    servers = json.loads(table["data"]["hccl.json"])["server_list"]
    assert [device["rank_id"] for server in servers for device in server["device"]] == [str(rank) for rank in range(16)]
    lab.end("train")
    lab.settle()
    status = lab.status("train")
    assert status["phase"] == "Succeeded" and status["completionTime"]
    assert {entry["type"]: entry["status"] for entry in status["conditions"]}["Succeeded"] == "True"


def test_all_pods_or_none(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("fits", npus=4)
    lab.submit("too-large", pods=2, npus=4)
    lab.settle()
    assert lab.phase("fits") == "Running"
    assert lab.phase("too-large") == "Pending" and not lab.pods("too-large")
    assert "huawei.com/Ascend910" in lab.status("too-large")["message"]
    lab.end("fits")
    lab.settle()
    assert lab.phase("too-large") == "Running"


def test_suspend_and_resume(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", npus=8)
    lab.settle()
    lab.change("NPUJob", "train", suspend=True)
    lab.settle()
    assert lab.phase("train") == "Suspended" and not lab.pods("train")
    lab.submit("other", npus=8)
    lab.settle()
    lab.change("NPUJob", "train", suspend=False)
    lab.settle()
    assert lab.phase("other") == "Running" and lab.phase("train") == "Pending"
    lab.end("other")
    lab.settle()
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 0


def test_higher_priority_takes_the_room_of_a_running_job_which_goes_on_later(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("low", npus=8)
    lab.settle()
    lab.submit("high", npus=8, priority=100)
    lab.settle()
    assert lab.phase("high") == "Running" and lab.phase("low") in ("Pending", "Restarting")
    assert lab.status("low")["restarts"] == 0
    lab.end("high")
    lab.settle()
    assert lab.phase("low") == "Running"


def test_deadline(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", deadlineSeconds=100)
    lab.settle()
    lab.turn(4, seconds=50)
    lab.settle()
    assert lab.phase("train") == "Failed" and "deadlineSeconds 100" in lab.status("train")["message"]


def test_deletion_takes_everything_along(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    lab.cluster.delete("NPUJob", "lab", "train")
    lab.settle()
    assert not lab.cluster.of("Pod") and not lab.cluster.of("ConfigMap") and not lab.cluster.of("NPUJob")


def test_a_job_of_the_same_name_is_another_job(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    names = {body["metadata"]["name"] for body in lab.pods("train")}
    lab.cluster.delete("NPUJob", "lab", "train")
    lab.submit("train")
    lab.settle()
    assert lab.phase("train") == "Running" and not names & {body["metadata"]["name"] for body in lab.pods("train")}


def test_an_unusable_spec_says_what_is_wrong(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("wide", pods=5, elastic={"min": 1, "max": 2})
    lab.submit("template", template={"privileged": True})
    lab.settle()
    assert "worldSize 5" in lab.status("wide")["message"]
    assert "privileged" in lab.status("template")["message"] and lab.phase("template") == "Pending"
    lab.change("NPUJob", "template", template={})
    lab.settle()
    assert lab.phase("template") == "Running"


def test_handed_over_gangs_are_not_placed_here(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("theirs", pods=2, npus=8, scheduler="volcano")
    lab.operator.turn()
    lab.operator.turn()
    group = lab.cluster.of("PodGroup")[0]
    assert group["spec"]["minMember"] == 2 and group["spec"]["minResources"] == {"huawei.com/Ascend910": "16"}
    for body in lab.pods("theirs"):
        assert body["spec"]["schedulerName"] == "volcano" and "affinity" not in body["spec"]
        assert body["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]


@pytest.mark.parametrize("scheduler", ["volcano", "native"])
def test_handed_over_gangs_start_whole_even_where_they_are_elastic(world: Worlds, scheduler: str) -> None:
    lab = world(["a"])
    lab.submit("theirs", pods=4, npus=2, scheduler=scheduler, elastic={"min": 2, "max": 4})
    lab.operator.turn()
    spec = lab.cluster.of("PodGroup")[0]["spec"]
    assert len(lab.pods("theirs")) == 4 == (spec["minMember"] if scheduler == "volcano" else spec["schedulingPolicy"]["gang"]["minCount"])


def test_handed_over_gangs_stand_in_line_but_hold_no_part_for_long(world: Worlds) -> None:
    lab = world(["a"], placing_seconds=900.0)
    lab.submit("theirs", pods=2, npus=8, scheduler="volcano", restartPolicy={"limit": 0, "backoffSeconds": 0})
    lab.operator.turn()
    first, second = (body["metadata"]["name"] for body in lab.pods("theirs"))
    for name in (first, second):
        told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room", "lastTransitionTime": time_of(lab.now)}
        lab.cluster.set_status("Pod", "lab", name, conditions=[told])
    lab.now += 7200
    lab.operator.turn()
    assert lab.phase("theirs") == "Placing", "it holds nothing and stands in its scheduler's line"
    lab.cluster.bind("lab", first, "a")
    lab.cluster.set_status("Pod", "lab", first, conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": time_of(lab.now)}])
    lab.now += 890
    lab.operator.turn()
    assert lab.phase("theirs") == "Placing"
    lab.now += 20
    lab.operator.turn()
    status = lab.status("theirs")
    assert status["phase"] == "Restarting" and "no room" in status["message"] and not status.get("restarts"), "a loss that does not count"


def test_a_changed_spec_makes_another_gang_and_a_changed_priority_does_not(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    (before,) = lab.pods("train")
    lab.change("NPUJob", "train", priority=7)
    lab.settle()
    assert [body["metadata"]["uid"] for body in lab.pods("train")] == [before["metadata"]["uid"]]
    lab.change("NPUJob", "train", image="other:1")
    lab.settle()
    (after,) = lab.pods("train")
    assert after["spec"]["containers"][0]["image"] == "other:1" and lab.status("train")["restarts"] == 0


def test_rounds_without_news_write_nothing(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("runs", pods=2, npus=8)
    lab.submit("waits", pods=3, npus=8)
    lab.submit("ended")
    lab.serve("shop", npus=0)
    lab.settle()
    lab.turn(2, seconds=1)
    before = lab.cluster.version
    for _ in range(5):
        lab.turn(1, seconds=7)
    assert lab.cluster.version == before


def test_claimed_devices_are_placed_by_slices_and_claims(world: Worlds) -> None:
    lab = world(["a", "b"], npus=0, dynamic_resources=True, device_info_seconds=1.0)
    for node, count in (("a", 4), ("b", 8)):
        devices = [{"name": f"npu-{npu}", "attributes": {"index": {"int": npu}}} for npu in range(count)]
        spec = {"nodeName": node, "driver": "npu.huawei.com", "pool": {"name": node}, "devices": devices}
        lab.cluster.create({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})
    lab.submit("large", npus=8)
    lab.submit("larger", npus=8)
    lab.operator.turn()
    lab.operator.turn()
    assert [place["node"] for place in lab.status("large")["placement"]] == ["b"]
    assert lab.phase("larger") == "Pending"
    (template,) = lab.cluster.of("ResourceClaimTemplate")
    assert lab.pods("large")[0]["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == template["metadata"]["name"]
