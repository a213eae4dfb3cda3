"""The part of an API server and an operator that jobs need, small: NPUJobs over HTTP, whose pods are processes of this machine.

The verbs answer as Kubernetes does (409 for a name that is taken, 404, merge patches, a foreground deletion that ends with the pods). ``tests/operators`` and
``tests/cluster`` hold the operator and the real server to the same resource.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from semantide.operators.resources import API_VERSION, NPUJob
from semantide.shared.broker import free_port

PREFIX = f"/apis/{API_VERSION}/namespaces/jobs/npujobs"


@dataclass
class Gang:
    """The pods of one attempt."""

    pods: list[subprocess.Popen[bytes]] = field(default_factory=list)
    restarts: int = 0
    stopped: bool = False


class Cluster:
    """Use as a context manager. ``away``: the API server answers nothing; ``refuse``: status and message for every creation, ``refuse_annotations`` for every
    annotation; ``pods_stay``: those that were told to end hold up what is being deleted; ``page``: how many a list has at a time; ``unheard``: what is in no list that
    may be old."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.gangs: dict[str, Gang] = {}
        self.requests: list[str] = []
        self.away = False
        self.hold = ""
        self.pods_stay = False
        self.page = 2
        self.unheard: set[str] = set()
        self.refuse: tuple[int, str] | None = None
        self.refuse_annotations: tuple[int, str] | None = None
        self._environment = environment
        self._lock = threading.RLock()
        self._ending = threading.Event()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                if cluster.away:
                    self.close_connection = True
                    return
                path, _, query = self.path.partition("?")
                status, answer = cluster.answer(self.command, path, body, dict(parse_qsl(query)))
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _do

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [threading.Thread(target=self._http.serve_forever, daemon=True), threading.Thread(target=self._operate, daemon=True)]

    def __enter__(self) -> Cluster:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._threads[1].join()
        for gang in self.gangs.values():
            for pod in gang.pods:
                pod.kill()
                pod.wait()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, verb: str, path: str, body: Any, query: Mapping[str, str] | None = None) -> tuple[int, Any]:
        with self._lock:
            name = path.removeprefix(PREFIX).strip("/")
            self.requests.append(f"{verb} {name}".strip())
            assert path.startswith(PREFIX), path
            if verb == "GET" and not name:
                return 200, self._listed(query or {})
            if verb == "GET" and name in self.jobs:
                return 200, self.jobs[name]
            if verb == "POST":
                return self._create(body)
            if name not in self.jobs:
                return 404, {"message": f"npujobs {name!r} not found", "reason": "NotFound"}
            if verb == "PATCH" and self.refuse_annotations is not None:
                return self.refuse_annotations[0], {"message": self.refuse_annotations[1]}
            if verb == "PATCH":
                self.jobs[name]["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
            else:
                self.jobs[name]["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
            return 200, self.jobs[name]

    def _listed(self, query: Mapping[str, str]) -> Any:
        """One page; asked for resourceVersion 0 without what the cache behind it has yet to hear of."""
        assert "limit" in query and not {"continue", "resourceVersion"} <= set(query)
        there = {name: body for name, body in self.jobs.items() if query.get("resourceVersion") != "0" or name not in self.unheard}
        first = int(query.get("continue", 0))
        rest = list(there.values())[first:]
        more = {"continue": str(first + self.page)} if len(rest) > self.page else {}
        return {"items": rest[: self.page], "metadata": more}

    def _create(self, body: Any) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        if self.refuse is not None:
            return self.refuse[0], {"message": self.refuse[1]}
        if name in self.jobs:
            return 409, {"message": f"npujobs {name!r} already exists", "reason": "AlreadyExists"}
        NPUJob.parse(body)  # as the schema would
        self.jobs[name] = body
        return 201, body

    def pods(self, name: str) -> list[subprocess.Popen[bytes]]:
        with self._lock:
            return list(self.gangs[name].pods)

    def restarts(self, name: str) -> int:
        with self._lock:
            return self.gangs.get(name, Gang()).restarts

    def phase(self, name: str) -> str:
        with self._lock:
            return str(self.jobs.get(name, {}).get("status", {}).get("phase", ""))

    def _operate(self) -> None:
        while not self._ending.wait(0.05):
            with self._lock:
                for name, body in list(self.jobs.items()):
                    self._reconcile(name, body)

    def _reconcile(self, name: str, body: dict[str, Any]) -> None:
        status = body.setdefault("status", {})
        gang = self.gangs.setdefault(name, Gang())
        ends = [pod.poll() for pod in gang.pods]
        if "deletionTimestamp" in body["metadata"]:
            if not gang.stopped:
                gang.stopped = True
                self._end(gang)
            if all(end is not None for end in ends) and not self.pods_stay:
                del self.jobs[name]
            return
        if status.get("phase") in ("Succeeded", "Failed"):
            return
        if self.hold:
            status |= {"phase": "Pending", "message": self.hold}
            return
        if not gang.pods:
            gang.pods = [self._pod(body, rank) for rank in range(body["spec"]["worldSize"])]
            status |= {"phase": "Running", "message": "", "restarts": gang.restarts}
        elif any(end for end in ends):
            # A pod that is lost takes the gang along; who has something to say of the end says it on the way.
            self._end(gang)
            codes = [pod.wait() for pod in gang.pods]
            if 65 in codes:
                status |= {"phase": "Failed", "message": "a pod's work is wrong in itself"}
                return
            if not all(code in (0, 75) for code in codes):
                gang.restarts += 1
            limit = body["spec"]["restartPolicy"]["limit"]
            if gang.restarts > limit:
                status |= {"phase": "Failed", "message": f"restarted {limit} times"}
            gang.pods = []
        elif all(end == 0 for end in ends):
            status["phase"] = "Succeeded"

    @staticmethod
    def _end(gang: Gang) -> None:
        for pod in gang.pods:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)

    def _pod(self, body: dict[str, Any], rank: int) -> subprocess.Popen[bytes]:
        spec = body["spec"]
        local = max(1, spec.get("npusPerPod", 0))
        if rank == 0:
            self._port = free_port()
        told = {"id": spec.get("jobId") or body["metadata"]["name"], "kind": spec["kind"], "room": spec.get("room", ""), "parameters": spec["parameters"]}
        environment = {
            "WORLD_SIZE": str(local * spec["worldSize"]),
            "RANK": str(local * rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "SEMANTIDE_GANG_JOB": json.dumps(told),
        }
        return subprocess.Popen(
            spec["command"],
            env={**os.environ, **self._environment, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def wait_until(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
