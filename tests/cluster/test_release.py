"""Real Helm on a real control plane: install, upgrade from the chart before, roll back, uninstall; keys and data stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .api import Api, Object, until
from .control_plane import ControlPlane
from .release import BY_CLIENT, CHART, PREVIOUS_CHART, Release, chart_without, definitions, remove_definitions, unbound, unpacked
from .simulated_nodes import SimulatedNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_WAIT = ("--wait", "--timeout", "10m")


@pytest.fixture
def volumes(plane: ControlPlane, api: Api, namespace: str) -> Iterator[list[str]]:
    """A node that runs pods, and volumes that claims may bind."""
    with SimulatedNodes(plane.kubeconfig) as nodes:
        nodes.add("release-node", {})
        names = [f"{namespace}-{number}" for number in range(4)]
        for name in names:
            spec: Object = {"capacity": {"storage": "100Gi"}, "accessModes": ["ReadWriteOnce", "ReadWriteMany"], "hostPath": {"path": f"/nowhere/{name}"}}
            api.create("persistentvolumes", {"metadata": {"name": name}, "spec": spec | {"persistentVolumeReclaimPolicy": "Retain"}})
        yield names
        for name in names:
            api.delete("persistentvolumes", name)


@pytest.fixture
def release(plane: ControlPlane, api: Api, namespace: str) -> Iterator[Release]:
    remove_definitions(api)
    yield Release("shop", namespace, plane.kubeconfig)
    remove_definitions(api)


def _kept(api: Api, namespace: str) -> dict[str, str]:
    """What must outlive every change of the release: claims by identity, secrets by content."""
    claims = {f"claim {one['metadata']['name']}": one["metadata"]["uid"] for one in api.list("persistentvolumeclaims", namespace)}
    secrets = [one for one in api.list("secrets", namespace) if one["type"] == "Opaque"]
    return claims | {f"secret {one['metadata']['name']}": str(sorted(one["data"].items())) for one in secrets}


def _custom_resources(api: Api) -> set[str]:
    return {one["metadata"]["name"] for one in definitions(api)}


def test_upgrade_roll_back_and_uninstall_keep_keys_and_data(api: Api, namespace: str, volumes: list[str], release: Release, tmp_path: Path) -> None:
    previous, new = unbound(unpacked(PREVIOUS_CHART, tmp_path / "previous"), tmp_path), unbound(CHART, tmp_path)
    release.install(previous, BY_CLIENT, *_WAIT)
    first = _kept(api, namespace)
    assert sum(name.startswith("claim") for name in first) == 2 and sum(name.startswith("secret") for name in first) >= 1
    assert not _custom_resources(api)

    release.upgrade(new, *_WAIT)
    assert _custom_resources(api) == {"npujobs.semantide.io", "npuservices.semantide.io"}
    assert first.items() <= _kept(api, namespace).items()
    _all_ready(api, namespace)

    release.roll_back(1)
    until(lambda: not [one for one in api.list("deployments", namespace) if "operator" in one["metadata"]["name"]], "the operator is gone")
    assert first.items() <= _kept(api, namespace).items()
    _all_ready(api, namespace)

    release.upgrade(new, *_WAIT)
    job = {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "metadata": {"name": "mine"}, "spec": {"kind": "train"}}
    api.create("npujobs", job, namespace)
    release.uninstall()
    until(lambda: not api.list("pods", namespace), "its pods are gone")
    assert {name for name in _kept(api, namespace) if name.startswith("claim")} == {name for name in first if name.startswith("claim")}
    assert api.find("npujobs", "mine", namespace) is not None, "uninstalling must not delete users' jobs"


def test_a_field_that_a_newer_chart_brings_is_accepted_after_the_upgrade(
    api: Api, namespace: str, volumes: list[str], release: Release, tmp_path: Path
) -> None:
    new = unbound(CHART, tmp_path)
    release.install(chart_without(new, tmp_path, "crd-npujob.yaml", "deadlineSeconds"))
    job: Object = {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "metadata": {"name": "before"}, "spec": {"kind": "train", "deadlineSeconds": 60}}
    until(lambda: "npujobs.semantide.io" in _custom_resources(api), "the custom resource is there")
    created = until(lambda: api.create("npujobs", job, namespace), "a job can be made")
    assert "deadlineSeconds" not in created["spec"]
    release.upgrade(new)

    def accepted() -> bool:
        api.delete("npujobs", "after", namespace)
        made = api.create("npujobs", job | {"metadata": {"name": "after"}}, namespace)
        return made["spec"].get("deadlineSeconds") == 60

    until(accepted, "the new field is kept")
    release.uninstall()


def _all_ready(api: Api, namespace: str) -> None:
    def ready() -> bool:
        sets = [*api.list("deployments", namespace), *api.list("statefulsets", namespace)]
        return bool(sets) and all(one["status"].get("readyReplicas", 0) >= one["spec"]["replicas"] for one in sets)

    until(ready, "every process of the release is ready")
