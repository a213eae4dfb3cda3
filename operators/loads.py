"""The measured load of services' replicas, asked from their metrics pages over HTTP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import httpx

from semantide.operators.balancing import ReplicaLoad
from semantide.operators.pods import Pod
from semantide.operators.resources import NPUService
from semantide.operators.service_load import LoadReader, Look
from semantide.operators.service_pods import HTTP_PORT
from semantide.operators.snapshot import Snapshot
from semantide.shared.pod_template import RELEASE_LABEL

_ASKERS = 16  # replicas that are asked at the same time
_LATE = "TimeoutError: it did not answer in time"
_LOOKS = 3  # so many in vain, one after the other, are told
_WANTS_KEY = ("401", "403")


class Loads:
    """One reader for each service; ``key`` is shown to replicas of ``own_namespace`` and ``release`` alone: what else answers is somebody else's. There a port that wants no
    key is asked, where pods have one that is named ``metrics``. A whole look takes ``look_seconds`` at most: who has not answered by then is asked last the next time.
    """

    def __init__(
        self, key: str, own_namespace: str, clock: Callable[[], float], client: httpx.Client | None = None, release: str = "", look_seconds: float = 5.0
    ) -> None:
        self._key, self._own_namespace, self._clock, self._release = key, own_namespace, clock, release
        self._client, self._look_seconds = client or httpx.Client(timeout=2.0), look_seconds
        self._askers = ThreadPoolExecutor(_ASKERS, "load")
        self._asked: dict[tuple[str, str], Future[Look | str]] = {}
        self._readers: dict[str, LoadReader] = {}
        self._in_vain: dict[str, int] = {}
        self.unmeasured: dict[str, str] = {}
        """Services of which no replica has shown its load for some time, by key: why, and what to do."""

    def measure(self, snapshot: Snapshot) -> dict[str, tuple[ReplicaLoad, ...]]:
        """The loads of all services' ready replicas, by the service's key."""
        pods = defaultdict(list)  # by namespace too: a pod may name any owner
        for pod in snapshot.pods:
            if pod.ready and pod.address and not pod.deleting:
                pods[pod.namespace, pod.owner].append(pod)
        ready = {service.key: pods[service.namespace, service.metadata.uid] for service in snapshot.services}
        for service in snapshot.services:
            self._readers.setdefault(service.key, LoadReader(self._key if self._own(service) else "", self._clock, self._client))
        answers = self._answers(snapshot.services, ready)
        result, unmeasured = {}, {}
        for service in snapshot.services:
            reader = self._readers[service.key]
            result[service.key] = tuple(reader.loads(answers[service.key]))
            in_vain = bool(ready[service.key]) and not result[service.key]
            self._in_vain[service.key] = self._in_vain.get(service.key, 0) + 1 if in_vain else 0
            if self._in_vain[service.key] >= _LOOKS:
                unmeasured[service.key] = self._why(service, ready[service.key], reader)
        for key in self._readers.keys() - result.keys():
            del self._readers[key], self._in_vain[key]
        self.unmeasured = unmeasured
        return result

    def _answers(self, services: Sequence[NPUService], ready: Mapping[str, Sequence[Pod]]) -> dict[str, dict[str, Look | str]]:
        """What all replicas answer within the time of one look, by service and pod."""
        asked = [(service, pod) for service in services for pod in ready[service.key]]
        asked.sort(key=lambda entry: entry[1].name in self._readers[entry[0].key].unheard)
        answers: dict[str, dict[str, Look | str]] = {service.key: {pod.name: _LATE for pod in ready[service.key]} for service in services}
        futures = {
            (service.key, pod.name): self._askers.submit(self._readers[service.key].ask, _address(pod, self._own(service)))
            for service, pod in asked
            if (service.key, pod.name) not in self._asked or self._asked[service.key, pod.name].done()
        }
        done, late = wait(futures.values(), self._look_seconds)
        for future in late:
            future.cancel()
        for (key, name), future in futures.items():
            if future in done:
                answers[key][name] = future.result()
        # Who still has a question open is asked no second one: a few that hang must not take all askers.
        self._asked = {who: future for who, future in {**self._asked, **futures}.items() if not future.done()}
        return answers

    def _own(self, service: NPUService) -> bool:
        return service.namespace == self._own_namespace and service.metadata.labels.get(RELEASE_LABEL, self._release) == self._release

    def _why(self, service: NPUService, ready: Sequence[Pod], reader: LoadReader) -> str:
        first = ready[0].name
        why = reader.unheard[first]
        effect = "so the service neither grows nor shrinks by its load"
        if why not in _WANTS_KEY:
            return f"{first} does not show its load ({why}), {effect}: let the operator reach /metrics of its pods"
        if self._own(service):
            return f"{first} does not show its load ({why}: it does not take the operator's key), {effect}: give both the same SEMANTIDE_API_KEYS"
        return (
            f"{first} does not show its load ({why}: it wants a key, and the operator shows its own to its release in {self._own_namespace} alone), {effect}: give template.ports a "
            f"port that is named metrics, and template.env SEMANTIDE_METRICS_PORT with its number and SEMANTIDE_METRICS_HOST 0.0.0.0"
        )


def _address(pod: Pod, own: bool) -> str:
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return f"http://{host}:{HTTP_PORT if own or not pod.metrics_port else pod.metrics_port}"
