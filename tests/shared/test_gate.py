"""The gate before all routes: what is larger or slower than it may be goes no further, whatever route it was for; and no WebSocket passes."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from semantide.shared import operations_api
from semantide.shared.access import OPEN_PATHS
from semantide.shared.api_keys import ApiKey
from semantide.shared.contracts import ROOMS
from semantide.shared.gate import UPLOAD_PREFIX, Gate
from semantide.shared.http import build_app
from semantide.shared.rate_limits import RateLimits

from .test_access import DOORS, routes_of

KEY = (b"x-api-key", b"test-key")


@pytest.fixture
def app(make_room: Callable[[str], Any]) -> Any:
    rooms = [make_room(name) for name in ROOMS]
    rooms[0].settings.max_body_bytes, rooms[0].settings.body_seconds = 2048, 0.02
    return build_app(rooms, [operations_api.build(rooms[0]), *(DOORS[room.name].build(room) for room in rooms)])


async def asked(app: Any, method: str, path: str, blocks: list[bytes], *, ends: bool) -> dict[str, Any]:
    """The start of the answer to a request whose body comes in blocks, and then ends, or nothing more comes."""
    coming = iter(blocks)
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        block = next(coming, None)
        if block is not None:
            return {"type": "http.request", "body": block, "more_body": True}
        if not ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [KEY], "scheme": "http"}
    await app({**scope, "http_version": "1.1", "server": ("x", 80), "client": ("x", 1), "root_path": "", "asgi": {"version": "3.0"}}, receive, send)
    return {**said[0], "body": b"".join(message.get("body", b"") for message in said)}


def paths_of(app: Any) -> list[tuple[str, str]]:
    return sorted((method, re.sub(r"\{.*?\}", "x", template)) for method, template in routes_of(app) if template not in OPEN_PATHS)


def test_a_body_over_the_limit_or_without_an_end_goes_to_no_route(app: Any) -> None:
    for method, path in paths_of(app):
        slow = asyncio.run(asked(app, method, path, [b"{"], ends=False))
        assert slow["status"] == 408, (method, path, slow)
        assert b"SEMANTIDE_BODY_SECONDS" in slow["body"] and dict(slow["headers"])[b"connection"] == b"close"
        if (method, path) != ("PUT", f"{UPLOAD_PREFIX}x"):  # which streams to the disk, as long as that has room
            large = asyncio.run(asked(app, method, path, [b"x" * 1000] * 3, ends=True))
            assert large["status"] == 413 and b"SEMANTIDE_MAX_BODY_BYTES" in large["body"], (method, path, large)


def test_no_route_is_a_web_socket_and_none_gets_through(app: Any) -> None:
    assert len(paths_of(app)) > 40
    assert not [route.path for route in app.routes if "WebSocket" in type(route).__name__]
    for path in ["/", "/healthz", "/docs", *{path for _, path in paths_of(app)}]:
        for headers in ({}, {"X-API-Key": "test-key"}):
            with pytest.raises(Exception) as refused, TestClient(app).websocket_connect(path, headers=headers):
                pass
            assert getattr(refused.value, "code", None) == 1008, (path, refused.value)


def test_what_is_behind_a_gate_sees_no_web_socket_at_all() -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail(f"the gate let {scope} through")

    gate = Gate(inner, [ApiKey.parse("k")], 1000, 1.0, RateLimits(0, 1, lambda: 0.0))
    with pytest.raises(Exception) as refused, TestClient(gate).websocket_connect("/anything", headers={"X-API-Key": "k"}):
        pass
    assert getattr(refused.value, "code", None) == 1008
