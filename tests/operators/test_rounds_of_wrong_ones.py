"""Jobs and services that nothing can be made of: they say why, and nobody else is stopped by them."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators import reconcile, rounds
from semantide.operators.job_states import advance

Worlds = Callable[..., Any]

_NO_OPERATOR = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a"}]}]}}}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"nodeSelector": ["a"]}, "template.nodeSelector is ['a']"),
        ({"tolerations": ["x"]}, "template.tolerations is ['x']"),
        ({"labels": "x"}, "template.labels is 'x'"),
        ({"volumeMounts": {"a": 1}}, "template.volumeMounts is {'a': 1}"),
        ({"resources": {"requests": "x"}}, "template.resources.requests is 'x'"),
        ({"initContainers": [{"resources": "x"}]}, "resources is 'x'"),
        ({"initContainers": [{"resources": {"limits": ["x"]}}]}, "resources is {'limits': ['x']}"),
        ({"resources": {"requests": {"cpu": ["1"]}}}, "no quantity"),
        ({"affinity": {"nodeAffinity": "x"}}, "nodeAffinity has 'x'"),
        ({"affinity": _NO_OPERATOR}, "give it key and operator"),
    ],
)
def test_a_template_of_the_wrong_form_waits_with_a_reason_and_stops_nobody_else(world: Worlds, template: dict[str, Any], said: str) -> None:
    lab = world(["a", "b"])
    lab.submit("wrong", template=template)
    lab.serve("wrong", template=template)
    lab.submit("right")
    lab.serve("right")
    lab.settle()
    assert lab.phase("right") == "Running" and lab.phase("right", "NPUService") == "Running"
    assert said in lab.status("wrong")["message"]
    assert lab.status("wrong", "NPUService")["message"].count(said) == 1, "told once, however many rounds there were"
    lab.change("NPUJob", "wrong", template={})
    lab.change("NPUService", "wrong", template={})
    lab.turn(3, 20.0)
    lab.settle()
    assert lab.phase("wrong") == "Running" and lab.phase("wrong", "NPUService") == "Running"


def test_a_wrong_template_of_the_operators_own_ends_nothing_that_runs(world: Worlds) -> None:
    lab = world(["a"], own_namespace="lab")
    lab.submit("train", npus=4)
    lab.serve("shop", npus=2)
    lab.settle()
    before = {body["metadata"]["uid"] for body in lab.cluster.of("Pod")}
    lab.settings = lab.settings.model_copy(update={"pod_template": {"tolerations": "all"}})
    lab.new_operator()
    lab.submit("next", npus=2)
    lab.turn(8, 5.0)
    assert lab.phase("train") == "Running"
    assert {body["metadata"]["uid"] for body in lab.pods("train")} | {body["metadata"]["uid"] for body in lab.pods("shop", "service")} == before
    assert "template.tolerations" in lab.status("next")["message"]


def test_a_job_that_the_operator_stumbles_over_is_left_alone_and_stops_nobody_else(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = world(["a"])
    lab.submit("odd")
    lab.settle()

    def stumbles(look: Any) -> Any:
        if look.job.name == "odd":
            raise KeyError("unheard of")
        return advance(look)

    monkeypatch.setattr(reconcile, "advance", stumbles)
    lab.submit("even")
    lab.settle()
    assert lab.phase("even") == "Running" and lab.phase("odd") == "Running" and lab.pods("odd")
    assert "unheard of" in lab.status("odd")["message"]


def test_where_the_operator_stumbles_the_log_says_once_how_it_came_there(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = world(["a"])
    lab.submit("odd")
    lab.serve("shop")
    lab.settle()
    # A logger of its own: what other tests start in this process sets the common ones up for itself.
    log, heard = logging.Logger("of this test"), logging.handlers.BufferingHandler(1000)
    log.addHandler(heard)
    monkeypatch.setattr(rounds, "_log", log)

    def stumbles(_: Any) -> Any:
        raise KeyError("unheard of")

    monkeypatch.setattr(reconcile, "advance", stumbles)
    monkeypatch.setattr(reconcile, "advance_service", stumbles)
    lab.turn(5, 10.0)
    told = [record for record in heard.buffer if "cannot be looked at" in record.getMessage()]
    assert sorted(record.getMessage().split(" cannot")[0] for record in told) == ["NPUJob lab/odd", "NPUService lab/shop"]
    assert all("in stumbles" in heard.format(record) for record in told)


def test_a_status_that_cannot_be_read_is_not_forgotten(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    body = lab.cluster.get("NPUJob", "lab", "train")
    lab.cluster.replace_status({**body, "status": {**body["status"], "recentRestarts": "many"}})
    lab.settle()
    status = lab.status("train")
    assert "recentRestarts" in status["message"] and (status["attempt"], status["phase"]) == (1, "Running") and lab.pods("train")
    lab.cluster.replace_status({**lab.cluster.get("NPUJob", "lab", "train"), "status": {**status, "recentRestarts": 0}})
    lab.settle()
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 1


@pytest.mark.parametrize(
    "annotations",
    [{"semantide.io/npus": "²"}, {"semantide.io/npus": "9" * 5000}, {"huawei.com/AscendReal": f"Ascend910-{'1' * 5000}"}],
)
def test_what_somebody_writes_onto_a_pod_stops_nobody(world: Worlds, annotations: dict[str, str]) -> None:
    lab = world(["a"])
    owner = {"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x", "controller": True}
    metadata = {"name": "odd", "namespace": "elsewhere", "annotations": annotations, "ownerReferences": [owner], "labels": {}}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "a", "containers": []}})
    lab.submit("train", npus=8)
    lab.settle()
    assert lab.phase("train") == "Running" and not lab.operator.turn().stumbles


def test_pods_and_nodes_that_cannot_be_read_are_told_of_and_stop_nobody(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", npus=4)
    lab.settle()
    (node,) = {body["spec"]["nodeName"] for body in lab.pods("train")}
    owner = {"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x", "controller": True}
    metadata = {"name": "odd", "namespace": "elsewhere", "creationTimestamp": "yesterday", "ownerReferences": [owner], "labels": {}}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "a", "containers": []}})
    lab.cluster.objects["Pod", "elsewhere", "odd"]["metadata"]["creationTimestamp"] = "yesterday"
    lab.cluster.set_status("Pod", "elsewhere", "odd", phase="Running")
    lab.cluster.set_status("Node", "", node, capacity={"cpu": "many"}, allocatable={"cpu": "many"})
    lab.submit("next", npus=8)
    lab.settle()
    assert lab.phase("train") == lab.phase("next") == "Running" and lab.status("train")["attempt"] == 1
    assert {body["spec"]["nodeName"] for body in lab.pods("next")} == {"a", "b"} - {node}
    assert set(lab.operator.turn().stumbles) == {"Pod elsewhere/odd", f"Node {node}"}


def test_pods_of_another_namespace_that_name_an_owner_here_are_nobodys(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train", restartPolicy={"limit": 0})
    lab.serve("shop")
    lab.settle()
    kept = {body["metadata"]["uid"] for body in (*lab.pods("train"), *lab.pods("shop", "service"))}
    for body in list(lab.cluster.of("Pod")):
        spec = {key: value for key, value in body["spec"].items() if key != "nodeName"}
        metadata = {key: body["metadata"][key] for key in ("name", "labels", "ownerReferences")}
        lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "namespace": "elsewhere"}, "spec": spec})
        lab.cluster.set_status("Pod", "elsewhere", metadata["name"], phase="Failed")
    lab.turn(8, 5.0)
    assert lab.phase("train") == lab.phase("shop", "NPUService") == "Running"
    assert {body["metadata"]["uid"] for body in lab.cluster.of("Pod") if body["metadata"]["namespace"] == "lab"} == kept


@pytest.mark.parametrize("name", ["devices.kubevirt.io/kvm", "nvidia.com/gpumem"])
def test_a_job_that_names_another_resource_hides_nobodys_npus(world: Worlds, name: str) -> None:
    lab = world(["a"])
    body = lab.cluster.get("Node", "", "a")
    lab.cluster.set_status("Node", "", "a", capacity={**body["status"]["capacity"], name: "1000"})
    lab.submit("odd", resourceName=name)
    lab.submit("right", npus=8)
    lab.settle()
    assert lab.phase("right") == "Running" and name in lab.status("odd")["message"]


def test_a_job_that_has_ended_says_nothing_of_nodes(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("odd", npus=0, resourceName="example.com/part")
    lab.settle()
    lab.end("odd")
    lab.settle()
    assert lab.phase("odd") == "Succeeded"
    body = lab.cluster.get("Node", "", "a")
    lab.cluster.set_status(
        "Node", "", "a", capacity={**{key: value for key, value in body["status"]["capacity"].items() if "huawei" not in key}, "example.com/part": "4"}
    )
    lab.turn()
    assert [node.resource_name for node in lab.operator.last.nodes] == [""]
