"""An API server in memory, with the contract of the real one as far as the operator leans on it (``test_api_contract.py`` holds both to it), and nodes that run pods.

FakeCluster   objects: names, uids, versions, conflicts, status apart from spec, graceful deletion, owners
FakeNodes     binds pods as Kubernetes' scheduler would, gives addresses, runs and ends them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any

from semantide.operators.cluster import KINDS, Body, Listing
from semantide.operators.pods import time_of
from semantide.shared.errors import Conflict, NotFound, PermanentError

_WITH_STATUS = {"Pod", "Node", "NPUJob", "NPUService"}
_GRACE_SECONDS = 30


class FakeCluster:
    """Implements ``Api``. ``seen`` functions hear of every change, as a watch does; ``fails`` may raise before a verb is carried out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.watchers: list[Callable[[str, Body], None]] = []
        self.fails: Callable[[str, str, str], None] = lambda verb, kind, name: None
        self.calls: list[tuple[str, str, str]] = []
        self._versions, self._uids = count(1), count(1)
        self.version = 0

    def list(self, kind: str, namespace: str = "", labels: str = "", keep: Callable[[Body], Body | None] = dict) -> Listing:
        self._called("list", kind, "")
        wanted = dict(term.split("=", 1) for term in labels.split(",") if term)
        found = [
            keep(deepcopy(body))
            for (of, where, _), body in sorted(self.objects.items())
            if of == kind and namespace in ("", where) and all((body["metadata"].get("labels") or {}).get(key) == value for key, value in wanted.items())
        ]
        return Listing([body for body in found if body is not None], str(self.version))

    def get(self, kind: str, namespace: str, name: str, api_version: str = "") -> Body:
        self._called("get", kind, name)
        return deepcopy(self._find(kind, namespace, name))

    def create(self, body: Mapping[str, Any]) -> Body:
        made: Body = deepcopy(dict(body))
        kind, metadata = made["kind"], made["metadata"]
        self._called("create", kind, metadata["name"])
        key = self._key(kind, metadata.get("namespace", ""), metadata["name"])
        if key in self.objects:
            raise Conflict(f"{kind} {metadata['name']} exists")
        metadata |= {"uid": f"uid-{next(self._uids)}", "creationTimestamp": time_of(self.clock()), "generation": 1}
        if kind in _WITH_STATUS and kind != "Node":
            made["status"] = {"phase": "Pending"} if kind == "Pod" else {}
        return self._write(key, made)

    def replace(self, body: Mapping[str, Any]) -> Body:
        old = self._ready_for("replace", body)
        new: Body = deepcopy(dict(body))
        generation = old["metadata"]["generation"] + (new.get("spec") != old.get("spec"))
        new["metadata"] = {**deepcopy(old["metadata"]), **new["metadata"], "uid": old["metadata"]["uid"], "generation": generation}
        if new["kind"] in _WITH_STATUS:
            new["status"] = deepcopy(old.get("status") or {})
        return self._write(self._key_of(new), new)

    def replace_status(self, body: Mapping[str, Any]) -> Body:
        old = self._ready_for("replace_status", body)
        return self._write(self._key_of(old), {**deepcopy(old), "status": deepcopy(dict(body["status"]))})

    def annotate(self, kind: str, namespace: str, name: str, annotations: Mapping[str, str | None], uid: str = "") -> Body:
        self._called("annotate", kind, name)
        new = deepcopy(self._find(kind, namespace, name))
        if uid and new["metadata"]["uid"] != uid:
            raise Conflict(f"{kind} {name} is another one by now")
        known = {**(new["metadata"].get("annotations") or {}), **annotations}
        new["metadata"]["annotations"] = {key: value for key, value in known.items() if value is not None}
        return self._write(self._key_of(new), new)

    def delete(self, kind: str, namespace: str, name: str, *, uid: str = "", grace_seconds: int | None = None, api_version: str = "") -> None:
        self._called("delete", kind, name)
        body = self._find(kind, namespace, name)
        if uid and body["metadata"]["uid"] != uid:
            raise Conflict(f"{kind} {name} is another one by now")
        if kind == "Pod":
            grace = (body.get("spec") or {}).get("terminationGracePeriodSeconds", _GRACE_SECONDS) if grace_seconds is None else grace_seconds
            bound = bool((body.get("spec") or {}).get("nodeName"))
            if grace and bound and (body["status"].get("phase") not in ("Succeeded", "Failed")):
                if "deletionTimestamp" not in body["metadata"]:
                    new = deepcopy(body)
                    new["metadata"] |= {"deletionTimestamp": time_of(self.clock() + grace), "deletionGracePeriodSeconds": grace}
                    self._write(self._key_of(new), new)
                return
        if body["metadata"].get("finalizers"):
            new = deepcopy(body)
            new["metadata"].setdefault("deletionTimestamp", time_of(self.clock()))
            self._write(self._key_of(new), new)
            return
        self.remove(body)

    def remove(self, body: Body) -> None:
        """The object is gone, and what it owned is asked to go."""
        gone = deepcopy(self.objects.pop(self._key_of(body)))
        gone["metadata"]["resourceVersion"] = self._next()
        self._tell("DELETED", gone)
        uid = gone["metadata"]["uid"]
        for other in list(self.objects.values()):
            owners = other["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == uid for owner in owners) and self._key_of(other) in self.objects:
                self.delete(other["kind"], other["metadata"].get("namespace", ""), other["metadata"]["name"])

    def set_status(self, kind: str, namespace: str, name: str, **status: Any) -> Body:
        """What a kubelet or a test says of an object; only these fields of its status."""
        body = deepcopy(self._find(kind, namespace, name))
        body["status"] = {**(body.get("status") or {}), **status}
        return self._write(self._key_of(body), body)

    def bind(self, namespace: str, name: str, node: str) -> None:
        """What a scheduler does."""
        body = deepcopy(self._find("Pod", namespace, name))
        body["spec"]["nodeName"] = node
        self._write(self._key_of(body), body)

    def of(self, kind: str) -> Sequence[Body]:
        """All objects of a kind, to be read: an object is never changed, a new state of it takes its place."""
        return [body for (of, _, _), body in sorted(self.objects.items()) if of == kind]

    def _ready_for(self, verb: str, body: Mapping[str, Any]) -> Body:
        metadata = body["metadata"]
        self._called(verb, body["kind"], metadata["name"])
        old = self._find(body["kind"], metadata.get("namespace", ""), metadata["name"])
        if metadata.get("resourceVersion", old["metadata"]["resourceVersion"]) != old["metadata"]["resourceVersion"]:
            raise Conflict(f"{body['kind']} {metadata['name']} has been written since")
        if metadata.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise Conflict(f"{body['kind']} {metadata['name']} is another one by now")
        return old

    def _called(self, verb: str, kind: str, name: str) -> None:
        assert kind in KINDS, kind
        self.fails(verb, kind, name)
        self.calls.append((verb, kind, name))

    def _find(self, kind: str, namespace: str, name: str) -> Body:
        key = self._key(kind, namespace, name)
        if key not in self.objects:
            raise NotFound(f"{kind} {namespace}/{name}")
        return self.objects[key]

    def _write(self, key: tuple[str, str, str], body: Body) -> Body:
        try:
            json.dumps([body.get("spec"), body.get("status")], allow_nan=False)
        except ValueError as error:
            raise PermanentError(f"{key[0]} {key[2]} is no JSON: {error}") from error
        body["metadata"]["resourceVersion"] = self._next()
        self.objects[key] = body
        self._tell("MODIFIED", body)
        return deepcopy(body)

    def _next(self) -> str:
        self.version = next(self._versions)
        return str(self.version)

    def _tell(self, event: str, body: Body) -> None:
        for watcher in self.watchers:
            watcher(event, body)

    @staticmethod
    def _key(kind: str, namespace: str, name: str) -> tuple[str, str, str]:
        return kind, namespace if KINDS[kind].namespaced else "", name

    def _key_of(self, body: Mapping[str, Any]) -> tuple[str, str, str]:
        return self._key(body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"])


class FakeNodes:
    """Nodes that run what is put on them, and refuse what does not fit."""

    def __init__(self, cluster: FakeCluster, names: list[str], npus: int = 8, resource: str = "huawei.com/Ascend910") -> None:
        self._cluster, self.resource, self._npus = cluster, resource, npus
        self._addresses = count(1)
        for name in names:
            self.add(name)

    def add(self, name: str, **labels: str) -> None:
        capacity = {"cpu": "64", "memory": "268435456Ki", "pods": "110", **({self.resource: str(self._npus)} if self._npus else {})}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": time_of(self._cluster.clock())}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {}}
        self._cluster.create({**body, "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}})

    def ready(self, name: str, ready: bool) -> None:
        """A node that answers again, or does not."""
        told = {"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": time_of(self._cluster.clock())}
        self._cluster.set_status("Node", "", name, conditions=[told])

    def _answers(self, name: str) -> bool:
        nodes = {body["metadata"]["name"]: body for body in self._cluster.of("Node")}
        return name in nodes and nodes[name]["status"]["conditions"][0]["status"] == "True"

    def held(self, node: str) -> int:
        """NPUs that pods on a node hold."""
        pods = [body for body in self._cluster.of("Pod") if body["spec"].get("nodeName") == node and body["status"]["phase"] not in ("Succeeded", "Failed")]
        return sum(self._asked(body) for body in pods)

    def _asked(self, body: Body) -> int:
        return sum(int((container.get("resources") or {}).get("limits", {}).get(self.resource, 0)) for container in body["spec"]["containers"])

    def run(self) -> None:
        """Every pod goes one step on: bound, running, or gone."""
        for body in self._cluster.of("Pod"):
            metadata, namespace, name = body["metadata"], body["metadata"]["namespace"], body["metadata"]["name"]
            node = body["spec"].get("nodeName")
            if "deletionTimestamp" in metadata:
                if node is None or self._answers(node):
                    self._cluster.remove(body)
            elif node is None:
                self._bind(body)
            elif body["status"]["phase"] == "Pending" and self._answers(node):
                number = next(self._addresses)
                self._cluster.set_status(
                    "Pod",
                    namespace,
                    name,
                    phase="Running",
                    podIP=f"10.0.{number // 250}.{number % 250 + 1}",
                    hostIP="192.168.0.1",
                    conditions=[{"type": "Ready", "status": "True"}],
                    containerStatuses=[{"name": "main", "state": {"running": {}}}],
                )

    def _bind(self, body: Body) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        if "schedulerName" in body["spec"] or "schedulingGroup" in body["spec"]:  # theirs to place
            roomy = (each["metadata"]["name"] for each in self._cluster.of("Node") if self.held(each["metadata"]["name"]) + self._asked(body) <= self._npus)
            self._cluster.bind(namespace, name, next(roomy))
            return
        terms = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        node = terms[0]["matchFields"][0]["values"][0]
        if self._answers(node) and self.held(node) + self._asked(body) <= self._npus:
            self._cluster.bind(namespace, name, node)
        else:
            told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": f"0/3 nodes are available: {node} is full"}
            conditions = body["status"].get("conditions") or []
            if not conditions:
                self._cluster.set_status("Pod", namespace, name, conditions=[{**told, "lastTransitionTime": time_of(self._cluster.clock())}])

    def end(self, namespace: str, name: str, status: int = 0) -> None:
        """A pod's process ends by itself."""
        ended = {"exitCode": status, "finishedAt": time_of(self._cluster.clock()), "reason": "Completed" if status == 0 else "Error"}
        self._cluster.set_status(
            "Pod",
            namespace,
            name,
            phase="Failed" if status else "Succeeded",
            containerStatuses=[{"name": "main", "state": {"terminated": ended}}],
            conditions=[],
        )
