"""The table of ranks: when there is one, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.job_pods import gang_remains
from semantide.operators.pods import Pod
from semantide.operators.rank_table import RANKS_FOLDER, rank_table
from semantide.operators.resources import NPUJob

Worlds = Callable[..., Any]
CONFIGURATION = "ascend.kubectl.kubernetes.io/ascend-910-configuration"


def configured(rank: int, super_pod: int | None = None, npus: tuple[int, ...] = (0, 1)) -> Pod:
    """A pod of which the device plugin says everything; on a super-pod also that."""
    devices = [
        {"device_id": str(npu), "device_ip": f"192.168.{rank}.{npu}", **({"super_device_id": str(100 + npu)} if super_pod is not None else {})} for npu in npus
    ]
    said = {"server_id": f"10.0.0.{rank}", "devices": devices, "super_pod_id": -2 if super_pod is None else super_pod}
    return Pod("lab", f"p-{rank}", f"u{rank}", rank=rank, address=f"10.1.0.{rank}", annotations={CONFIGURATION: json.dumps(said)})


@pytest.mark.parametrize("scheduler", ["own", "volcano", "native"])
@pytest.mark.parametrize(
    ("profile", "pods", "npus"),
    [("cpu", 1, 0), ("cpu", 2, 0), ("ascend", 1, 0), ("ascend", 1, 1), ("ascend", 1, 8), ("ascend", 2, 0), ("ascend", 2, 1), ("ascend", 3, 8)],
)
@pytest.mark.parametrize("settings", [{}, {"rendezvous": "dns"}, {"assign_devices": False}])
def test_pods_are_told_of_what_there_is(world: Worlds, settings: dict[str, Any], pods: int, npus: int, profile: str, scheduler: str) -> None:
    lab = world(["a", "b", "c"], **settings)
    lab.submit("train", pods=pods, npus=npus, profile=profile, scheduler=scheduler)
    lab.settle()
    assert lab.phase("train") == "Running", lab.status("train")["message"]
    made = {body["metadata"]["name"]: body["data"] for body in lab.cluster.of("ConfigMap")}
    for body in lab.pods("train"):
        (container,) = body["spec"]["containers"]
        said = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        volumes = [volume["configMap"]["name"] for volume in body["spec"].get("volumes", ())]
        folders = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        assert volumes == list(made), "what is mounted is made, and what is made is mounted"
        assert folders == [RANKS_FOLDER] * len(made)
        files = {f"{RANKS_FOLDER}/{name}" for data in made.values() for name in data}
        assert ("SEMANTIDE_MASTER_ADDRESS_FILE" in said) == bool(made)
        assert said.get("SEMANTIDE_MASTER_ADDRESS_FILE", f"{RANKS_FOLDER}/master-address") in files or not made
        assert ("RANK_TABLE_FILE" in said) == (profile == "ascend" and pods * npus > 1)
        if "RANK_TABLE_FILE" in said and scheduler == "own" and settings.get("assign_devices", True):
            assert said["RANK_TABLE_FILE"] in files
    assert bool(made) == (pods > 1 or npus > 1)
    job = NPUJob.parse(lab.cluster.get("NPUJob", "lab", "train"))
    assert [remove.name for remove in gang_remains(job, 1, lab.settings) if remove.kind == "ConfigMap"] == list(made)


@pytest.mark.parametrize(
    ("told", "settings", "spec"),
    [
        ({}, {"assign_devices": False}, {}),
        ({}, {}, {"scheduler": "volcano"}),
        ({"huawei.com/AscendReal": "Ascend910-6,Ascend910-7"}, {"assign_devices": False}, {}),
        ({"huawei.com/AscendReal": "Ascend910-6,Ascend910-7"}, {}, {}),
        ({"huawei.com/Ascend910": "Ascend910-6,Ascend910-7"}, {}, {"scheduler": "volcano"}),
    ],
)
def test_a_table_names_devices_that_pods_have_or_is_left_out(world: Worlds, told: dict[str, str], settings: dict[str, Any], spec: dict[str, Any]) -> None:
    lab = world(["a", "b"], **settings)
    lab.submit("train", pods=2, npus=2, **spec)
    lab.operator.turn()
    for body in lab.pods("train"):
        lab.cluster.annotate("Pod", "lab", body["metadata"]["name"], told)
    lab.settle()
    (data,) = (body["data"] for body in lab.cluster.of("ConfigMap"))
    assert lab.phase("train") == "Running" and data["master-address"]
    assert ("hccl.json" in data) == bool(told)
    if told:
        servers = json.loads(data["hccl.json"])["server_list"]
        assert [[device["device_id"] for device in server["device"]] for server in servers] == [["6", "7"], ["6", "7"]]


def test_the_table_takes_what_the_device_plugin_says() -> None:
    said = {"server_id": "10.0.0.9", "devices": [{"device_id": "5", "device_ip": "192.168.100.5"}, {"device_id": "4", "device_ip": "192.168.100.4"}]}
    pods = [
        Pod("lab", "p-0", "u0", rank=0, address="10.1.0.1", host_address="10.0.0.1", npus=(0, 1)),
        Pod("lab", "p-1", "u1", rank=1, address="10.1.0.2", annotations={CONFIGURATION: json.dumps(said)}),
    ]
    table = rank_table(pods, 2)
    assert table is not None
    assert (table["status"], table["version"], table["server_count"]) == ("completed", "1.0", "2")
    first, second = table["server_list"]
    assert first["server_id"] == "10.0.0.1" and [device["rank_id"] for device in first["device"]] == ["0", "1"]
    assert second["server_id"] == "10.0.0.9"
    assert second["device"] == [
        {"device_id": "4", "device_ip": "192.168.100.4", "rank_id": "2"},
        {"device_id": "5", "device_ip": "192.168.100.5", "rank_id": "3"},
    ]


@pytest.mark.parametrize("devices", ["none", [5], [{"device_id": "NPU-5"}], [{}]])
def test_the_table_passes_over_what_the_device_plugin_says_in_another_form(devices: Any) -> None:
    said = {CONFIGURATION: json.dumps({"devices": devices})}
    table = rank_table([Pod("lab", "p-0", "u0", host_address="10.0.0.1", npus=(0, 1), annotations=said)], 2)
    assert table is not None
    (server,) = table["server_list"]
    assert [device["device_id"] for device in server["device"]] == ["0", "1"]


def test_super_pods_stand_in_the_table() -> None:
    table = rank_table([configured(0, 3), configured(1, 7), configured(2, 3)], 2)
    assert table is not None and table["version"] == "1.2"
    assert table["super_pod_list"] == [
        {"super_pod_id": "3", "server_list": [{"server_id": "10.0.0.0"}, {"server_id": "10.0.0.2"}]},
        {"super_pod_id": "7", "server_list": [{"server_id": "10.0.0.1"}]},
    ]
    assert table["server_list"][1]["device"][1] == {"device_id": "1", "device_ip": "192.168.1.1", "super_device_id": "101", "rank_id": "3"}


def test_one_server_outside_super_pods_is_enough_for_the_older_table() -> None:
    table = rank_table([configured(0, 3), configured(1)], 2)
    assert table is not None and table["version"] == "1.0" and "super_pod_list" not in table
