"""What jobs lose (pods, nodes, NPUs, places) and how they go on, over whole rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.pods import AGAIN, USELESS
from semantide.shared.errors import PermanentError

Worlds = Callable[..., Any]


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


def test_a_place_that_the_scheduler_refuses_is_given_up_and_avoided(world: Worlds) -> None:
    lab = world(["a", "b"], npus=8)
    foreign = {"containers": [{"name": "x", "resources": {"limits": {}}}], "nodeName": "a"}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "other"}, "spec": foreign})
    lab.nodes.held = lambda node: 8 if node == "a" else 0  # what this operator cannot see is there
    lab.submit("train", npus=8)
    lab.settle()
    for _ in range(8):
        lab.turn(1, seconds=20)
    assert lab.phase("train") == "Running" and lab.status("train")["placement"][0]["node"] == "b"
    assert lab.status("train")["restarts"] == 0


def test_a_pod_that_vanishes_after_the_ranks_were_told_makes_another_gang_and_another_table(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    for body in lab.pods("train"):  # as between the address of a pod and the start of its container
        lab.cluster.set_status("Pod", "lab", body["metadata"]["name"], **{**body["status"], "phase": "Pending"})
    job = lab.cluster.get("NPUJob", "lab", "train")
    lab.cluster.replace_status({**job, "status": {**job["status"], "phase": "Placing"}})
    first, _ = lab.pods("train")
    lab.cluster.delete("Pod", "lab", first["metadata"]["name"], grace_seconds=0)
    lab.turn(10, seconds=20)
    lab.settle()
    assert lab.phase("train") == "Running"
    addresses = {body["metadata"]["labels"]["semantide.io/rank"]: body["status"]["podIP"] for body in lab.pods("train")}
    gang = lab.pods("train")[0]["metadata"]["name"].rpartition("-")[0]
    table = lab.cluster.get("ConfigMap", "lab", f"rings-config-{gang}")
    assert table["data"]["master-address"] == addresses["0"]


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


def sick(lab: Any, node: str, npu: int) -> None:
    """The device plugin says that an NPU must be left."""
    fault = [{"npu_name": f"Ascend910-{npu}", "fault_handling": "SeparateNPU", "fault_level": "SeparateNPU"}]
    listed = {"huawei.com/Ascend910-Unhealthy": f"Ascend910-{npu}", "huawei.com/Ascend910-Fault": json.dumps(fault)}
    said = {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": listed, "UpdateTime": 0}})}
    metadata = {"name": f"mindx-dl-deviceinfo-{node}", "namespace": "kube-system"}
    lab.cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": said})


@pytest.mark.parametrize("status", [None, USELESS, 1])
def test_an_npu_that_fails_moves_its_gang_whatever_its_pod_ended_with(world: Worlds, status: int | None) -> None:
    lab = world(["a", "b"])
    lab.operator.settings = lab.settings.model_copy(update={"device_info_namespace": "kube-system", "device_info_seconds": 1.0})
    lab.submit("train", npus=4, restartPolicy={"backoffSeconds": 0})
    lab.settle()
    (place,) = lab.status("train")["placement"]
    sick(lab, place["node"], place["npus"][0])
    if status is not None:
        lab.end("train", status=status)
    lab.turn(8, seconds=2)
    lab.settle()
    (after,) = lab.status("train")["placement"]
    assert lab.phase("train") == "Running" and lab.status("train")["restarts"] == 1
    assert (place["node"], place["npus"][0]) not in {(after["node"], npu) for npu in after["npus"]}
    lab.end("train", status=USELESS)
    lab.settle()
    assert lab.phase("train") == "Failed", "with sound NPUs it is the work"


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


def test_a_pause_ends_at_its_limit_however_often_a_gang_was_lost(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", restartPolicy={"limit": 10**6})
    lab.settle()
    body = lab.cluster.get("NPUJob", "lab", "train")
    lab.cluster.replace_status({**body, "status": {**body["status"], "recentRestarts": 5000}})
    lab.end("train", status=1)
    lab.operator.turn()
    assert lab.phase("train") == "Restarting" and lab.status("train")["recentRestarts"] == 5001
    lab.turn(2, lab.settings.backoff_limit_seconds)
    lab.settle()
    assert lab.phase("train") == "Running"


def test_a_node_on_which_pods_fail_does_not_get_the_next_gang_as_well(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", npus=8, restartPolicy={"limit": 3, "backoffSeconds": 1})
    lab.settle()
    (first,) = lab.status("train")["placement"]
    lab.end("train", status=1)
    lab.settle(seconds=2)
    (second,) = lab.status("train")["placement"]
    assert lab.phase("train") == "Running" and second["node"] != first["node"]
    lab.end("train", status=AGAIN)
    lab.settle(seconds=2)
    assert lab.status("train")["placement"][0]["node"] == second["node"], "who asks to be started again has nothing against the node"
    lab.nodes.ready(second["node"], False)
    lab.turn(8, seconds=10)
    assert lab.phase("train") == "Running" and lab.status("train")["placement"][0]["node"] == first["node"], (
        "where there is no other it goes there all the same"
    )


@pytest.mark.parametrize(("also_fails", "seconds"), [(False, 90), (True, 10)])
def test_a_gang_of_which_a_pod_is_evicted_has_as_long_as_that_pod_for_a_checkpoint(world: Worlds, also_fails: bool, seconds: int) -> None:
    lab = world(["a", "b", "c"], stop_seconds=90, lost_stop_seconds=10)
    lab.submit("train", pods=3, npus=8)
    lab.settle()
    evicted, other, last = lab.pods("train")
    lab.cluster.delete("Pod", "lab", evicted["metadata"]["name"])
    if also_fails:
        lab.nodes.end("lab", last["metadata"]["name"], 1)
    lab.operator.turn()
    assert lab.phase("train") == "Restarting"
    for body in (evicted, other):
        expected = 90 if body is evicted else seconds
        assert lab.cluster.get("Pod", "lab", body["metadata"]["name"])["metadata"]["deletionGracePeriodSeconds"] == expected
