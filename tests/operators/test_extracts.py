"""What is kept of an object says all that anybody here reads of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.operators.extracts import extract_of
from semantide.operators.inventory import read_nodes
from semantide.operators.pods import Pod, sights_of

ASCEND = "huawei.com/Ascend910"
TEXTS = st.sampled_from(["", "a", "b"])
SHARES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from(["1", "250m", "0.1", 2]),
        "memory": st.sampled_from(["1Gi", "100M", "1.5Ki", 7]),
        ASCEND: st.sampled_from(["1", 2]),
        "x/y": st.just("3"),
    },
)
RESOURCES = st.fixed_dictionaries({}, optional={"requests": SHARES, "limits": SHARES, "claims": st.just([{"name": "npus"}])})
PORTS = st.lists(st.sampled_from([{"containerPort": 8000}, {"name": "metrics", "containerPort": 9100, "protocol": "TCP"}]), max_size=2)
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": TEXTS, "image": TEXTS}, optional={"resources": RESOURCES, "restartPolicy": st.just("Always"), "ports": PORTS}), max_size=3
)
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Ready", "PodScheduled", "Initialized"]), "status": st.sampled_from(["True", "False", "Unknown"])},
        optional={"reason": st.sampled_from(["Unschedulable", "x"]), "message": TEXTS, "lastTransitionTime": st.just("2026-01-01T00:00:00Z")},
    ),
    max_size=3,
)
STATES = st.sampled_from([{}, {"running": {"startedAt": "x"}}, {"waiting": {"reason": "ErrImagePull", "message": "no"}}, {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z", "containerID": "c"}}])  # fmt: skip
ANNOTATIONS = st.dictionaries(
    st.sampled_from(["semantide.io/npus", "semantide.io/node", "semantide.io/job-id", "huawei.com/AscendReal", ASCEND, "x/y", "other/1", "plain"]),
    st.sampled_from(["0", "0,1", "Ascend910-3", "n1"]),
)
OWNERS = st.sampled_from([[], [{"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "name": "j", "uid": "owner", "controller": True}], [{"kind": "DaemonSet", "uid": "d", "controller": True}]])  # fmt: skip


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": draw(st.sampled_from("abc")),
        "namespace": "lab",
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [{"manager": "m"}],
    }
    metadata |= {"labels": draw(st.dictionaries(TEXTS, TEXTS)), "annotations": draw(ANNOTATIONS), "ownerReferences": draw(OWNERS)}
    if draw(st.booleans()):
        metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": draw(st.sampled_from([0, 30]))}
    spec = {"containers": draw(CONTAINERS), "initContainers": draw(CONTAINERS), "volumes": [{"name": "v"}], **draw(st.sampled_from([{}, {"nodeName": "n1"}]))}
    spec |= {"overhead": draw(SHARES), "resources": draw(RESOURCES)}
    status = {"phase": draw(st.sampled_from(["Pending", "Running", "Failed"])), "conditions": draw(CONDITIONS), "podIP": "10.0.0.1", "qosClass": "x"}
    status["containerStatuses"] = [{"name": "main", "imageID": "sha", "state": state} for state in draw(st.lists(STATES, max_size=2))]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def node(ready: str, ring: str) -> dict[str, Any]:
    capacity = {ASCEND: "8", "x/y": "4", "cpu": "64", "memory": "64Gi", "pods": "110", "ephemeral-storage": "1Ti"}
    metadata = {"name": "n1", "uid": "n", "labels": {"semantide.io/ring-size": ring}, "annotations": {"semantide.io/slow": "1.3", "csi.volume/x": "y"}}
    status = {"capacity": capacity, "allocatable": capacity, "images": [{"names": ["a"], "sizeBytes": 1}], "nodeInfo": {"kernelVersion": "6"}}
    status["conditions"] = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready, "lastHeartbeatTime": "x"}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {"podCIDR": "x", "taints": [{"key": "k", "effect": "NoSchedule"}]},
        "status": status,
    }


@settings(max_examples=150)
@given(bodies=st.lists(pods(), max_size=4), ready=st.sampled_from(["True", "False"]), ring=st.sampled_from(["", "4"]))
def test_whoever_reads_the_extract_reads_the_same(bodies: list[dict[str, Any]], ready: str, ring: str) -> None:
    whole = [*bodies, node(ready, ring)]
    kept = [extract_of(body) for body in whole]
    assert [extract_of(body) for body in kept] == kept
    for names in ((ASCEND,), (ASCEND, "x/y")):
        assert read_nodes(kept[-1:], kept[:-1], resource_names=names) == read_nodes(whole[-1:], bodies, resource_names=names)
    for body, short in zip(bodies, kept, strict=False):
        assert sights_of(short) == sights_of(body)
        sights = dict.fromkeys(sights_of(body), 5.0)
        (one, other) = Pod.parse(body, sights), Pod.parse(short, sights)
        assert replace(one, annotations={}) == replace(other, annotations={})
        read = {key for key in one.annotations if key.startswith(("semantide.io/", "huawei.com/"))}
        assert {key: other.annotations[key] for key in read} == {key: one.annotations[key] for key in read}
        assert "volumes" not in short.get("spec", {}) and "managedFields" not in short["metadata"] and "plain" not in other.annotations


def test_what_has_another_form_is_kept_for_its_reader_to_complain() -> None:
    odd = {"kind": "Pod", "metadata": {"name": "a", "managedFields": []}, "spec": {"containers": [{"resources": {"requests": {"cpu": "many"}}}]}}
    assert extract_of(odd)["spec"] == odd["spec"]
    assert extract_of({"kind": "Node", "metadata": {"name": "n"}, "spec": "x"})["spec"] == "x"


def test_of_a_job_all_is_kept_but_who_wrote_what() -> None:
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "semantide.io/progress": "{}"}
    body = {
        "kind": "NPUJob",
        "metadata": {"name": "j", "managedFields": [1], "annotations": applied},
        "spec": {"template": {"env": []}},
        "status": {"phase": "Running"},
    }
    kept = extract_of(body)
    assert kept["spec"] == body["spec"] and kept["status"] == body["status"]
    assert kept["metadata"] == {"name": "j", "annotations": {"semantide.io/progress": "{}"}}
