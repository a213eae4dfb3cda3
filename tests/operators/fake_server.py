"""The API server in memory over HTTP, with discovery and watches: what the operator's process speaks to in fast tests."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from semantide.operators.cluster import KINDS, Body
from semantide.shared.errors import Conflict, NotFound
from tests.operators.fake_cluster import FakeCluster

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_PATIENCE_SECONDS = 0.2


class FakeServer:
    """Serves a cluster on a free port of loopback. Whoever else touches ``cluster`` holds ``changed``."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.changed = cluster, Condition()
        self._events: list[tuple[int, str, Body]] = []
        self._stopping = False
        cluster.watchers.append(self._remember)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                split = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(split.query).items()}
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                if query.get("watch") in ("true", "1"):
                    int(query.get("timeoutSeconds", "0"))  # as the real one, which takes no other number
                    self._watch(split.path, int(query.get("resourceVersion") or 0))
                    return
                status, answer = server._answer(self.command, split.path, query, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

            def _watch(self, path: str, version: int) -> None:
                kind, namespace, _, _ = server._place(path)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                place = 0
                try:
                    while not server._stopping:
                        with server.changed:
                            server.changed.wait_for(lambda seen=place: len(server._events) > seen or server._stopping, _PATIENCE_SECONDS)
                            news, place = server._events[place:], len(server._events)
                        for number, event, body in news:
                            if number > version and body["kind"] == kind and namespace in ("", body["metadata"].get("namespace", "")):
                                line = json.dumps({"type": event, "object": body}).encode() + b"\n"
                                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                                self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True  # who watched has gone

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        with self.changed:
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    def kubeconfig(self, path: Path) -> Path:
        """A file that leads here."""
        named = {"clusters": "cluster", "users": "user", "contexts": "context"}
        bodies: dict[str, Any] = {"cluster": {"server": self.address}, "user": {"token": "none"}, "context": {"cluster": "fake", "user": "fake"}}
        lists = {several: [{"name": "fake", one: bodies[one]}] for several, one in named.items()}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "fake", **lists}))
        return path

    def _remember(self, event: str, body: Body) -> None:
        with self.changed:
            self._events.append((int(body["metadata"]["resourceVersion"]), event, body))
            self.changed.notify_all()

    @staticmethod
    def _place(path: str) -> tuple[str, str, str, str]:
        """Kind, namespace, name and subresource of a path."""
        parts = path.strip("/").split("/")
        version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        kind = next((name for name, kind in KINDS.items() if kind.plural == rest[0] and kind.api_version in ("", version)), "")
        return kind, namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""

    def _answer(self, verb: str, path: str, query: dict[str, str], body: Body) -> tuple[int, Any]:
        found = self._discovery(path)
        if found is not None:
            return 200, found
        kind, namespace, name, part = self._place(path)
        try:
            with self.changed:
                match verb, bool(name):
                    case "GET", True:
                        return 200, self.cluster.get(kind, namespace, name)
                    case "GET", False:
                        listing = self.cluster.list(kind, namespace, query.get("labelSelector", ""))
                        # As the real one: items of a list do not say what they are.
                        items = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in listing.items]
                        return 200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": listing.version}, "items": items}
                    case "POST", _:
                        return 201, self.cluster.create(body)
                    case "PUT", _:
                        return 200, self.cluster.replace_status(body) if part == "status" else self.cluster.replace(body)
                    case "PATCH", _:
                        metadata = body["metadata"]
                        return 200, self.cluster.annotate(kind, namespace, name, metadata["annotations"], metadata.get("uid", ""))
                    case _:
                        uid = (body.get("preconditions") or {}).get("uid", "")
                        self.cluster.delete(kind, namespace, name, uid=uid, grace_seconds=body.get("gracePeriodSeconds"))
                        return 200, {"kind": "Status", "status": "Success"}
        except (NotFound, Conflict) as error:
            return (404 if isinstance(error, NotFound) else 409), {"kind": "Status", "status": "Failure", "message": str(error)}

    @staticmethod
    def _discovery(path: str) -> Any:
        versions = sorted({kind.api_version for kind in KINDS.values() if "/" in kind.api_version})
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = []
            for version in versions:
                one = {"groupVersion": version, "version": version.split("/")[1]}
                groups.append({"name": version.split("/")[0], "versions": [one], "preferredVersion": one})
            return {"kind": "APIGroupList", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in ("v1", *versions):
            return None
        resources = [
            {"name": kind.plural, "singularName": name.lower(), "kind": name, "namespaced": kind.namespaced, "verbs": _VERBS}
            for name, kind in KINDS.items()
            if kind.api_version == version
        ]
        if version == "v1":  # what a watcher waits for before it begins, although it asks for no namespace
            resources.append({"name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False, "verbs": _VERBS})
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
