"""Real kubelets: pods run, get NPUs from a device plugin, find one another by name, and are lost with their node."""

from __future__ import annotations

import pytest

from .api import Api, Object, until
from .device_plugin import DevicePlugin, offered
from .docker_engine import BASE_IMAGE
from .kubelet import Kubelet

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

_RESOURCE = "huawei.com/Ascend910"


def _counted_on(api: Api, node: str) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in api.get("nodes", node)["status"]["conditions"])


def _pod(name: str, script: str, node: str = "", npus: int = 0, **more: object) -> Object:
    container: Object = {"name": "main", "image": BASE_IMAGE, "command": ["python3", "-c", script]}
    if npus:
        container["resources"] = {"limits": {_RESOURCE: str(npus)}}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **more}
    return {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec | ({"nodeName": node} if node else {})}


def _said(api: Api, name: str, namespace: str) -> str:
    """What a pod left as its last words, once it has ended well."""
    phase = until(lambda: (said := api.get("pods", name, namespace)["status"]["phase"]) in ("Succeeded", "Failed") and said, f"{name} has ended")
    terminated = api.get("pods", name, namespace)["status"]["containerStatuses"][0]["state"]["terminated"]
    assert phase == "Succeeded", terminated
    return str(terminated.get("message", ""))


_TELL = "open('/dev/termination-log', 'w').write(%s)"


def test_a_pod_sees_the_npus_that_it_got_and_a_broken_one_is_not_given(real_api: Api, real_namespace: str, npus: DevicePlugin) -> None:
    script = "import os; " + _TELL % "os.environ['ASCEND_VISIBLE_DEVICES']"
    real_api.create("pods", _pod("two", script, npus=2), real_namespace)
    seen = _said(real_api, "two", real_namespace).split(",")
    assert len(set(seen)) == 2 and set(seen) <= {str(npu) for npu in range(8)}
    npus.set_health(5, False)
    until(lambda: offered(real_api, _RESOURCE) == 7, "7 NPUs are offered")
    real_api.create("pods", _pod("seven", script, npus=7), real_namespace)
    assert _said(real_api, "seven", real_namespace).split(",") == [str(npu) for npu in range(8) if npu != 5]


def test_pods_of_two_nodes_find_each_other_by_name(real_api: Api, real_namespace: str) -> None:
    service = {"metadata": {"name": "team"}, "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "server"}}}
    real_api.create("services", service | {"spec": {**service["spec"], "ports": [{"port": 7000}]}}, real_namespace)
    serve = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    real_api.create("pods", _pod("server", serve, "node-a", hostname="rank-0", subdomain="team"), real_namespace)
    ask = (
        "import socket, time\n"
        "for _ in range(600):\n"
        "    try:\n"
        "        said = socket.create_connection(('rank-0.team', 7000)).recv(5).decode(); break\n"
        "    except OSError: time.sleep(0.2)\n" + _TELL % "said"
    )
    real_api.create("pods", _pod("client", ask, "node-b"), real_namespace)
    assert _said(real_api, "client", real_namespace) == "hello"
    assert _said(real_api, "server", real_namespace) == ""


def test_the_pods_of_a_lost_node_are_lost_and_the_other_nodes_stay(real_api: Api, real_namespace: str, nodes: dict[str, Kubelet]) -> None:
    for name in ("node-a", "node-b"):
        real_api.create("pods", _pod(f"on-{name}", "import time; time.sleep(3600)", name), real_namespace)
    for name in ("node-a", "node-b"):
        until(lambda name=name: real_api.get("pods", f"on-{name}", real_namespace)["status"]["phase"] == "Running", f"the pod on {name} runs")
    nodes["node-b"].lose()
    try:
        until(lambda: not _counted_on(real_api, "node-b"), "nobody counts on the lost node any more")
        # Kubernetes 1.20 forgets to evict its pods where its view of the node lags for a moment: who needs them gone says so, as the operator does.
        real_api.delete("pods", "on-node-b", real_namespace, grace_seconds=1)
        assert "deletionTimestamp" in real_api.get("pods", "on-node-b", real_namespace)["metadata"]
        assert real_api.get("pods", "on-node-a", real_namespace)["status"]["phase"] == "Running"
        assert nodes["node-a"].containers() and not nodes["node-b"].containers()
    finally:
        nodes["node-b"].come_back()
    until(lambda: real_api.find("pods", "on-node-b", real_namespace) is None, "the node that came back lets its lost pod go")
