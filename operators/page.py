"""The operator's page: figures for Prometheus, the cluster as it sees it, and whether it lives and is ready."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from semantide.shared.listening import EVERY, bound_socket

_CONTENT_TYPES = {"/metrics": CONTENT_TYPE_LATEST, "/cluster": "application/json"}


class Page:
    """Serves /metrics, /cluster, /healthz and /readyz from a thread of its own."""

    def __init__(
        self, port: int, metrics: Callable[[], bytes], cluster: Callable[[], dict[str, Any]], alive: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        answers: dict[str, Callable[[], tuple[int, bytes]]] = {
            "/metrics": lambda: (200, metrics()),
            "/cluster": lambda: (200, json.dumps(cluster()).encode()),
            "/healthz": lambda: _yes_or_no(alive()),
            "/readyz": lambda: _yes_or_no(ready()),
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path.split("?")[0])
                status, body = answer() if answer else (404, b"no such page\n")
                self.send_response(status)
                self.send_header("Content-Type", _CONTENT_TYPES.get(self.path.split("?")[0], "text/plain"))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        self._server = ThreadingHTTPServer(("", port), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = bound_socket(EVERY, port)
        self._server.server_activate()
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = Thread(target=self._server.serve_forever, name="page", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def _yes_or_no(answer: bool) -> tuple[int, bytes]:
    return (200, b"ok\n") if answer else (503, b"no\n")
