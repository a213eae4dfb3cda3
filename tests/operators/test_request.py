"""What pods ask of a node."""

from __future__ import annotations

import pytest

from semantide.operators.affinity import Expression
from semantide.operators.node import Node, Taint
from semantide.operators.request import Request, Shape, Toleration, shape_of

ASCEND = "huawei.com/Ascend910"


def node(**fields: object) -> Node:
    return Node(**{"name": "n1", "capacity": 8, "ring_size": 4, "resource_name": ASCEND, "labels": {"disk": "ssd", "gen": "3"}, **fields})  # type: ignore[arg-type]


def test_a_template_becomes_a_shape() -> None:
    template = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "npu", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5}],
        "resources": {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "500m"}},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["2"]}]}]
                }
            }
        },
    }
    shape = shape_of("ascend", "", 4, template)
    assert (shape.npus, shape.resource_name, shape.aligned, shape.millicores, shape.memory_bytes) == (4, ASCEND, True, 500, 8 * 2**30)
    assert shape.obstacle(node(taints=(Taint("npu", "x"),))) == ""
    assert shape.obstacle(node(labels={"disk": "ssd", "gen": "2"})) == "kept away by gen Gt 2"
    assert shape.obstacle(node(labels={"gen": "9"})) == "without the label disk=ssd"
    assert shape.obstacle(node(taints=(Taint("npu", "x", "NoExecute"),))) == "with the taint npu=x that is not tolerated"
    assert shape.obstacle(node(taints=(Taint("other", effect="PreferNoSchedule"),))) == ""
    assert shape.obstacle(node(unusable="cordoned")) == "cordoned"
    assert shape.obstacle(node(resource_name="nvidia.com/gpu")) == f"without {ASCEND}"
    assert shape.obstacle(node(capacity=2)) == f"too small (2 {ASCEND})"
    assert shape.obstacle(node(millicores=250.0)) == "too small (0.25 processors)"
    assert shape.obstacle(node(memory_bytes=2.0**30)) == "too small (1 GiB)"


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("In", ["ssd", "nvme"], True),
        ("In", ["hdd"], False),
        ("NotIn", ["hdd"], True),
        ("NotIn", ["ssd"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["1"], False),
        ("Foo", [], False),
    ],
)
def test_expressions(operator: str, values: list[str], fits: bool) -> None:
    assert Expression("disk", operator, tuple(values)).holds({"disk": "ssd"}) == fits


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration("a", "Equal", "b"), True),
        (Toleration("a", "Equal", "c"), False),
        (Toleration("a", "Exists"), True),
        (Toleration(operator="Exists"), True),
        (Toleration(), False),
        (Toleration("a", "Exists", effect="NoExecute"), False),
    ],
)
def test_tolerations(toleration: Toleration, covers: bool) -> None:
    assert toleration.covers(Taint("a", "b")) == covers


def test_a_gang_counts_its_npus() -> None:
    request = Request("x/j", ("j-0", "j-1", "j-2", "j-3"), shape_of("nvidia", "", 8, {}), least=2)
    assert (request.fewest, request.npus, request.shape) == (2, 32, Shape(npus=8, resource_name="nvidia.com/gpu", aligned=False))
    assert Request("x/j", ("j-0",)).fewest == 1 and shape_of("cpu", "", 0, {}).resource_name == ""
    with pytest.raises(ValueError, match="the profile 'cpu' has no devices: name resourceName"):
        shape_of("cpu", "", 2, {})
