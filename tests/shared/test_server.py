"""Connections that nobody has shown a key on yet: neither a head without end nor one that never ends is kept, and what is answered does not stay open for a body."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from semantide.shared.broker import free_port
from semantide.shared.http import APIRouter, build_app
from semantide.shared.server import HEAD_BYTES, BoundedHeads, Server


@pytest.fixture
def patience_seconds() -> float:
    return 0.3


@pytest.fixture
def port(make_room: Callable[[str], Any], patience_seconds: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(BoundedHeads, "patience_seconds", patience_seconds)
    server = Server(build_app([make_room("serving")], [APIRouter()]), "127.0.0.1", number := free_port())
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield number
    server.should_exit = True
    thread.join(60)


def said(port: int, *blocks: bytes) -> bytes:
    """Everything that a server says to these blocks until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        try:
            for block in blocks:
                sock.sendall(block)
            return b"".join(iter(lambda: sock.recv(4096), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b"reset"


@pytest.mark.parametrize(
    "begin", [b"", b"\r\n\r\n", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: ", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /he"]
)
def test_a_head_that_never_ends_is_let_go(port: int, begin: bytes) -> None:
    answer = said(port, begin)
    assert answer.count(b"HTTP/1.1 200") == begin.count(b"\r\n\r\nGET"), answer
    assert (b"HTTP/1.1 408" in answer) == bool(begin), answer  # whoever said nothing at all is told nothing


@pytest.mark.parametrize("patience_seconds", [3600.0])
@pytest.mark.parametrize("line", [b"A: b\r\n", b"a" * 700 + b": " + b"b" * 700 + b"\r\n"])
def test_a_head_without_bounds_is_refused(port: int, line: bytes) -> None:
    answer = said(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n", *([line * (4096 // len(line) + 1)] * (2 * HEAD_BYTES // 4096)))
    assert answer.startswith(b"HTTP/1.1 431") or answer == b"reset"


@pytest.mark.parametrize("patience_seconds", [3600.0])
def test_heads_within_bounds_pass_one_after_another(port: int) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * (HEAD_BYTES // 6 - 20)
    assert said(port, *[head, b"\r\n"] * 3, head + b"Connection: close\r\n\r\n").count(b"HTTP/1.1 200") == 4


def test_what_is_answered_does_not_stay_open_for_the_rest_of_a_body(port: int) -> None:
    answer = said(port, b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 401") and answer.count(b"HTTP/1.1") == 1
