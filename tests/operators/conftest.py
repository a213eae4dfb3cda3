from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.resources import API_VERSION
from semantide.operators.rounds import Rounds
from semantide.operators.settings import OperatorSettings
from tests.operators.fake_cluster import FakeCluster, FakeNodes

ASCEND = "huawei.com/Ascend910"


class World:
    """A cluster in memory, its nodes, and an operator that can be killed and replaced. Time stands still until it is moved."""

    def __init__(self, nodes: list[str], npus: int = 8, **settings: Any) -> None:
        self.now = 1_800_000_000.0
        self.cluster = FakeCluster(lambda: self.now)
        self.nodes = FakeNodes(self.cluster, nodes, npus)
        self.settings = OperatorSettings(profile="ascend", device_info_namespace="", relist_seconds=1e9, **settings)
        self.cluster.watchers.append(self._hear)
        self.new_operator()

    def new_operator(self) -> None:
        self.operator = Rounds(self.cluster, self.settings, lambda: self.now, writers=1)

    def _hear(self, event: str, body: dict[str, Any]) -> None:
        if event == "DELETED":
            self.operator.cache.drop(body)
        else:
            self.operator.cache.put(body)

    def submit(self, name: str, pods: int = 1, npus: int = 1, **spec: Any) -> None:
        full = {"kind": "train", "jobId": name, "room": "training", "worldSize": pods, "npusPerPod": npus, **spec}
        self.cluster.create({"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": {"name": name, "namespace": "lab"}, "spec": full})

    def serve(self, name: str, low: int = 1, high: int = 1, npus: int = 1, **spec: Any) -> None:
        full = {"replicas": {"min": low, "max": high}, "npusPerReplica": npus, **spec}
        self.cluster.create({"apiVersion": API_VERSION, "kind": "NPUService", "metadata": {"name": name, "namespace": "lab"}, "spec": full})

    def change(self, kind: str, name: str, **spec: Any) -> None:
        body = self.cluster.get(kind, "lab", name)
        body["spec"] |= spec
        self.cluster.replace(body)

    def turn(self, times: int = 1, seconds: float = 0.0) -> None:
        """Rounds of the operator and steps of the nodes, one after the other."""
        for _ in range(times):
            self.operator.turn()
            self.nodes.run()
            self.now += seconds

    def settle(self, seconds: float = 1.0) -> None:
        """Until nothing changes any more."""
        for _ in range(60):
            before = self.cluster.version
            self.turn(1, seconds)
            if self.cluster.version == before:
                return

    def status(self, name: str, kind: str = "NPUJob") -> dict[str, Any]:
        return self.cluster.get(kind, "lab", name)["status"]

    def phase(self, name: str, kind: str = "NPUJob") -> str:
        return str(self.status(name, kind).get("phase", ""))

    def pods(self, name: str, kind: str = "job") -> list[dict[str, Any]]:
        """Pods of a resource that have not ended, by name."""
        alive = [body for body in self.cluster.of("Pod") if body["metadata"]["labels"].get(f"semantide.io/{kind}") == name]
        return [body for body in alive if body["status"]["phase"] not in ("Succeeded", "Failed")]

    def end(self, name: str, rank: int | None = None, status: int = 0) -> None:
        """The processes of a job's pods end, of all or one."""
        for body in self.pods(name):
            if rank is None or body["metadata"]["labels"]["semantide.io/rank"] == str(rank):
                self.nodes.end("lab", body["metadata"]["name"], status)


@pytest.fixture
def world() -> Callable[..., World]:
    return World
