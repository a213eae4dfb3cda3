"""What a StatefulSet cannot take is said before an upgrade changes anything: Helm reads what is there from an API server, a small one here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "shop-semantide-redis"
PLACE = f"/apis/apps/v1/namespaces/shop/statefulsets/{NAME}"


class ApiServer:
    """Answers what Helm asks before it renders: versions, kinds, and the StatefulSet that is there."""

    def __init__(self) -> None:
        self.claim: dict[str, Any] | None = None
        self.kubeconfig = Path()
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, answer = server.answer(self.path.partition("?")[0])
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, path: str) -> tuple[int, Any]:
        self.asked.append(path)
        if path == "/version":
            return 200, {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            one = {"groupVersion": "apps/v1", "version": "v1"}
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": "apps", "versions": [one], "preferredVersion": one}]}
        if path in ("/api/v1", "/apis/apps/v1"):
            kinds = {
                "/api/v1": [("secrets", "Secret"), ("persistentvolumeclaims", "PersistentVolumeClaim")],
                "/apis/apps/v1": [("statefulsets", "StatefulSet")],
            }
            resources = [{"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]} for name, kind in kinds[path]]
            return 200, {"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2], "resources": resources}
        if self.claim is not None and path == PLACE:
            return 200, {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": NAME}, "spec": {"volumeClaimTemplates": [{"spec": self.claim}]}}
        return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": f"{path} not found"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    running = ApiServer()
    running.kubeconfig = tmp_path / "kubeconfig"
    bodies = {
        "clusters": {"cluster": {"server": f"http://127.0.0.1:{running.http.server_port}"}},
        "users": {"user": {"token": "none"}},
        "contexts": {"context": {"cluster": "shop", "user": "shop"}},
    }
    lists = {name: [{"name": "shop", **body}] for name, body in bodies.items()}
    running.kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "shop", **lists}))
    yield running
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture
def refusal(lint: ModuleType, server: ApiServer) -> Callable[..., str]:
    """Render as an upgrade would, over what the server has: what is said against it. What comes after rendering is not this server's."""

    def run(size: str, storage_class: str = "", *options: str) -> str:
        server.asked.clear()
        server.claim = {"resources": {"requests": {"storage": size}}, **({"storageClassName": storage_class} if storage_class else {})} if size else None
        connected = ("--dry-run=server", "--kubeconfig", str(server.kubeconfig))
        outcome = lint.helm("template", "shop", str(lint.CHART), "--namespace", "shop", *connected, *options)
        assert PLACE in server.asked
        return outcome.stderr if "redisStorage" in outcome.stderr else ""

    return run


def test_the_same_size_however_it_is_written_passes(refusal: Callable[..., str]) -> None:
    for size, asked in (("8Gi", "8Gi"), ("8Gi", "8192Mi"), ("1G", "1000M"), ("2Ti", "2048Gi")):
        assert not refusal(size, "", "--set", f"redisStorageSize={asked}")
    assert not refusal("8Gi", "fast", "--set", "redisStorageClass=fast")
    assert not refusal("", "", "--set", "redisStorageSize=3Gi"), "a first installation"


def test_another_size_or_class_is_refused_with_both_and_what_to_do(refusal: Callable[..., str]) -> None:
    error = refusal("8Gi", "", "--set", "redisStorageSize=16Gi")
    assert "redisStorageSize is 16Gi" in error and "was made with 8Gi" in error
    assert "--cascade=orphan" in error and f"data-{NAME}-0" in error
    error = refusal("8Gi", "fast")
    assert 'redisStorageClass is ""' in error and "redisStorageClass=fast" in error
