"""One trouble at a time, on a real control plane: no room, a lost node, a lost API server, two operators, no operator."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from .api import Api, Object, until
from .control_plane import ControlPlane
from .job_play import JOB, left_behind
from .operator_process import OperatorProcess
from .release import kubectl
from .simulated_nodes import SimulatedNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def _make(api: Api, namespace: str, name: str, **spec: Any) -> None:
    own = {"kind": "train", "image": "nothing", "profile": "ascend", "worldSize": 1, "npusPerPod": 8, "restartPolicy": {"limit": 5, "backoffSeconds": 0.1}}
    api.create("npujobs", {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "metadata": {"name": name}, "spec": own | spec}, namespace)


def _status(api: Api, namespace: str, name: str) -> Object:
    found: Object = api.get("npujobs", name, namespace).get("status") or {}
    return found


def _until_phase(api: Api, namespace: str, name: str, phase: str) -> Object:
    found: Object = until(lambda: (said := _status(api, namespace, name)).get("phase") == phase and said, f"{name} is {phase}")
    return found


def _nodes_of(api: Api, namespace: str, name: str) -> list[str]:
    pods = api.list("pods", namespace, f"{JOB}={name}")
    return sorted(pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"])


def test_a_job_without_room_says_why_and_runs_once_there_is_some(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    _make(api, namespace, "stay-wide", npusPerPod=16)
    said = until(lambda: "16" in (message := _status(api, namespace, "stay-wide").get("message", "")) and message, "it says what it asked for")
    assert "8" in said, said
    assert _status(api, namespace, "stay-wide")["phase"] == "Pending" and not api.list("pods", namespace, f"{JOB}=stay-wide")
    _make(api, namespace, "stay-all", worldSize=12)
    _until_phase(api, namespace, "stay-all", "Running")
    _make(api, namespace, "good-next", npusPerPod=4)
    until(lambda: "4" in _status(api, namespace, "good-next").get("message", ""), "it says what it asked for")
    api.delete("npujobs", "stay-all", namespace)
    _until_phase(api, namespace, "good-next", "Succeeded")


def test_a_gang_that_lost_a_node_starts_again_on_others(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    _make(api, namespace, "stay-four", worldSize=4)
    _until_phase(api, namespace, "stay-four", "Running")
    lost = until(lambda: len(found := _nodes_of(api, namespace, "stay-four")) == 4 and found, "four pods run")[0]
    played.lose(lost)
    until(lambda: len(found := _nodes_of(api, namespace, "stay-four")) == 4 and lost not in found, "four pods run elsewhere")
    said = _until_phase(api, namespace, "stay-four", "Running")
    assert said["restarts"] == 1 and lost not in {one["node"] for one in said["placement"]}


def test_an_elastic_job_goes_on_smaller(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    _make(api, namespace, "stay-elastic", worldSize=12, elastic={"min": 4, "max": 12})
    until(lambda: len(_nodes_of(api, namespace, "stay-elastic")) == 12, "twelve pods run")
    for number in range(5):
        played.lose(f"played-{number:02}")
    until(lambda: 4 <= len(found := _nodes_of(api, namespace, "stay-elastic")) <= 7 and "played-00" not in found, "it runs on what is left")
    said = _until_phase(api, namespace, "stay-elastic", "Running")
    assert 4 <= len(said["placement"]) <= 7


def test_of_two_operators_one_acts_and_the_other_takes_over(
    operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str, plane: ControlPlane, tmp_path: Path
) -> None:
    credentials = plane.folder / f"{namespace}-semantide-operator.kubeconfig"
    with OperatorProcess(credentials, tmp_path / "second", namespace=namespace, own_namespace=namespace) as second:
        for number in range(6):
            _make(api, namespace, f"good-{number}", worldSize=2, npusPerPod=4)
        for number in range(6):
            said = _until_phase(api, namespace, f"good-{number}", "Succeeded")
            assert said["restarts"] == 0, "two of them acted"
        operator.kill()
        _make(api, namespace, "good-after", worldSize=2)
        _until_phase(api, namespace, "good-after", "Succeeded")
        second.check()


def test_what_is_deleted_while_no_operator_runs_goes_once_one_does(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    _make(api, namespace, "stay-orphan", worldSize=3)
    until(lambda: len(_nodes_of(api, namespace, "stay-orphan")) == 3, "three pods run")
    operator.kill()
    api.delete("npujobs", "stay-orphan", namespace)
    operator.start()
    until(lambda: api.find("npujobs", "stay-orphan", namespace) is None, "it is gone")
    until(lambda: not api.list("pods", namespace, f"{JOB}=stay-orphan") and not left_behind(api, namespace), "nothing of it is left")


def test_a_job_survives_the_api_server(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str, plane: ControlPlane) -> None:
    _make(api, namespace, "stay-on", worldSize=2)
    until(lambda: len(_nodes_of(api, namespace, "stay-on")) == 2, "two pods run")
    before = {pod["metadata"]["uid"] for pod in api.list("pods", namespace, f"{JOB}=stay-on")}
    plane.restart_api_server()
    _make(api, namespace, "good-later", worldSize=2)
    _until_phase(api, namespace, "good-later", "Succeeded")
    operator.check()
    assert {pod["metadata"]["uid"] for pod in api.list("pods", namespace, f"{JOB}=stay-on")} == before, "a job that ran was touched"


def test_kubectl_waits_for_jobs_and_prints_them(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str, plane: ControlPlane) -> None:
    _make(api, namespace, "good-one", worldSize=2, npusPerPod=2)
    wait = kubectl(plane.kubeconfig, "wait", "npujob/good-one", "--namespace", namespace, "--for=condition=Succeeded", "--timeout=300s")
    assert "condition met" in wait
    printed = kubectl(plane.kubeconfig, "get", "npujobs", "--namespace", namespace)
    assert "Succeeded" in printed and "good-one" in printed, printed
    with pytest.raises(subprocess.CalledProcessError) as refused:
        kubectl(plane.kubeconfig, "patch", "npujob", "good-one", "--namespace", namespace, "--type=merge", "--patch", '{"spec": {"worldSize": 0}}')
    assert "worldSize" in refused.value.stderr


def test_a_service_keeps_its_replicas(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    spec = {"image": "nothing", "profile": "ascend", "npusPerReplica": 1, "replicas": {"min": 3, "max": 3}}
    api.create("npuservices", {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUService", "metadata": {"name": "front"}, "spec": spec}, namespace)

    def running() -> list[Object]:
        pods = api.list("pods", namespace, "semantide.io/service=front")
        return [pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]

    first = until(lambda: len(found := running()) == 3 and found, "three replicas run")
    assert len({pod["spec"]["nodeName"] for pod in first}) == 3, "replicas of a service are spread"
    until(lambda: api.get("npuservices", "front", namespace)["status"].get("readyReplicas") == 3, "the status says so")
    # What the chart makes for one with two replicas at least: the server finds how many there should be by the service's own scale.
    metadata, chosen = {"name": "front"}, {"matchLabels": {"semantide.io/service": "front"}}
    budget = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {"maxUnavailable": 1, "selector": chosen}}
    api.create("poddisruptionbudgets", budget, namespace)
    held = until(lambda: (said := api.get("poddisruptionbudgets", "front", namespace).get("status") or {}).get("expectedPods") and said, "it is reckoned with")
    assert (held["expectedPods"], held["desiredHealthy"], held["disruptionsAllowed"]) == (3, 2, 1), held
    api.delete("pods", first[0]["metadata"]["name"], namespace, grace_seconds=0)
    gone = first[0]["metadata"]["uid"]
    until(lambda: len(found := running()) == 3 and gone not in {pod["metadata"]["uid"] for pod in found}, "a lost replica is replaced")
    api.delete("npuservices", "front", namespace)
    until(lambda: not api.list("pods", namespace, "semantide.io/service=front"), "its replicas are gone")
