"""What an API server's refusals are to the operator, and what people are told of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from kubernetes import client

from semantide.operators.cluster import KubernetesApi
from semantide.shared.errors import Conflict, PermanentError, TransientError

_POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "lab"}, "spec": {}}


def created(status: int, page: bytes = b"", **answer: Any) -> None:
    """Create a pod at a server that answers so; ``page`` instead of a status of the server's own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            text = page or json.dumps({"kind": "Status", "status": "Failure", **answer}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{server.server_address[1]}"
        KubernetesApi(configuration).create(_POD)


def test_a_name_that_is_taken_is_not_a_creation_that_collided_with_another_one() -> None:
    with pytest.raises(Conflict):
        created(409, reason="AlreadyExists", message='pods "p" already exists')
    with pytest.raises(TransientError, match="resourcequotas"):
        created(409, reason="Conflict", message='Operation cannot be fulfilled on resourcequotas "small": the object has been modified')


def test_only_a_missing_right_asks_for_a_right() -> None:
    with pytest.raises(PermanentError, match="give the operator's service account this right"):
        created(403, reason="Forbidden", message='pods is forbidden: User "operator" cannot create resource "pods" in API group "" in the namespace "lab"')
    with pytest.raises(PermanentError, match="exceeded quota") as refused:
        created(403, reason="Forbidden", message='pods "p" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1')
    assert "service account" not in str(refused.value)


def test_an_answer_that_is_no_json_is_asked_for_again() -> None:
    with pytest.raises(TransientError, match="is there a proxy"):
        created(200, page=b"<html>please log in</html>")


def test_without_a_cluster_the_process_says_what_to_do() -> None:
    path = os.pathsep.join(place for place in sys.path if place)
    environment = {**os.environ, "KUBECONFIG": os.devnull, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-m", "semantide.operators"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "set KUBECONFIG" in done.stderr and "Traceback" not in done.stderr
