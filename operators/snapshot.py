"""What the operator knows of the cluster: the newest objects that it has seen, and one consistent reading of them for a round.

A watch may miss what happened while it was cut off, and may tell of an object after the answer to our own later write: of two states of an object the newer
one is kept, what was deleted does not come back, and a full listing now and then settles the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from semantide.operators.balancing import ReplicaLoad
from semantide.operators.claimed_devices import claimed_devices
from semantide.operators.cluster import Body, Listing
from semantide.operators.extracts import extract_of
from semantide.operators.inventory import DEVICE_NAMES, label_of, read_nodes, ready
from semantide.operators.node import Node
from semantide.operators.pods import Pod, sights_of
from semantide.operators.resources import JOB_KIND, SERVICE_KIND, NPUJob, NPUService
from semantide.operators.settings import OperatorSettings

WATCHED = (JOB_KIND, SERVICE_KIND, "Pod", "Node")
_REMEMBERED_DELETIONS = 100_000
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Invalid:
    """A resource that this version cannot read, and why."""

    body: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class DeviceReports:
    """What others say of devices: their health by the device plugin, and what is there and claimed under dynamic resource allocation."""

    config_maps: tuple[Body, ...] = ()
    slices: tuple[Body, ...] = ()
    claims: tuple[Body, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one moment. ``now`` is seconds since 1970-01-01 UTC, ``steady`` the same moment by the clock that tells since when pods are as they are (None: that one too); ``loads`` are the services' by their key; ``fronts`` are the uids of those that own a Service;
    ``refusals`` says, by kind and key, what the API server would not write for a resource in the last round; ``unmeasured`` by a service's key why none of its replicas shows its load; ``unread`` what is wrong with pods and nodes that
    cannot be read."""

    now: float
    jobs: tuple[NPUJob, ...] = ()
    services: tuple[NPUService, ...] = ()
    pods: tuple[Pod, ...] = ()
    nodes: tuple[Node, ...] = ()
    invalid: tuple[Invalid, ...] = ()
    loads: Mapping[str, tuple[ReplicaLoad, ...]] = field(default_factory=dict)
    fronts: frozenset[str] = frozenset()
    refusals: Mapping[str, str] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, Exception] = field(default_factory=dict)
    steady: float | None = None


class ObjectCache:
    """The newest known state of every object of the watched kinds. Safe to use from several threads.

    ``clock`` counts seconds from anywhere and never back: since when a node is not ready, and a pod of ours as it is, is told by it, for clocks of machines are never compared.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._silent: dict[str, float] = {}
        self._sights: dict[str, dict[str, float]] = {}
        self._objects: dict[str, dict[tuple[str, str], Body]] = {}
        self._gone: dict[str, None] = {}
        self._read: dict[str, tuple[str, Any]] = {}

    def put(self, body: Body) -> bool:
        """Keep an object unless a newer state of it is known; whether anything changed."""
        with self._lock:
            return self._put(body)

    def drop(self, body: Body) -> None:
        """Forget an object that was deleted."""
        with self._lock:
            self._drop(body)

    def settle(self, kind: str, listing: Listing) -> None:
        """Take a full listing: what it lacks, and what is not newer than it, is gone."""
        with self._lock:
            listed = {_key(body) for body in listing.items}
            for key, body in list(self._objects.get(kind, {}).items()):
                if key not in listed and _version(body) <= _number(listing.version):
                    self._drop(body)
            for body in listing.items:
                self._put(body)

    def bodies(self, kind: str) -> list[Body]:
        """All objects of a kind."""
        with self._lock:
            return list(self._objects.get(kind, {}).values())

    def silence(self) -> dict[str, float]:
        """How long nodes have been seen not ready, seconds."""
        with self._lock:
            return {name: self._clock() - since for name, since in self._silent.items()}

    def snapshot(
        self,
        settings: OperatorSettings,
        now: float,
        devices: DeviceReports | None = None,
        loads: Mapping[str, tuple[ReplicaLoad, ...]] | None = None,
        refusals: Mapping[str, str] | None = None,
        unmeasured: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """One reading of everything."""
        invalid: list[Invalid] = []
        jobs = self._resources(JOB_KIND, NPUJob.parse, settings, invalid)
        services = self._resources(SERVICE_KIND, NPUService.parse, settings, invalid)
        pods = self.bodies("Pod")
        unread: dict[str, Exception] = {}
        own = (DEVICE_NAMES | {settings.resource_name}) - {""}
        asked = {job.spec.resource_name for job in jobs if not job.ended} | {service.spec.resource_name for service in services}
        reports = devices or DeviceReports()
        nodes = read_nodes(
            self.bodies("Node"),
            pods,
            reports.config_maps,
            resource_names=(own | asked) - {""},
            own_names=own,
            claimed=claimed_devices(reports.slices, reports.claims) if settings.dynamic_resources else None,
            silence=self.silence(),
            gone_seconds=settings.node_grace_seconds,
            unread=unread,
        )
        return Snapshot(
            now=now,
            jobs=tuple(jobs),
            services=tuple(services),
            pods=tuple(pod for body in pods if (pod := self._pod(body, unread)) is not None and pod.owner),
            nodes=tuple(nodes),
            invalid=tuple(invalid),
            loads=loads or {},
            refusals=refusals or {},
            unmeasured=unmeasured or {},
            unread=unread,
            steady=self._clock(),
            fronts=frozenset(owner["uid"] for body in self.bodies("Service") for owner in body["metadata"].get("ownerReferences") or ()),
        )

    def _resources(self, kind: str, parse: Callable[[Mapping[str, Any]], _Read], settings: OperatorSettings, invalid: list[Invalid]) -> list[_Read]:
        result = []
        for body in self.bodies(kind):
            try:
                result.append(self._parsed(body, lambda body: parse(with_defaults(body, settings))))
            except ValueError as error:
                invalid.append(Invalid(body, str(error)))
        return result

    def _pod(self, body: Body, unread: dict[str, Exception]) -> Pod | None:
        """The pod; None for one that cannot be read, which may be anybody's and must not stop the rest."""
        try:
            return self._parsed(body, lambda body: Pod.parse(body, self._sights.get(body["metadata"].get("uid", ""), {})))
        except Exception as error:
            unread[label_of(body)] = error
            return None

    def _parsed(self, body: Body, read: Callable[[Body], _Read]) -> _Read:
        uid, version = body["metadata"].get("uid", ""), body["metadata"].get("resourceVersion", "")
        known = self._read.get(uid)
        if known is not None and known[0] == version and uid:
            found: _Read = known[1]
            return found
        value = read(body)
        self._read[uid] = version, value
        return value

    def _put(self, body: Body) -> bool:
        metadata = body["metadata"]
        objects = self._objects.setdefault(body["kind"], {})
        known = objects.get(_key(body))
        if metadata.get("uid", "") in self._gone or (
            known is not None and known["metadata"].get("uid") == metadata.get("uid") and _version(known) >= _version(body)
        ):
            return False
        if body["kind"] == "Node":
            if ready(body):
                self._silent.pop(metadata["name"], None)
            else:
                self._silent.setdefault(metadata["name"], self._clock())
        kept = extract_of(body)
        if body["kind"] == "Pod":
            self._see(kept)
        objects[_key(body)] = kept
        return True

    def _see(self, pod: Body) -> None:
        """Since when a pod of ours is as it is."""
        uid = pod["metadata"].get("uid", "")
        known = self._sights.pop(uid, {})
        try:
            sights = {name: known.get(name, self._clock()) for name in sights_of(pod)}
        except (AttributeError, TypeError, KeyError):
            return  # its reader says what is wrong with it
        if sights:
            self._sights[uid] = sights

    def _drop(self, body: Body) -> None:
        uid = body["metadata"].get("uid", "")
        objects = self._objects.get(body["kind"], {})
        known = objects.get(_key(body))
        if known is not None and known["metadata"].get("uid") == uid:
            del objects[_key(body)]
            if body["kind"] == "Node":
                self._silent.pop(body["metadata"]["name"], None)
        self._read.pop(uid, None)
        self._sights.pop(uid, None)
        self._gone[uid] = None
        while len(self._gone) > _REMEMBERED_DELETIONS:
            del self._gone[next(iter(self._gone))]


def with_defaults(body: Mapping[str, Any], settings: OperatorSettings) -> dict[str, Any]:
    """A resource with the operator's defaults where its spec is silent."""
    spec = {"profile": settings.profile, **(body.get("spec") or {})}
    if settings.resource_name and spec["profile"] == settings.profile:
        spec["resourceName"] = spec.get("resourceName") or settings.resource_name
    if body.get("kind") == JOB_KIND:
        spec = {"scheduler": settings.scheduler, **spec}
    return {**body, "spec": spec}


def _key(body: Mapping[str, Any]) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]


def _version(body: Mapping[str, Any]) -> int:
    return _number(body["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0
