"""The operator's page: figures for Prometheus, and whether it lives and is ready."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_LATEST

from semantide.shared.listening import EVERY, bound_socket


class Page:
    """Serves /metrics, /healthz and /readyz from a thread of its own."""

    def __init__(self, port: int, metrics: Callable[[], bytes], alive: Callable[[], bool], ready: Callable[[], bool]) -> None:
        answers: dict[str, Callable[[], tuple[int, bytes]]] = {
            "/metrics": lambda: (200, metrics()),
            "/healthz": lambda: _yes_or_no(alive()),
            "/readyz": lambda: _yes_or_no(ready()),
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path.split("?")[0])
                status, body = answer() if answer else (404, b"no such page\n")
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST if self.path.startswith("/metrics") else "text/plain")
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
