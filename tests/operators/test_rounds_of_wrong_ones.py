"""Jobs and services that nothing can be made of: they say why, and nobody else is stopped by them."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from semantide.operators import reconcile, rounds
from semantide.operators.job_states import advance
from semantide.shared.errors import SemantideError

Worlds = Callable[..., Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
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


_SOUND: dict[str, Any] = {
    "labels": {"a": "b"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            _REQUIRED: {
                "nodeSelectorTerms": [
                    {
                        "matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}],
                        "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["z"]}],
                    }
                ]
            }
        },
        "podAffinity": {_REQUIRED: [{"topologyKey": "host", "labelSelector": {"matchLabels": {"q": "r"}}, "namespaces": ["lab"]}]},
    },
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "x"}}],
    "volumes": [{"name": "v", "emptyDir": {}}],
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}},
    "initContainers": [{"name": "i", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}],
    "imagePullSecrets": [{"name": "a"}],
    "ports": [{"name": "http", "containerPort": 8000}],
    "terminationGracePeriodSeconds": 30,
}
_WRONG: tuple[Any, ...] = (
    None,
    "x",
    5,
    -1,
    True,
    1.5,
    [],
    {},
    [None],
    ["x"],
    [{}],
    [[]],
    [{"name": {}, "mountPath": [], "containerPort": {}}],
    "1e400",
    "9" * 400,
)


def _spoilt(sound: Any) -> Iterator[Any]:
    """A value with one place in it after the other of another form."""
    yield from _WRONG
    for key in list(sound) if isinstance(sound, dict) else range(len(sound)) if isinstance(sound, list) else ():
        for wrong in _spoilt(sound[key]):
            copy = deepcopy(sound)
            copy[key] = wrong
            yield copy


@pytest.mark.parametrize("scheduler", ["own", "volcano"])
@pytest.mark.parametrize("field", sorted(_SOUND))
def test_whatever_form_a_template_has_nobody_else_is_stopped_and_the_operator_does_not_stumble(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, field: str, scheduler: str
) -> None:
    sounds = [_SOUND[field]] if field != "affinity" else [{kind: _SOUND[field][kind]} for kind in _SOUND[field]]
    templates = [{field: wrong} for sound in sounds for wrong in _spoilt(sound)]
    lab = world(["a", "b"], rendezvous="dns")
    create = lab.cluster.create

    def refuses(body: Any) -> Any:
        if body["kind"] == "Pod" and "wrong" in body["metadata"]["name"]:
            raise SemantideError("a real API server reads each field")
        return create(body)

    monkeypatch.setattr(lab.cluster, "create", refuses)
    for number, template in enumerate(templates):
        lab.submit(f"wrong-{number}", npus=0, template=template, scheduler=scheduler)
        lab.serve(f"wrong-{number}", npus=0, template=template)
    lab.submit("right")
    lab.serve("right")
    for _ in range(3):
        decided = lab.operator.turn()
        assert {name: error for name, error in decided.stumbles.items() if not isinstance(error, ValueError)} == {}
        lab.nodes.run()
        lab.now += 1.0
    assert lab.phase("right") == lab.phase("right", "NPUService") == "Running"


@pytest.mark.parametrize("part", ["_waiting", "_running", "placed"])
def test_a_job_that_the_line_stumbles_over_stops_nobody_else(world: Worlds, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    lab = world(["a"])
    lab.submit("old")
    lab.settle()
    sound = getattr(reconcile, part)

    def stumbles(look: Any, *others: Any) -> Any:
        if look.job.name in ("odd", "old"):
            raise KeyError("unheard of")
        return sound(look, *others)

    monkeypatch.setattr(reconcile, part, stumbles)
    lab.submit("odd")
    lab.submit("even")
    lab.turn(4, 20.0)
    assert lab.phase("even") == lab.phase("old") == "Running" and lab.status("old")["attempt"] == 1
    assert part == "_running" or ("unheard of" in lab.status("odd")["message"] and lab.phase("odd") == "Pending")
    assert lab.operator.turn().stumbles


def test_a_resource_whose_writing_stumbles_stops_nobody_else(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = world(["a"])
    create = lab.cluster.create

    def stumbles(body: Any) -> Any:
        if body["kind"] == "Pod" and body["metadata"]["name"].startswith("a-odd"):
            raise UnicodeError("no such letter")
        return create(body)

    monkeypatch.setattr(lab.cluster, "create", stumbles)
    lab.submit("a-odd")
    lab.submit("even")
    lab.turn(4, 1.0)
    assert lab.phase("even") == "Running" and not lab.pods("a-odd")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("NPUJob", name) for name in ("restartTime", "reasonTime", "slowTime", "queueTime", "placedTime", "startTime", "completionTime")),
        *(("NPUService", name) for name in ("scaleTime", "crampedTime")),
    ],
)
@pytest.mark.parametrize("npus", [4, 64])
def test_a_time_in_a_status_that_nobody_can_read_is_told_and_stops_nobody_else(world: Worlds, kind: str, field: str, npus: int) -> None:
    lab = world(["a"])
    lab.submit("odd", npus=npus) if kind == "NPUJob" else lab.serve("odd", npus=npus)
    lab.settle()
    body = lab.cluster.get(kind, "lab", "odd")
    lab.cluster.replace_status({**body, "status": {**body["status"], field: "yesterday"}})
    lab.submit("right")
    lab.turn(6, 20.0)
    assert lab.phase("right") == "Running" and "yesterday" in lab.status("odd", kind)["message"]
    assert lab.status("odd", kind)["phase"] == body["status"]["phase"]


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
