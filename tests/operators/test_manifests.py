"""All that the operator writes is what an API server takes: Kubernetes' own schemas, and Volcano's for its PodGroup."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from .podgroup_schema import PODGROUP

Worlds = Callable[..., Any]

_TEMPLATE = {
    "labels": {"ring-controller.atlas": "ascend-910b"},
    "annotations": {"huawei.com/schedule_policy": "chip4-node8"},
    "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    "env": [{"name": "A", "value": "1"}],
    "initContainers": [{"name": "sidecar", "image": "x", "restartPolicy": "Always"}],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "containerSecurityContext": {"runAsNonRoot": True},
    "tolerations": [{"key": "npu", "operator": "Exists"}],
}


def check(manifest: dict[str, Any], version: str) -> None:
    """Raises: ValidationError."""
    if manifest["apiVersion"].startswith("scheduling.volcano.sh/"):
        jsonschema.validate(manifest, PODGROUP)
    elif manifest["kind"] not in ("Node", "NPUJob", "NPUService"):
        kubernetes_validate.validate(manifest, version, strict=True)


def written(lab: Any) -> list[dict[str, Any]]:
    """What the operator asked an API server to make."""
    made: list[dict[str, Any]] = []
    create = lab.cluster.create

    def record(body: Any) -> Any:
        made.append(json.loads(json.dumps(dict(body))))
        return create(body)

    lab.cluster.create = record
    lab.submit("train", pods=2, npus=4, template=_TEMPLATE)
    lab.serve("shop", 1, 1, npus=2, template=_TEMPLATE)
    lab.settle()
    assert lab.phase("train") == "Running" and lab.phase("shop", "NPUService") == "Running"
    return made


@pytest.mark.parametrize("scheduler", ["own", "volcano", "native"])
@pytest.mark.parametrize("settings", [{}, {"dynamic_resources": True, "rendezvous": "dns"}])
def test_every_object_is_one_that_its_server_takes(world: Worlds, scheduler: str, settings: dict[str, Any]) -> None:
    lab = world(["a", "b"], scheduler=scheduler, **settings)
    if settings:
        for node in ("a", "b"):
            devices = [{"name": f"npu-{index}", "attributes": {"index": {"int": index}}} for index in range(8)]
            spec = {"driver": "npu.huawei.com", "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}
            lab.cluster.create({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})
    made = written(lab)
    kinds = {body["kind"] for body in made}
    assert {"Pod", "ConfigMap", "Service", "Event"} <= kinds
    assert ("PodGroup" in kinds) == (scheduler != "own") and ("ResourceClaimTemplate" in kinds) == bool(settings)
    versions = {"1.37"} if scheduler == "native" else {"1.34", "1.37"} if settings else {"1.28", "1.33", "1.37"}
    for body in made:
        for version in versions:
            check(body, version)


def test_volcano_hears_what_its_plugins_read(world: Worlds) -> None:
    lab = world(["a", "b"], scheduler="volcano")
    (group,) = (body for body in written(lab) if body["kind"] == "PodGroup")
    assert group["spec"]["minMember"] == 2 and group["spec"]["minResources"] == {"huawei.com/Ascend910": "8", "cpu": "4000m", "memory": str(8 * 2**30)}
    assert group["metadata"]["labels"]["ring-controller.atlas"] == "ascend-910b"
    assert group["metadata"]["annotations"] == {"huawei.com/schedule_policy": "chip4-node8"}


@pytest.mark.parametrize("wrong", [{"minMember": "2"}, {"minMembers": 2}, {"minResources": {"cpu": "two"}}, {"queue": 1}])
def test_the_schema_of_a_podgroup_refuses_what_a_server_would(wrong: dict[str, Any]) -> None:
    good = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": {"name": "g"}, "spec": {"minMember": 2}}
    check(good, "1.37")
    with pytest.raises(jsonschema.ValidationError):
        check({**good, "spec": {**good["spec"], **wrong}}, "1.37")
