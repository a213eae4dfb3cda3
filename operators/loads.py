"""The measured load of services' replicas, asked from their metrics pages over HTTP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import httpx

from semantide.operators.balancing import ReplicaLoad
from semantide.operators.service_load import LoadReader
from semantide.operators.service_pods import HTTP_PORT
from semantide.operators.snapshot import Snapshot
from semantide.shared.pod_template import RELEASE_LABEL

METRICS_PORT = 9100  # of the pods that the chart makes


class Loads:
    """One reader for each service; ``key`` is shown to replicas of ``own_namespace`` and ``release`` alone. Somebody else's are asked at the port that wants none."""

    def __init__(self, key: str, own_namespace: str, clock: Callable[[], float], client: httpx.Client | None = None, release: str = "") -> None:
        self._key, self._own_namespace, self._clock, self._release = key, own_namespace, clock, release
        self._client = client or httpx.Client(timeout=2.0)
        self._readers: dict[str, LoadReader] = {}

    def measure(self, snapshot: Snapshot) -> dict[str, tuple[ReplicaLoad, ...]]:
        """The loads of all services' ready replicas, by the service's key."""
        pods = defaultdict(list)  # by namespace too: a pod may name any owner
        for pod in snapshot.pods:
            if pod.ready and pod.address and not pod.deleting:
                pods[pod.namespace, pod.owner].append(pod)
        result = {}
        for service in snapshot.services:
            ours = service.namespace == self._own_namespace and service.metadata.labels.get(RELEASE_LABEL, self._release) == self._release
            key, port = (self._key, HTTP_PORT) if ours else ("", METRICS_PORT)
            reader = self._readers.setdefault(service.key, LoadReader(key, self._clock, self._client))
            addresses = {pod.name: f"http://{_host(pod.address)}:{port}" for pod in pods[service.namespace, service.metadata.uid]}
            result[service.key] = tuple(reader.read(addresses))
        for key in self._readers.keys() - result.keys():
            del self._readers[key]
        return result


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
