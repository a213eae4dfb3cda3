"""Pods go near those that their template wants them near, as Kubernetes' scheduler will insist; a volume of one node is such a wish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.affinity import Expression, Neighbourhood, nears
from semantide.operators.node import Node
from semantide.operators.placement import Placement, place
from semantide.operators.pods import Pod
from semantide.operators.request import Request, Shape, shape_of

Worlds = Callable[..., Any]
HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
DATA = "semantide.io/data"


def near(topology: str = HOST, **term: Any) -> dict[str, Any]:
    """A template of pods that hold one volume together."""
    required = [{"topologyKey": topology, "labelSelector": {"matchLabels": {DATA: "shop"}}, **term}]
    return {"labels": {DATA: "shop"}, "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def three(world: Worlds, **settings: Any) -> Any:
    lab = world([], **settings)
    for name in "abc":
        lab.nodes.add(name, **{HOST: name})
    return lab


def room_pod(lab: Any, node: str, namespace: str = "lab", phase: str = "Running", name: str = "api") -> None:
    """A pod of a room, which holds the volume."""
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "api", "uid": "replicas", "controller": True}
    metadata = {"name": name, "namespace": namespace, "labels": {DATA: "shop"}, "ownerReferences": [owner]}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node, "containers": []}})
    lab.cluster.set_status("Pod", namespace, name, phase=phase)


def nodes_of(lab: Any, name: str, kind: str = "NPUJob") -> set[str]:
    return {entry["node"] for entry in lab.status(name, kind).get("placement", ())}


def test_pods_go_where_the_volume_is(world: Worlds) -> None:
    lab = three(world)
    room_pod(lab, "b")
    room_pod(lab, "a", namespace="another")
    room_pod(lab, "c", phase="Succeeded", name="hook")
    lab.submit("small", npus=2, template=near())
    lab.submit("gang", pods=2, npus=2, template=near())
    lab.serve("shop", low=1, high=1, npus=1, template=near())
    lab.submit("anywhere", npus=8)
    lab.settle()
    assert nodes_of(lab, "small") == nodes_of(lab, "gang") == nodes_of(lab, "shop", "NPUService") == {"b"}
    assert nodes_of(lab, "anywhere") != {"b"}


def test_a_job_without_room_near_the_volume_says_so(world: Worlds) -> None:
    lab = three(world)
    room_pod(lab, "b")
    lab.submit("full", npus=8)
    lab.submit("train", pods=2, npus=8, template=near())
    lab.settle()
    message = lab.status("train")["message"]
    assert lab.phase("train") == "Pending" and "only 1 such pod fits on the 1 node that may carry them" in message, message
    assert f"2 are not where pods with {DATA}=shop are ({HOST} b)" in message, message


def test_without_anybody_there_a_gang_keeps_together_and_the_next_one_follows(world: Worlds) -> None:
    lab = three(world)
    lab.submit("first", pods=3, npus=2, template=near())
    lab.settle()
    (node,) = nodes_of(lab, "first")
    lab.submit("second", npus=2, template=near())
    lab.submit("large", pods=3, npus=4, template=near())
    lab.settle()
    assert nodes_of(lab, "second") == {node}
    lab.end("first")
    lab.end("second")
    lab.turn(3, 20.0)
    assert "only 2 such pods fit" in lab.status("large")["message"] and f"with one {HOST}" in lab.status("large")["message"]


def test_what_is_not_there_is_named(world: Worlds) -> None:
    lab = three(world)
    template = near()
    lab.submit("stranger", npus=1, template={**template, "labels": {DATA: "other"}})
    lab.submit("wrong", npus=1, template=near(topology=""))
    lab.settle()
    assert f"near pods with {DATA}=shop, of which none runs" in lab.status("stranger")["message"]
    assert "topologyKey" in lab.status("wrong")["message"]


def test_an_elastic_gang_does_not_stop_to_grow_where_it_may_not_go(world: Worlds) -> None:
    lab = three(world, steady_seconds=10.0)
    lab.submit("train", pods=2, npus=8, elastic={"min": 1, "max": 2}, template=near())
    lab.settle()
    assert lab.phase("train") == "Running" and len(nodes_of(lab, "train")) == 1
    lab.turn(10, 30.0)
    assert lab.status("train")["attempt"] == 1


def test_terms_that_only_kubernetes_can_judge_are_left_to_it() -> None:
    assert nears(near(namespaceSelector={}), "lab") == nears({"affinity": {"podAntiAffinity": {}}}, "lab") == []
    (found,) = nears(near(namespaces=["x", "y"], labelSelector={}), "lab")
    assert found.means("x", {}) and not found.means("lab", {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    for wrong in ("text", {"podAffinity": "text"}, {"podAffinity": {required: {"a": 1}}}, {"podAffinity": {required: ["text"]}}):
        with pytest.raises(ValueError, match=r"template\.affinity"):
            nears({"affinity": wrong}, "lab")


@given(
    homes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["shop", "other"]), st.booleans()), max_size=5),
    zones=st.lists(st.sampled_from(["x", "y", "z"]), min_size=6, max_size=6),
    pods=st.integers(1, 6),
    least=st.integers(1, 6),
    topology=st.sampled_from([HOST, ZONE]),
)
def test_every_place_is_one_that_kubernetes_would_take(homes: list[tuple[int, str, bool]], zones: list[str], pods: int, least: int, topology: str) -> None:
    """Pod by pod: near somebody who is there, or the first of its kind; and no place is missed where there is one."""
    nodes = {f"n{number}": Node(f"n{number}", capacity=4, resource_name="npu", labels={HOST: f"n{number}", ZONE: zone}) for number, zone in enumerate(zones)}
    there = [
        Pod("lab", f"p{number}", f"u{number}", owner="o", node=f"n{home}", labels={DATA: kind}, phase="Failed" if over else "Running")
        for number, (home, kind, over) in enumerate(homes)
    ]
    template = near(topology)
    expressions, together = Neighbourhood(there, nodes).wanted(template, "lab", {DATA: "shop"})
    shape = shape_of("ascend", "npu", 2, template, expressions, together)
    found = place(Request("x/j", tuple(f"j-{rank}" for rank in range(pods)), shape, least=min(least, pods)), nodes.values())
    values = {nodes[pod.node].labels[topology] for pod in there if not pod.finished and pod.labels[DATA] == "shop"}
    room = {value: sum(2 for node in nodes.values() if node.labels[topology] == value) for value in {node.labels[topology] for node in nodes.values()}}
    most = sum(room[value] for value in values) if values else max(room.values())
    if isinstance(found, Placement):
        used = {nodes[pod.node].labels[topology] for pod in found.pods}
        assert used <= values if values else len(used) == 1
        assert len(found.pods) == min(pods, most)
    else:
        assert most < min(least, pods)
        assert Shape() != shape and str(found)


def test_an_expression_speaks_of_a_place_where_it_has_one() -> None:
    expression = Expression(HOST, "In", ("a",), "where pods with x=y are")
    assert Shape(terms=((expression,),)).obstacle(Node("b", labels={HOST: "b"})) == "not where pods with x=y are"
