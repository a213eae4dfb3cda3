"""Dynamic resource allocation on the cluster in memory: what drivers offer and what claims took reaches placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.claimed_devices import claimed_devices
from semantide.operators.inventory import read_nodes
from semantide.shared.errors import PermanentError

Worlds = Callable[..., Any]
DRIVER = "npu.huawei.com"


def offered(lab: Any, node: str, npus: int = 8, generation: int = 1, **taints: Any) -> dict[str, Any]:
    """A driver's slice for one node."""
    devices = [
        {"name": f"npu-{index}", "attributes": {"index": {"int": index}}, **({"taints": [{"effect": "NoSchedule"}]} if taints.get(f"npu{index}") else {})}
        for index in range(npus)
    ]
    spec = {"driver": DRIVER, "nodeName": node, "pool": {"name": node, "generation": generation}, "devices": devices}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{node}-{generation}"}, "spec": spec}
    return lab.cluster.create(body)  # type: ignore[no-any-return]


def claim(lab: Any, name: str, node: str, npus: list[int], *, pod: str = "", reserved: bool = True, **result: Any) -> None:
    """A claim that the scheduler has allocated."""
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": "u", "controller": True}] if pod else []
    results = [{"driver": DRIVER, "pool": node, "device": f"npu-{npu}", **result} for npu in npus]
    status = {"allocation": {"devices": {"results": results}}, **({"reservedFor": [{"resource": "pods", "name": pod or "foreign"}]} if reserved else {})}
    metadata = {"name": name, "namespace": "lab", "ownerReferences": owners}
    lab.cluster.create({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "status": status})


def claims_of(lab: Any, nodes: dict[str, list[int]]) -> None:
    """What the scheduler does: every bound pod that claims gets a claim of its own, with devices of the scheduler's choice."""
    for body in lab.cluster.of("Pod"):
        name = f"{body['metadata']['name']}-npus"
        if body["spec"].get("resourceClaims") and body["spec"].get("nodeName") and ("ResourceClaim", "lab", name) not in lab.cluster.objects:
            count = len(body["metadata"]["annotations"]["semantide.io/npus"].split(","))
            node = body["spec"]["nodeName"]
            chosen, nodes[node] = nodes[node][:count], nodes[node][count:]
            assert len(chosen) == count, f"{name} finds no devices on {node}"
            claim(lab, name, node, chosen, pod=body["metadata"]["name"])


def test_what_others_claimed_is_not_free_and_our_own_counts_once(world: Worlds) -> None:
    lab = world(["a"], npus=0, dynamic_resources=True, device_info_seconds=1)
    offered(lab, "a")
    claim(lab, "foreign", "a", [6, 7])
    free = {"a": [5, 4, 3, 2, 1, 0]}  # the scheduler's choice is not the operator's
    for name in ("one", "two", "three", "four"):
        lab.submit(name, npus=2)
        for _ in range(4):
            lab.turn(1, 2.0)
            claims_of(lab, free)
    assert [lab.phase(name) for name in ("one", "two", "three", "four")] == ["Running", "Running", "Running", "Pending"]
    assert "2 huawei.com/Ascend910" in lab.status("four")["message"] and free == {"a": []}
    (node,) = lab.operator.last.nodes
    assert node.free == 0 and len(node.held) == 8 and node.held[7] == "lab/foreign"


def test_a_claim_that_is_not_reserved_yet_is_its_pods_and_who_only_watches_takes_nothing(world: Worlds) -> None:
    lab = world(["a"], npus=0, dynamic_resources=True, device_info_seconds=1)
    offered(lab, "a")
    lab.submit("train", npus=4)
    lab.turn(2, 2.0)
    (pod,) = lab.pods("train")
    claim(lab, "own", "a", [4, 5, 6, 7], pod=pod["metadata"]["name"], reserved=False)
    claim(lab, "monitor", "a", list(range(8)), adminAccess=True)
    lab.turn(2, 2.0)
    (node,) = lab.operator.last.nodes
    assert node.held == dict.fromkeys((4, 5, 6, 7), f"lab/{pod['metadata']['name']}")


def test_a_plugins_devices_are_none_where_pods_claim_and_the_name_of_its_resource_says_nothing(world: Worlds) -> None:
    lab = world(["plugin", "driver"], dynamic_resources=True, resource_name="huawei.com/npu")
    offered(lab, "driver", 4)
    lab.submit("train", npus=4)
    lab.submit("large", npus=8)
    lab.settle()
    assert [place["node"] for place in lab.status("train")["placement"]] == ["driver"]
    assert lab.phase("large") == "Pending"


def test_tainted_devices_and_old_generations_are_not_offered(world: Worlds) -> None:
    lab = world(["a"], npus=0, dynamic_resources=True)
    offered(lab, "a", 8)
    offered(lab, "a", 4, generation=2, npu3=True)
    lab.submit("four", npus=4)
    lab.submit("three", npus=2)
    lab.settle()
    assert (lab.phase("four"), lab.phase("three")) == ("Pending", "Running")


def test_templates_of_claims_of_earlier_revisions_go(world: Worlds) -> None:
    lab = world(["a"], npus=0, dynamic_resources=True)
    offered(lab, "a")
    lab.serve("shop", low=2, high=2)
    lab.settle()
    (first,) = lab.cluster.of("ResourceClaimTemplate")
    for model in ("models/b", "models/c"):
        lab.change("NPUService", "shop", model=model)
        lab.turn(30, 1.0)
    (last,) = lab.cluster.of("ResourceClaimTemplate")
    assert last["metadata"]["name"] != first["metadata"]["name"]
    assert {pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] for pod in lab.pods("shop", "service")} == {last["metadata"]["name"]}


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), max_size=4), st.lists(st.permutations(range(8)), min_size=1, max_size=1))
def test_whoever_was_given_what_no_more_is_free_than_there_is(wished: list[list[int]], order: list[list[int]]) -> None:
    """Half of the pods have their claims, on devices of the scheduler's own choice; the others have only what the operator meant for them."""
    devices = [{"name": f"npu-{index}"} for index in range(8)]
    slices = [{"spec": {"driver": DRIVER, "nodeName": "a", "pool": {"name": "a"}, "devices": devices}}]
    free: Iterator[int] = iter(order[0])
    pods, claims, promised = [], [], 0
    for at, npus in enumerate(wished):
        if promised + len(npus) > 8:
            break
        promised += len(npus)
        annotations = {"semantide.io/npus": ",".join(map(str, npus)), "semantide.io/node": "a"}
        pods.append({"metadata": {"name": f"p{at}", "namespace": "x", "annotations": annotations}, "spec": {"nodeName": "a"}, "status": {"phase": "Running"}})
        if at % 2 == 0:
            results = [{"driver": DRIVER, "pool": "a", "device": f"npu-{next(free)}"} for _ in npus]
            reserved = [{"resource": "pods", "name": f"p{at}"}]
            claims.append(
                {"metadata": {"name": f"c{at}", "namespace": "x"}, "status": {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}}
            )
    named = {npu for at, npus in enumerate(wished[: len(pods)]) if at % 2 for npu in npus}
    body = {"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    (node,) = read_nodes([body], pods, claimed=claimed_devices(slices, claims))
    alone = sum(len(npus) for at, npus in enumerate(wished[: len(pods)]) if at % 2)
    if len(named) == alone:  # the operator gives no device to two
        assert node.free.bit_count() == 8 - promised


def test_remains_that_may_not_be_deleted_stop_nothing(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 5, "backoffSeconds": 0})
    lab.settle()

    def forbidden(verb: str, kind: str, name: str) -> None:
        if verb == "delete" and kind == "ConfigMap":
            raise PermanentError("may not")

    lab.cluster.fails = forbidden
    lab.end("train", rank=1, status=1)
    lab.turn(10, 5.0)
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
