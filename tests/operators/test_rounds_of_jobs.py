"""Whole lives of jobs: an operator's rounds over an API server in memory and nodes that run pods."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.pods import AGAIN, USELESS
from semantide.operators.resources import CHECKPOINT_ANNOTATION, PROGRESS_ANNOTATION, STEP_SECONDS_ANNOTATION
from semantide.shared.errors import PermanentError

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


def test_a_lost_pod_starts_the_whole_gang_again_after_a_pause(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 2, "backoffSeconds": 10})
    lab.settle()
    before = {body["metadata"]["uid"] for body in lab.pods("train")}
    lab.end("train", rank=1, status=1)
    lab.turn(3)
    assert lab.phase("train") in ("Restarting", "Pending") and not lab.pods("train")
    assert "rank 1" in lab.status("train")["message"] or "pauses" in lab.status("train")["message"]
    lab.turn(3, seconds=5)
    lab.settle()
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 1
    assert not before & {body["metadata"]["uid"] for body in lab.pods("train")}
    for _ in range(2):
        lab.end("train", rank=0, status=137)
        lab.settle(seconds=20)
    status = lab.status("train")
    assert status["phase"] == "Failed" and "limit is 2" in status["message"] and "exit status 137" in status["message"]


def test_failed_stays_failed_when_pods_are_collected(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", restartPolicy={"limit": 0})
    lab.settle()
    lab.end("train", status=1)
    lab.settle()
    assert lab.phase("train") == "Failed"
    for body in lab.cluster.of("Pod"):
        lab.cluster.remove(body)
    lab.new_operator()
    lab.settle()
    assert lab.phase("train") == "Failed" and not lab.cluster.of("Pod")


def test_ranks_that_ended_well_may_be_collected_before_the_others_end(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", pods=2)
    lab.settle()
    lab.end("train", rank=1)
    lab.settle()
    for body in lab.cluster.of("Pod"):
        if body["status"]["phase"] == "Succeeded":
            lab.cluster.remove(body)
    lab.settle()
    assert lab.phase("train") == "Running"
    lab.end("train", rank=0)
    lab.settle()
    assert lab.phase("train") == "Succeeded"


def test_work_that_is_wrong_in_itself_is_not_tried_again(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    lab.end("train", status=USELESS)
    lab.settle()
    assert lab.phase("train") == "Failed" and lab.status("train")["restarts"] == 0


def test_a_pod_that_asks_for_another_start_costs_no_restart(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", restartPolicy={"limit": 0, "backoffSeconds": 1})
    lab.settle()
    lab.end("train", status=AGAIN)
    lab.settle(seconds=2)
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 0 and lab.status("train")["attempt"] == 2


def test_a_lost_node_moves_the_gang_and_is_not_waited_for(world: Worlds) -> None:
    lab = world(["a", "b", "c"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"backoffSeconds": 0})
    lab.settle()
    lost = lab.status("train")["placement"][0]["node"]
    lab.nodes.ready(lost, False)
    lab.turn(8, seconds=30)
    status = lab.status("train")
    assert status["phase"] == "Running" and lost not in {place["node"] for place in status["placement"]}
    assert status["restarts"] == 1
    assert not [body for body in lab.cluster.of("Pod") if body["spec"].get("nodeName") == lost]


def test_an_elastic_job_goes_on_smaller_and_grows_again(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, elastic={"min": 1, "max": 2}, restartPolicy={"backoffSeconds": 0})
    lab.settle()
    assert len(lab.pods("train")) == 2
    lab.nodes.ready("b", False)
    lab.turn(8, seconds=30)
    status = lab.status("train")
    assert status["phase"] == "Running" and [place["node"] for place in status["placement"]] == ["a"]
    lab.nodes.ready("b", True)
    lab.turn(20, seconds=120)
    assert len(lab.status("train")["placement"]) == 2 and lab.phase("train") == "Running"


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


def test_a_place_that_the_scheduler_refuses_is_given_up_and_avoided(world: Worlds) -> None:
    lab = world(["a", "b"], npus=8)
    foreign = {"containers": [{"name": "x", "resources": {"limits": {}}}], "nodeName": "a"}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "other"}, "spec": foreign})
    lab.nodes.held = lambda node: 8 if node == "a" else 0  # what this operator cannot see is there
    lab.submit("train", npus=8)
    lab.settle()
    for _ in range(6):
        lab.turn(1, seconds=20)
    assert lab.phase("train") == "Running" and lab.status("train")["placement"][0]["node"] == "b"
    assert lab.status("train")["restarts"] == 0


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


def test_what_a_job_says_of_itself_is_shown(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    said = {
        PROGRESS_ANNOTATION: json.dumps({"done": 3, "total": 9, "unit": "epochs", "stage": "train"}),
        CHECKPOINT_ANNOTATION: "step-120",
        STEP_SECONDS_ANNOTATION: json.dumps({"0": 0.1, "1": 0.15}),
    }
    lab.cluster.annotate("NPUJob", "lab", "train", said)
    lab.settle()
    status = lab.status("train")
    assert status["progress"]["done"] == 3 and status["checkpoint"] == "step-120"
    slow = status["placement"][1]["node"]
    assert status["slow"] == [{"node": slow, "ratio": 1.5}] and slow in status["message"]
    lab.end("train")
    lab.settle()
    lab.submit("next", npus=8)
    lab.settle()
    assert lab.status("next")["placement"][0]["node"] != slow


@pytest.mark.parametrize("annotation", ["", "[1]", "{", '{"0": "x"}', '{"a": 1}', '{"done": "much"}'])
def test_nonsense_in_annotations_is_passed_over(world: Worlds, annotation: str) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.cluster.annotate("NPUJob", "lab", "train", {PROGRESS_ANNOTATION: annotation, STEP_SECONDS_ANNOTATION: annotation})
    lab.settle()
    assert lab.phase("train") == "Running"


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


def test_where_no_node_answers_nothing_is_restarted(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    before = {body["metadata"]["uid"] for body in lab.pods("train")}
    for name in ("a", "b"):
        lab.nodes.ready(name, False)
    lab.turn(5, seconds=60)
    for name in ("a", "b"):
        lab.nodes.ready(name, True)
    lab.settle()
    assert lab.phase("train") == "Running" and {body["metadata"]["uid"] for body in lab.pods("train")} == before


def test_an_npu_that_fails_moves_its_gang(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.operator.settings = lab.settings.model_copy(update={"device_info_namespace": "kube-system", "device_info_seconds": 1.0})
    lab.submit("train", npus=4, restartPolicy={"backoffSeconds": 0})
    lab.settle()
    (place,) = lab.status("train")["placement"]
    fault = [{"npu_name": f"Ascend910-{place['npus'][0]}", "fault_handling": "SeparateNPU", "fault_level": "SeparateNPU"}]
    listed = {"huawei.com/Ascend910-Unhealthy": f"Ascend910-{place['npus'][0]}", "huawei.com/Ascend910-Fault": json.dumps(fault)}
    said = {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": listed, "UpdateTime": 0}})}
    metadata = {"name": f"mindx-dl-deviceinfo-{place['node']}", "namespace": "kube-system"}
    lab.cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": said})
    lab.turn(8, seconds=2)
    lab.settle()
    (after,) = lab.status("train")["placement"]
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 1
    assert (place["node"], place["npus"][0]) not in {(after["node"], npu) for npu in after["npus"]}


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


def test_events_tell_what_happened_and_are_told_once(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    for _ in range(5):
        lab.turn(1, seconds=10)
    assert sorted(body["reason"] for body in lab.cluster.of("Event")) == ["Placed", "Running"]


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


def test_pods_that_the_api_server_refuses_hold_no_room_and_say_why(world: Worlds) -> None:
    lab = world(["a"])

    def quota(verb: str, kind: str, name: str) -> None:
        if verb == "create" and kind == "Pod" and name.endswith("-1"):
            raise PermanentError("pods is forbidden: exceeded quota: small, used: 1, limited: 1")

    lab.cluster.fails = quota
    lab.submit("train", pods=2, npus=4)
    lab.turn(4, seconds=1)
    assert "exceeded quota" in lab.status("train")["message"] and not lab.pods("train")
    lab.submit("other", npus=8)
    lab.settle()
    assert lab.phase("other") == "Running"
    lab.cluster.fails = lambda verb, kind, name: None
    lab.end("other")
    lab.turn(6, seconds=20)
    lab.settle()
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 0


@pytest.mark.parametrize("end", [{"restartPolicy": {"limit": 0}}, {"deadlineSeconds": 1}])
def test_a_job_that_failed_gives_its_npus_back_although_its_status_remembers_them(world: Worlds, end: dict[str, Any]) -> None:
    lab = world(["a", "b"])
    lab.submit("fails", pods=2, npus=8, **end)
    lab.settle()
    if "restartPolicy" in end:
        lab.end("fails", rank=0, status=1)
    lab.now += 10
    lab.settle()
    assert lab.phase("fails") == "Failed" and lab.status("fails")["placement"]
    lab.submit("next", pods=2, npus=8)
    lab.settle()
    assert lab.phase("next") == "Running"
