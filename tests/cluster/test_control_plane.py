"""The control plane of these tests is a real one, and its played nodes do what nodes do."""

from __future__ import annotations

import pytest

from .api import Api, Object, Refused, until
from .control_plane import ControlPlane
from .simulated_nodes import Fate, SimulatedNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

_RESOURCE = "huawei.com/Ascend910"


def _pod(name: str, npus: int) -> Object:
    container = {"name": "main", "image": "nothing", "resources": {"limits": {_RESOURCE: str(npus)}}}
    return {"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}}


def test_the_scheduler_gives_npus_to_pods_and_no_more_than_there_are(plane: ControlPlane, api: Api, namespace: str) -> None:
    with SimulatedNodes(plane.kubeconfig) as nodes:
        nodes.add("eight", {_RESOURCE: "8"})
        for name in ("first", "second", "third"):
            api.create("pods", _pod(name, 4), namespace)
        running = until(
            lambda: [pod for pod in api.list("pods", namespace) if pod["status"]["phase"] == "Running"][1:] and api.list("pods", namespace), "two run"
        )
        waiting = [pod for pod in running if pod["status"]["phase"] == "Pending"]
        assert len(waiting) == 1 and {pod["spec"].get("nodeName") for pod in running if pod not in waiting} == {"eight"}
        # What ends makes room.
        done = next(pod for pod in running if pod not in waiting)
        api.delete("pods", done["metadata"]["name"], namespace)
        until(lambda: api.get("pods", waiting[0]["metadata"]["name"], namespace)["status"]["phase"] == "Running", "the third runs")


def test_pods_end_as_their_fate_says(plane: ControlPlane, api: Api, namespace: str) -> None:
    with SimulatedNodes(plane.kubeconfig, lambda pod: Fate(exit_code=3 if pod["metadata"]["name"] == "bad" else 0)) as nodes:
        nodes.add("any", {_RESOURCE: "8"})
        for name in ("good", "bad"):
            api.create("pods", _pod(name, 1), namespace)
        phases = until(lambda: _ended(api.list("pods", namespace)), "both have ended")
        assert phases == {"good": ("Succeeded", 0), "bad": ("Failed", 3)}


def test_an_account_may_do_what_its_role_says_and_nothing_else(plane: ControlPlane, api: Api, namespace: str) -> None:
    api.create("serviceaccounts", {"metadata": {"name": "reader"}}, namespace)
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}
    api.create("roles", {"metadata": {"name": "reader"}, "rules": [rule]}, namespace)
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    api.create("rolebindings", {"metadata": {"name": "reader"}, "subjects": [subject], "roleRef": role}, namespace)
    reader = Api(plane.account_kubeconfig("reader", namespace))

    def allowed() -> bool:
        try:
            return isinstance(reader.list("configmaps", namespace), list)
        except Refused:
            return False

    until(allowed, "the role counts")
    with pytest.raises(Refused, match="403"):
        reader.create("configmaps", {"metadata": {"name": "mine"}}, namespace)
    with pytest.raises(Refused, match="403"):
        reader.list("secrets", namespace)
    reader.close()


def test_a_restarted_api_server_keeps_its_objects(plane: ControlPlane, api: Api, namespace: str) -> None:
    api.create("configmaps", {"metadata": {"name": "kept"}, "data": {"a": "1"}}, namespace)
    plane.restart_api_server()
    assert api.get("configmaps", "kept", namespace)["data"] == {"a": "1"}


def _ended(pods: list[Object]) -> dict[str, tuple[str, int]] | None:
    said = {pod["metadata"]["name"]: pod["status"] for pod in pods}
    if any(status["phase"] not in ("Succeeded", "Failed") for status in said.values()):
        return None
    return {name: (status["phase"], status["containerStatuses"][0]["state"]["terminated"]["exitCode"]) for name, status in said.items()}
