"""What pods of a gang are made of: names, devices, environment, templates."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.job_pods import gang_manifests, gang_name, gang_remains, job_revision, pod_names
from semantide.operators.pod_template import owner_label
from semantide.operators.resources import NPUJob, PodPlacement
from semantide.operators.settings import OperatorSettings
from semantide.shared.pod_template import merged


def job(name: str = "train", uid: str = "uid-1", **spec: Any) -> NPUJob:
    full = {"kind": "train", "worldSize": 2, "npusPerPod": 2, "profile": "ascend", **spec}
    return NPUJob.parse({"kind": "NPUJob", "metadata": {"name": name, "namespace": "lab", "uid": uid}, "spec": full})


PLACES = (PodPlacement(pod="p-0", node="a", npus=(0, 1)), PodPlacement(pod="p-1", node="b", npus=(2, 3)))


def gang(one: NPUJob, **settings: Any) -> list[dict[str, Any]]:
    return gang_manifests(one, PLACES, 3, OperatorSettings(**settings), 1_800_000_000.0)


def environment(manifest: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in manifest["spec"]["containers"][0]["env"]}


@given(name=st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?", fullmatch=True), attempt=st.integers(1, 99999), rank=st.integers(0, 9999))
def test_names_fit_host_names_and_differ(name: str, attempt: int, rank: int) -> None:
    mine, other = job(name), job(name, uid="uid-2")
    assert len(gang_name(mine, attempt)) + len(f"-{rank}") <= 63 + len(str(rank))
    # Whatever was cut off, what is left of the job's name ends as a name may end.
    assert re.fullmatch(rf"[a-z0-9]([a-z0-9.-]*[a-z0-9])?-[0-9a-f]{{5}}-{attempt}", gang_name(mine, attempt))
    assert gang_name(mine, attempt) != gang_name(other, attempt) != gang_name(other, attempt + 1)
    (said,) = owner_label(mine).values()
    assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", said) and (said == name or len(name) > 63)
    assert owner_label(job(name + "a")) != owner_label(mine)
    assert len(set(pod_names(mine, attempt, 5))) == 5


def test_the_same_gang_is_the_same_objects() -> None:
    assert gang(job()) == gang(job())


def test_ascend_pods_ask_for_their_own_npus() -> None:
    pod = gang(job())[1]
    assert pod["metadata"]["annotations"]["huawei.com/Ascend910"] == "Ascend910-2,Ascend910-3"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"huawei.com/Ascend910": "2"}
    said = environment(pod)
    assert said["ASCEND_VISIBLE_DEVICES"] == {"fieldRef": {"fieldPath": "metadata.annotations['huawei.com/Ascend910']"}}
    assert said["RANK"] == "2" and said["WORLD_SIZE"] == "4" and said["RANK_TABLE_FILE"].endswith("hccl.json")
    chosen = gang(job(resourceName="huawei.com/Ascend910B3"))[0]
    assert chosen["metadata"]["annotations"]["huawei.com/Ascend910B3"] == "Ascend910B3-0,Ascend910B3-1"
    theirs = gang(job(), assign_devices=False)[0]
    assert "ASCEND_VISIBLE_DEVICES" not in environment(theirs) and "huawei.com/Ascend910" not in theirs["metadata"]["annotations"]


def test_nvidia_and_cpu_pods_have_no_table_of_ranks() -> None:
    gpu = gang(job(profile="nvidia"))[0]
    assert gpu["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "RANK_TABLE_FILE" not in environment(gpu) and "NVIDIA_VISIBLE_DEVICES" not in environment(gpu)
    cpu = gang(job(profile="cpu", npusPerPod=0))[1]
    assert "resources" not in cpu["spec"]["containers"][0] and environment(cpu)["RANK"] == "1"


def test_devices_may_be_claimed() -> None:
    template, pod, _ = gang(job(), dynamic_resources=True)
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "npu.huawei.com", "allocationMode": "ExactCount", "count": 2}
    assert pod["spec"]["resourceClaims"] == [{"name": "npus", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert pod["spec"]["containers"][0]["resources"] == {"claims": [{"name": "npus"}]}


def test_the_first_rank_is_found_by_file_or_by_name() -> None:
    assert "MASTER_ADDR" not in environment(gang(job())[0])
    service, first, second = gang(job(), rendezvous="dns")
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
    assert environment(second)["MASTER_ADDR"] == f"p-0.{service['metadata']['name']}.lab.svc"
    assert (first["spec"]["hostname"], first["spec"]["subdomain"]) == ("p-0", service["metadata"]["name"])


@given(name=st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?", fullmatch=True), attempt=st.integers(1, 99999))
def test_ranks_are_found_by_names_that_a_server_takes_whatever_the_jobs_is(name: str, attempt: int) -> None:
    one = job(name)
    places = [PodPlacement(pod=pod, node="a", npus=(2 * rank, 2 * rank + 1)) for rank, pod in enumerate(pod_names(one, attempt, 2))]
    service, *pods = gang_manifests(one, places, attempt, OperatorSettings(rendezvous="dns"), 0.0)
    front, hosts = service["metadata"]["name"], [pod["spec"]["hostname"] for pod in pods]
    for label in (front, *hosts):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", label), label
    assert len(set(hosts)) == 2 and {pod["spec"]["subdomain"] for pod in pods} == {front}
    assert {environment(pod)["MASTER_ADDR"] for pod in pods} == {f"{hosts[0]}.{front}.lab.svc"}
    assert front in {remain.name for remain in gang_remains(one, attempt, OperatorSettings(rendezvous="dns")) if remain.kind == "Service"}
    other, *_ = gang_manifests(one, places, attempt + 1, OperatorSettings(rendezvous="dns"), 0.0)
    assert other["metadata"]["name"] != front


def test_pods_are_bound_to_their_node_by_the_scheduler() -> None:
    one, other = ([{"key": key, "operator": "Exists"}] for key in ("fast", "near"))
    wanted = [{"matchExpressions": one}, {"matchExpressions": other}]
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": wanted}}}
    pod = gang(job(template={"affinity": own}))[1]
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    here = [{"key": "metadata.name", "operator": "In", "values": ["b"]}]
    assert terms == [{"matchExpressions": one, "matchFields": here}, {"matchExpressions": other, "matchFields": here}]
    assert "nodeName" not in pod["spec"]


def test_templates_lie_over_each_other_and_under_the_operators_own() -> None:
    below = {"env": [{"name": "A", "value": "1"}, {"name": "RANK", "value": "x"}], "volumes": [{"name": "data"}], "labels": {"team": "x"}}
    pod = gang(job(template={"env": [{"name": "A", "value": "2"}], "labels": {"semantide.io/job": "other"}}), own_namespace="lab", pod_template=below)[0]
    assert environment(pod)["A"] == "2" and environment(pod)["RANK"] == "0"
    assert pod["metadata"]["labels"]["semantide.io/job"] == "train" and pod["metadata"]["labels"]["team"] == "x"
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == {"data", "semantide-ranks"}
    elsewhere = gang(job(), own_namespace="other", pod_template=below)[0]
    assert "A" not in environment(elsewhere)
    with pytest.raises(ValueError, match="privileged"):
        gang(job(template={"privileged": True}))


def test_merging_leaves_what_it_was_given() -> None:
    below, over = {"env": [{"name": "A"}], "resources": {"limits": {"cpu": "1"}}}, {"env": [{"name": "B"}], "resources": {"limits": {"memory": "1Gi"}}}
    before = json.dumps([below, over])
    assert merged(below, over) == {"env": [{"name": "A"}, {"name": "B"}], "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    assert json.dumps([below, over]) == before


def test_another_gang_is_wanted_only_when_pods_would_differ() -> None:
    same = ({"priority": 9}, {"suspend": True}, {"deadlineSeconds": 5}, {"restartPolicy": {"limit": 1}}, {"elastic": {"min": 1, "max": 2}})
    assert {job_revision(job(**spec)) for spec in same} == {job_revision(job())}
    other = (
        {"image": "x"},
        {"command": ["a"]},
        {"npusPerPod": 4},
        {"template": {"env": [{"name": "A"}]}},
        {"parameters": {"recipe": "x"}},
        {"scheduler": "volcano"},
    )
    assert len({job_revision(job(**spec)) for spec in (*other, {})}) == len(other) + 1
