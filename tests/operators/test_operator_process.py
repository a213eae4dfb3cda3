"""The operator as the process that a cluster runs, against an API server in memory over HTTP: its client, its watches, its lease, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from semantide.operators.cluster import KubernetesApi
from semantide.operators.resources import API_VERSION
from tests.operators.api_contract import ApiContract
from tests.operators.fake_cluster import FakeCluster, FakeNodes
from tests.operators.fake_server import FakeServer


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 200
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeCluster(time.time)) as running:
        yield running


class TestOverHttp(ApiContract):
    @pytest.fixture
    def api(self, server: FakeServer) -> KubernetesApi:
        configuration = client.Configuration()
        configuration.host = server.address
        return KubernetesApi(configuration)

    @pytest.fixture
    def namespace(self) -> str:
        return "lab"


class Operator:
    """``python -m semantide.operators``."""

    def __init__(self, kubeconfig: Path, folder: Path, identity: str) -> None:
        settings = {
            "namespace": "lab",
            "own_namespace": "lab",
            "identity": identity,
            "port": "0",
            "lease_seconds": "2",
            "round_seconds": "0.2",
            "relist_seconds": "100000",  # what happens while it runs it hears by its watches, or never
            "profile": "ascend",
        }
        environment = {f"SEMANTIDE_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        path = os.pathsep.join(place for place in sys.path if place)
        self._log = (folder / f"{identity}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "semantide.operators"],
            env={**os.environ, **environment, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": path},
            stdout=self._log,
            stderr=self._log,
        )

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        status = self.process.wait(60)
        self._log.close()
        return status


@pytest.mark.timeout(900)
def test_it_runs_jobs_survives_its_death_and_hands_over(server: FakeServer, tmp_path: Path) -> None:
    cluster, kubeconfig = server.cluster, server.kubeconfig(tmp_path / "kubeconfig")
    with server.changed:
        nodes = FakeNodes(cluster, ["a", "b"])

    def phase(name: str) -> str:
        with server.changed:
            nodes.run()
            return str(cluster.get("NPUJob", "lab", name)["status"].get("phase", ""))

    def submit(name: str) -> None:
        spec = {"kind": "train", "worldSize": 2, "npusPerPod": 4}
        with server.changed:
            cluster.create({"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": {"name": name, "namespace": "lab"}, "spec": spec})

    def ends(name: str) -> None:
        with server.changed:
            for body in cluster.of("Pod"):
                if body["metadata"]["labels"]["semantide.io/job"] == name:
                    nodes.end("lab", body["metadata"]["name"])

    submit("before")
    first = Operator(kubeconfig, tmp_path, "first")
    try:
        until(lambda: phase("before") == "Running", "the job that was there runs")
        submit("meanwhile")
        until(lambda: phase("meanwhile") == "Running", "the job that came runs")
    finally:
        first.end(signal.SIGKILL)
    uids = {body["metadata"]["uid"] for body in cluster.of("Pod")}
    ends("before")
    second = Operator(kubeconfig, tmp_path, "second")
    try:
        until(lambda: phase("before") == "Succeeded", "an end that nobody saw is found")
        assert phase("meanwhile") == "Running"
        assert {body["metadata"]["uid"] for body in cluster.of("Pod")} == uids, "a new operator touches nothing that is well"
    finally:
        assert second.end(signal.SIGTERM) == 0, (tmp_path / "second.log").read_text()
    lease: dict[str, Any] = cluster.get("Lease", "lab", "semantide-operator")
    assert lease["spec"]["holderIdentity"] == "", "it gives its lease back"
    assert not [body for body in cluster.of("NPUJob") if body["metadata"].get("finalizers")]
