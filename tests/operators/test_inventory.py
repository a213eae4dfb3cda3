"""Nodes from Kubernetes' objects."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.claimed_devices import claimed_devices
from semantide.operators.inventory import read_nodes
from semantide.operators.node import NPU, Taint
from semantide.operators.placement import place
from semantide.operators.refusal import Refusal
from semantide.operators.request import Request, Shape, shape_of

ASCEND = "huawei.com/Ascend910"


def node(
    name: str = "n1", *, allocatable: int = 8, ready: str = "True", since: str = "2026-01-01T00:00:00Z", labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"accelerator-type": "module-910b-8", **(labels or {})}, "annotations": {}},
        "spec": spec,
        "status": {
            "capacity": {ASCEND: "8", "cpu": "96", "memory": "700Gi", "pods": "110"},
            "allocatable": {ASCEND: str(allocatable), "cpu": "95500m", "memory": "690Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}],
        },
    }


def pod(name: str, npus: int, *, at: str = "n1", annotations: dict[str, str] | None = None, phase: str = "Running", bound: bool = True) -> dict[str, Any]:
    containers = [{"resources": {"limits": {ASCEND: str(npus)}, "requests": {"cpu": "2", "memory": "4Gi"}}}, {"resources": {"requests": {"cpu": "500m"}}}]
    return {
        "metadata": {"name": name, "namespace": "x", "annotations": {**(annotations or {}), **({} if bound else {"semantide.io/node": at})}},
        "spec": {"containers": containers, "initContainers": [{"resources": {"requests": {"cpu": "1"}}}], **({"nodeName": at} if bound else {})},
        "status": {"phase": phase},
    }


def health(name: str, devices: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"mindx-dl-deviceinfo-{name}"}, "data": {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": devices}, **more})}}


@given(asked=st.lists(st.integers(0, 3000), min_size=1, max_size=6), cores=st.integers(18, 96), memory=st.integers(1, 2**40))
def test_what_just_fits_does_fit(asked: list[int], cores: int, memory: int) -> None:
    pods = [
        {**pod(f"p{number}", 0), "spec": {"nodeName": "n1", "containers": [{"resources": {"requests": {"cpu": f"{share}m", "memory": f"{share / 7}Mi"}}}]}}
        for number, share in enumerate(asked)
    ]
    body = node()
    body["status"]["allocatable"] |= {"cpu": str(cores), "memory": str(memory + 2**40)}
    (found,) = read_nodes([body], pods)
    rest = 1000 * cores - sum(asked)
    assert found.free_millicores == rest and float(found.free_memory_bytes).is_integer()
    for text in (f"{rest}m", f"{rest / 1000}", f"{rest * 1000}u"):
        assert shape_of("cpu", "", 0, {"resources": {"requests": {"cpu": text}}}).millicores == found.free_millicores
    assert shape_of("cpu", "", 0, {"resources": {"requests": {"cpu": f"{rest}.5m"}}}).millicores == rest + 1


def test_what_pods_take_is_not_free() -> None:
    pods = [
        pod("real", 2, annotations={"huawei.com/AscendReal": "Ascend910-6,Ascend910-7", "semantide.io/npus": "0,1"}),
        pod("ours", 1, annotations={"semantide.io/npus": "0"}, phase="Pending", bound=False),
        pod("volcanos", 1, annotations={ASCEND: "Ascend910-1"}),
        pod("done", 4, annotations={"semantide.io/npus": "2,3,4,5"}, phase="Succeeded"),
        pod("unplaced", 4, at="", phase="Pending"),
        pod("elsewhere", 8, at="n2"),
    ]
    (found,) = read_nodes([node()], pods)
    assert found.held == {0: "x/ours", 1: "x/volcanos", 6: "x/real", 7: "x/real"} and found.free == 0b00111100
    assert found.free_millicores == 95500 - 3 * 2500 and found.free_memory_bytes == (690 - 12) * 2**30 and found.free_pods == 107
    assert found.npus[6] == NPU(6, 1, True, "x/real") and found.ring == 4
    assert not found.unusable and not found.lost_holders


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 8))
def test_devices_that_nobody_names_are_taken_all_the_same(counts: list[int], sick: int) -> None:
    (found,) = read_nodes([node(allocatable=8 - sick)], [pod(f"p{at}", count) for at, count in enumerate(counts)])
    asked = min(8, sum(counts))
    assert len(found.held) == asked
    assert found.free.bit_count() == 8 - max(asked, 0) - min(sick, 8 - asked)


def test_faults_and_where_the_node_stands() -> None:
    faults = [{"npu_name": "Ascend910-5", "fault_handling": "SubHealthFault"}]
    infos = [health("n1", {f"{ASCEND}-Unhealthy": "Ascend910-2", f"{ASCEND}-Fault": json.dumps(faults)}, SuperPodID=3), {"metadata": {"name": "other"}}]
    pods = [pod("a", 4, annotations={"semantide.io/npus": "0,1,2,3"}), pod("b", 1, annotations={"semantide.io/npus": "4"})]
    (found,) = read_nodes([node(allocatable=7, labels={"huawei.com/topotree.rackid": "r1", "topology.kubernetes.io/zone": "z"})], pods, infos)
    assert found.lost_holders == {"x/a"} and found.free == 0b11100000
    assert (found.super_pod, found.rack) == ("3", "r1") and 1.1 < found.slow < 1.3
    body = node(labels={"huawei.com/topotree.superpodid": "7"})
    body["metadata"]["annotations"]["semantide.io/slow"] = "1.4"
    (found,) = read_nodes([body], [], infos)
    assert found.super_pod == "7" and found.slow == 1.4


def test_nodes_that_take_no_pods() -> None:
    leaving = node("c")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    late = node("d", ready="Unknown", since="2021-01-15T07:59:30Z")
    bodies = [node("a", ready="False"), node("b", unschedulable=True, taints=[{"key": "k", "effect": "NoExecute"}]), leaving, late]
    found = read_nodes(bodies, [pod("p", 8, at="a"), pod("q", 8, at="d")], silence={"a": 60.0, "d": 30.0})
    assert [entry.unusable for entry in found] == ["not ready", "cordoned", "being deleted", "not ready"]
    assert [entry.gone for entry in found] == [True, False, False, False]  # the last one only for thirty seconds, whatever its own clock says
    assert found[0].lost_holders == {"x/p"} and found[3].lost_holders == frozenset()
    assert found[1].taints == (Taint("k", "", "NoExecute"),)


def test_claimed_devices() -> None:
    body = node()
    del body["status"]["capacity"][ASCEND], body["status"]["allocatable"][ASCEND]
    devices = [{"name": f"npu-{index}", "basic": {"attributes": {"index": {"int": index}}}} for index in range(4)] + [{"name": "npu-7"}]
    slices = [
        {"spec": {"driver": "npu.huawei.com", "nodeName": "n1", "pool": {"name": "n1"}, "devices": devices}},
        {"spec": {"driver": "other.com", "nodeName": "n1", "pool": {"name": "n1"}, "devices": [{"name": "x-1"}]}},
    ]
    result = [{"driver": "npu.huawei.com", "pool": "n1", "device": "npu-1"}, {"driver": "npu.huawei.com", "pool": "n1", "device": "npu-7"}]
    claims = [
        {
            "metadata": {"name": "c", "namespace": "x"},
            "status": {"allocation": {"devices": {"results": result}}, "reservedFor": [{"resource": "pods", "name": "p"}]},
        },
        {"metadata": {"name": "d", "namespace": "x"}},
    ]
    pods = [pod("p", 0, annotations={"semantide.io/npus": "0,1"}), pod("new", 0, annotations={"semantide.io/npus": "2"}, bound=False)]
    (found,) = read_nodes([body], pods, claimed=claimed_devices(slices, claims))
    assert (found.capacity, found.resource_name) == (8, ASCEND)
    assert found.held == {1: "x/p", 7: "x/p", 2: "x/new"} and found.free == 0b00001001


def test_a_node_without_devices() -> None:
    (found,) = read_nodes(
        [{"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi"}, "conditions": [{"type": "Ready", "status": "True"}]}}],
        [],
    )
    assert (found.capacity, found.resource_name, found.free, found.npus) == (0, "", 0, ())
    assert found.free_millicores == 4000 and found.free_pods == 110


def test_a_name_that_a_job_asks_for_hides_no_devices() -> None:
    body = node()
    body["status"]["capacity"] |= {"devices.kubevirt.io/kvm": "1000", "example.com/fast": "16"}
    user = pod("user", 0)
    user["spec"]["containers"][0]["resources"]["limits"]["devices.kubevirt.io/kvm"] = "1"
    names = ["devices.kubevirt.io/kvm", "example.com/fast", ASCEND]
    (found,) = read_nodes([body], [user], resource_names=names)
    assert (found.resource_name, found.capacity, found.held) == (ASCEND, 8, {})
    del body["status"]["capacity"][ASCEND]
    (found,) = read_nodes([body], [user], resource_names=names)
    assert (found.resource_name, found.capacity, found.held) == ("example.com/fast", 16, {})
    (found,) = read_nodes([body], [user], resource_names=names[:1])
    assert (found.resource_name, found.capacity, found.held) == ("", 0, {}), "so many are no devices"


@given(kind=st.sampled_from(["DaemonSet", "ReplicaSet", "Job", "NPUJob", ""]), npus=st.integers(0, 6), asked=st.integers(1, 8))
def test_a_job_that_never_fits_beside_what_stays_is_told_so(kind: str, npus: int, asked: int) -> None:
    other = pod("other", npus, annotations={"semantide.io/npus": ",".join(map(str, range(npus)))} if npus else {})
    other["metadata"]["ownerReferences"] = [{"kind": kind, "uid": "u", "controller": True}] if kind else []
    stays = kind in ("DaemonSet", "ReplicaSet")
    (found,) = read_nodes([node()], [other])
    assert (found.kept_millicores, found.kept_memory_bytes, found.kept) == ((2500, 4 * 2**30, (1 << npus) - 1) if stays else (0, 0, 0))
    for shape, fits in (
        (Shape(npus=asked, resource_name=ASCEND, aligned=False), 8 - npus * stays >= asked),
        (Shape(millicores=95500 - 2499 * (asked % 2)), not stays),
    ):
        request = Request("lab/train", ("p",), shape)
        result = place(request, [found])
        if isinstance(result, Refusal):
            assert result.survey.ever(request) == fits
            assert ("for good" in result.reason) == (not fits)
