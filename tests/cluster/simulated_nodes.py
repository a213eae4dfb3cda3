"""Nodes without a kubelet, whose pods live and end as a test says: bound -> running -> succeeded or failed.

Pods are found by listing, so a player that was interrupted plays on. What a kubelet would do on a deletion is done too: the object goes at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from .api import Api, Object, Refused

_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Fate:
    """How long a pod runs, seconds, and the exit status of its container; None: it runs until it is deleted."""

    seconds: float = 0.0
    exit_code: int | None = 0


class SimulatedNodes:
    """Plays the kubelets of nodes that it makes itself."""

    def __init__(self, kubeconfig: Path, fate: Callable[[Object], Fate] = lambda pod: Fate(exit_code=None)) -> None:
        self.fate = fate
        self._api, self._names, self._started = Api(kubeconfig), set[str](), dict[str, float]()
        self._stop, self._addresses = threading.Event(), 0
        self._thread = threading.Thread(target=self._play, name="simulated-nodes")
        self.error: BaseException | None = None

    def __enter__(self) -> SimulatedNodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for name in self._names:
            self._api.delete("nodes", name)
        self._api.close()
        if self.error is not None:
            raise self.error

    def add(self, name: str, resources: dict[str, str], labels: dict[str, str] | None = None) -> None:
        """A node that is ready, with these extended resources (quantities are text)."""
        self._api.create("nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}})
        capacity = {"cpu": "64", "memory": "536870912Ki", "pods": "250", **resources}
        self._api.patch("nodes", name, {"status": {"capacity": capacity, "allocatable": capacity}}, status=True)
        self.ready(name, True)
        self._names.add(name)

    def ready(self, name: str, is_ready: bool) -> None:
        """Say that a node works, or that it does not answer any more."""
        said = {
            "type": "Ready",
            "status": "True" if is_ready else "Unknown",
            "reason": "Played",
            "message": "",
            "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }
        self._api.patch("nodes", name, {"status": {"conditions": [said]}}, status=True)

    def lose(self, name: str) -> None:
        """Take a node out of the cluster; its pods are played no more."""
        self._names.discard(name)
        self._api.delete("nodes", name)

    def _play(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                for pod in self._api.list("pods"):
                    if pod["spec"].get("nodeName") in self._names:
                        self._live(pod)
            except Refused as error:
                if error.status not in (404, 409, 429) and error.status < 500:
                    self.error = error
                    return
            except httpx.TransportError:
                # The server restarts.
                continue

    def _live(self, pod: Object) -> None:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if "deletionTimestamp" in pod["metadata"]:
            self._started.pop(pod["metadata"]["uid"], None)
            self._api.delete("pods", name, namespace, grace_seconds=0)
            return
        phase, uid = pod["status"].get("phase", "Pending"), pod["metadata"]["uid"]
        if phase == "Pending":
            self._addresses += 1
            address = f"10.{self._addresses >> 16 & 255}.{self._addresses >> 8 & 255}.{self._addresses & 255}"
            status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "startTime": now(), **_conditions(True)}
            self._say(pod, status | {"containerStatuses": _containers(pod, {"running": {"startedAt": now()}}, True)})
            self._started[uid] = time.monotonic()
        elif phase == "Running":
            fate = self.fate(pod)
            if fate.exit_code is None or time.monotonic() - self._started.setdefault(uid, time.monotonic()) < fate.seconds:
                return
            end = {"terminated": {"exitCode": fate.exit_code, "reason": "Error" if fate.exit_code else "Completed", "finishedAt": now()}}
            status = {"phase": "Failed" if fate.exit_code else "Succeeded", **_conditions(False)}
            self._say(pod, status | {"containerStatuses": _containers(pod, end, False)})

    def _say(self, pod: Object, status: Object) -> None:
        self._api.patch("pods", pod["metadata"]["name"], {"status": status}, pod["metadata"]["namespace"], status=True)


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _conditions(is_ready: bool) -> Object:
    said = "True" if is_ready else "False"
    return {"conditions": [{"type": kind, "status": said, "lastTransitionTime": now()} for kind in ("Initialized", "Ready", "ContainersReady")]}


def _containers(pod: Object, state: Object, is_ready: bool) -> list[Object]:
    return [
        {"name": one["name"], "image": one["image"], "imageID": "", "ready": is_ready, "started": is_ready, "restartCount": 0, "state": state}
        for one in pod["spec"]["containers"]
    ]
