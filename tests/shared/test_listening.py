"""Servers that listen everywhere answer at addresses of both kinds, and where there is no IPv6 at those of IPv4."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import prometheus_client
import pytest

from semantide.operators.page import Page
from semantide.shared.api_keys import api_keys
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.http import APIRouter, FastAPI
from semantide.shared.listening import bound_socket, listening_address
from semantide.shared.server import Server


@contextmanager
def served(host: str) -> Iterator[int]:
    """The port of a server that answers while the block runs."""
    app = FastAPI()
    router = APIRouter()
    router.add_api_route("/healthz", lambda: {"status": "ok"})
    app.include_router(router)
    server = Server(app, host, port := free_port())
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        assert server.started
        yield port
    finally:
        server.should_exit = True
        thread.join()


def loopbacks() -> list[str]:
    """Addresses of this machine's own; without IPv6 the half that matters is not tested."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("IPv6 IS NOT TESTED: this machine has no ::1")
    return ["127.0.0.1", "[::1]"]


def test_a_server_on_every_address_answers_at_both_kinds() -> None:
    hosts = loopbacks()
    with served("::") as port:
        for host in hosts:
            assert httpx.get(f"http://{host}:{port}/healthz").status_code == 200


def test_a_server_on_one_address_answers_there_alone() -> None:
    _, other = loopbacks()
    with served("127.0.0.1") as port:
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{other}:{port}/healthz")


def test_pages_of_figures_answer_at_both_kinds() -> None:
    hosts = loopbacks()
    page = Page(0, lambda: b"", dict, lambda: True, lambda: True)
    page.start()
    figures, thread = prometheus_client.start_http_server(0, addr=listening_address("::"))
    try:
        for host in hosts:
            assert httpx.get(f"http://{host}:{page.port}/healthz").status_code == 200
            assert httpx.get(f"http://{host}:{figures.server_port}/metrics").status_code == 200
    finally:
        page.stop()
        figures.shutdown()
        figures.server_close()
        thread.join()


def test_without_ipv6_every_address_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with served("::") as port:
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    with bound_socket("::", 0) as found:
        assert found.family == socket.AF_INET
    assert listening_address("127.0.0.1") == "127.0.0.1"


def test_a_port_that_is_taken_ends_the_server() -> None:
    with bound_socket("::", 0) as taken:
        taken.listen()
        server = Server(FastAPI(), "::", taken.getsockname()[1])
        server.run()
        assert not server.started


def test_every_address_wants_a_key() -> None:
    with pytest.raises(ValueError, match="SEMANTIDE_API_KEYS"):
        api_keys(Settings(host="::", api_keys=""))
