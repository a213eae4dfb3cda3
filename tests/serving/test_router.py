"""The router in front of real serving applications that come, go and are cut off: nobody is answered wrong, nobody hears of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from semantide.services.serving.replicas import Asked
from semantide.services.serving.router import SEARCHES, Router, _history_items
from semantide.shared.api_keys import ApiKey
from semantide.shared.broker import free_port
from semantide.shared.gate import Gate
from semantide.shared.rate_limits import RateLimits
from semantide.shared.room import Room
from semantide.shared.server import Server as HttpServer

from .world import Server, World, post, storm, wait_until

KEY = "test-key"


class Plain:
    """A replica that says what a test wants: an ASGI application behind the real server."""

    def __init__(self, answer: Callable[[str, bytes], tuple[int, Any]], port: int | None = None) -> None:
        self.answer, self.asked = answer, 0
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._server = HttpServer(self, "127.0.0.1", self.port)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = (await receive()).get("body", b"")
        if scope["path"] == "/readyz":
            status, said = 200, {}
        else:
            self.asked += 1
            status, said = await asyncio.to_thread(self.answer, scope["path"], body)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    def __enter__(self) -> Plain:
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)


@contextmanager
def routing(
    addresses: list[str], patience_seconds: float = 30.0, answer_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[httpx.Client, Router]]:
    router = Router([f"http://{address}" for address in addresses], patience_seconds, answer_seconds, 1_000_000, clock)
    port = free_port()
    server = HttpServer(Gate(router, [ApiKey.parse(KEY)], 1_000_000, 600.0, RateLimits(0, 1, time.monotonic)), "127.0.0.1", port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": KEY}, timeout=120) as client:
            yield client, router
    finally:
        server.should_exit = True
        thread.join(60)


def test_replicas_roll_under_load_and_nobody_hears_of_it(world: World, make_room: Callable[[str], Room]) -> None:
    world.live()
    bodies = [{"user": f"u{number % 7}"} if number % 3 else {"history": [f"i{number % 50}", "i3"]} for number in range(90)]

    def replica() -> Server:
        return Server(replace(make_room("serving"), settings=world.room.settings))

    with ExitStack() as stack:
        servers = [stack.enter_context(replica()) for _ in range(2)]
        later = [replica() for _ in range(2)]
        for server in servers:
            wait_until(lambda server=server: server.client.get("/readyz").status_code == 200 and server.loaded()["model"])
        right = [server_items(servers[0], body) for body in bodies]
        with routing([server.url.removeprefix("http://") for server in (*servers, *later)]) as (client, router):
            assert client.get("/readyz").json()["replicas"] == 2
            replies: list[Any] = []
            loop = threading.Thread(target=lambda: replies.extend(asyncio.run(storm(str(client.base_url).rstrip("/"), bodies * 3, 6.0, KEY))))
            loop.start()
            for old, new in zip(servers, later, strict=True):
                stack.enter_context(new)
                address = new.url.removeprefix("http://")
                wait_until(lambda address=address: any(replica.ready and replica.address == address for replica in router.replicas))
                old.__exit__()
            loop.join(120)
            assert len(replies) == 270 and {reply.status for reply in replies} == {200}
            assert all([hit["item"] for hit in reply.body["items"]] == right[reply.number % 90] for reply in replies)
            assert sum(replica.requests for replica in router.replicas) == 0
            assert b"semantide_routed_requests" in client.get("/metrics").content


def server_items(server: Server, body: dict[str, Any]) -> list[str]:
    return server.items(**body)


def test_one_user_is_one_replicas_and_load_spreads() -> None:
    with Plain(lambda *_: (200, "a")) as a, Plain(lambda *_: (200, "b")) as b, routing([a.address, b.address]) as (client, _):
        answers = {user: {client.post("/v1/recommendations", json={"user": user}).json() for _ in range(3)} for user in map(str, range(20))}
        assert all(len(found) == 1 for found in answers.values())
        assert set.union(*answers.values()) == {"a", "b"}


def test_scores_go_where_a_user_s_prompt_is_and_past_replicas_that_fail() -> None:
    with Plain(lambda *_: (200, "a")) as a, Plain(lambda *_: (200, "b")) as b, routing([a.address, b.address]) as (client, _):
        answers = [{client.post(path, json={"user": str(user), "items": ["x"]}).json() for path in SEARCHES} for user in range(20)]
        assert all(len(found) == 1 for found in answers) and set.union(*answers) == {"a", "b"}
    with cutting() as (address, seen), Plain(lambda *_: (200, "whole")) as whole, routing([address, whole.address]) as (client, _):
        assert {client.post("/v1/scores", json={"user": str(user), "items": ["x"]}).json() for user in range(24)} == {"whole"} and seen
    assert Asked.of(b'{"user": "u", "items": ["x", "y", "z"]}').beams == 3


@pytest.mark.parametrize("status", [503, 429])
def test_what_one_replica_cannot_do_another_does(status: int) -> None:
    with Plain(lambda *_: (status, {})) as full, Plain(lambda *_: (200, {})) as free, routing([full.address, free.address]) as (client, _):
        assert {client.post("/v1/recommendations", json={"user": str(user)}).status_code for user in range(24)} == {200}
        assert full.asked > 0
        assert {client.get("/v1/serving/live").status_code for _ in range(6)} == {200}


def test_where_all_say_the_same_it_is_passed_on() -> None:
    with Plain(lambda *_: (429, {"error": "full"})) as a, Plain(lambda *_: (429, {"error": "full"})) as b, routing([a.address, b.address]) as (client, _):
        answer = client.post("/v1/recommendations", json={"user": "u"})
        assert (answer.status_code, answer.json(), a.asked, b.asked) == (429, {"error": "full"}, 1, 1)
    with Plain(lambda *_: (422, {"error": "wrong"})) as a, routing([a.address]) as (client, _):
        assert client.post("/v1/recommendations", json={"user": "u"}).status_code == 422 and a.asked == 1


def test_a_request_waits_for_a_replica_to_come() -> None:
    port = free_port()
    with routing([f"127.0.0.1:{port}"]) as (client, _):
        assert client.get("/readyz").status_code == 503
        got: list[int] = []
        asking = threading.Thread(target=lambda: got.append(client.post("/v1/recommendations", json={"user": "u"}).status_code))
        asking.start()
        with Plain(lambda *_: (200, {}), port):
            asking.join(60)
        assert got == [200]


def test_without_patience_or_replicas_the_answer_says_so() -> None:
    with routing([f"127.0.0.1:{free_port()}"], patience_seconds=0.0) as (client, _):
        answer = client.post("/v1/recommendations", json={"user": "u"})
        assert answer.status_code == 503 and "none of 1 replicas" in answer.json()["error"]["message"]


@contextmanager
def cutting() -> Iterator[tuple[str, list[bytes]]]:
    """A replica that is ready, reads whole requests, and cuts the connection."""
    seen: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def run() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    request = peer.recv(65536)
                    if request.startswith(b"GET /readyz"):
                        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                    elif request:
                        seen.append(request)
                        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

        threading.Thread(target=run, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


def test_half_an_answer_is_none_and_what_changes_something_is_sent_once() -> None:
    with cutting() as (address, seen), Plain(lambda *_: (200, "whole")) as whole, routing([address, whole.address]) as (client, router):
        for user in range(24):
            assert client.post("/v1/recommendations", json={"user": str(user)}).json() == "whole"
        assert seen, "nobody was the cutting replica's"
        for replica in router.replicas:
            if replica.address != address:
                router.replicas.begin(replica, Asked(), time.monotonic())
        wait_until(lambda: all(replica.ready for replica in router.replicas))
        seen.clear()
        answer = client.post("/v1/serving/rollback")
        assert answer.status_code == 502 and "look whether it was done" in answer.json()["error"]["message"] and len(seen) == 1


def test_what_replicas_do_not_survive_is_not_handed_round() -> None:
    with ExitStack() as stack:
        cut = [stack.enter_context(cutting()) for _ in range(5)]
        with routing([address for address, _ in cut]) as (client, _):
            answer = client.post("/v1/recommendations", json={"user": "u"})
            assert answer.status_code == 502 and "3 replicas left" in answer.json()["error"]["message"]
            assert sum(len(seen) for _, seen in cut) == 3


@pytest.mark.parametrize("clock", [time.monotonic, lambda: 0.0], ids=["true", "behind the timers"])
def test_a_request_that_no_replica_finishes_comes_to_an_end(clock: Callable[[], float]) -> None:
    hang = threading.Event()

    def hanging(*_: Any) -> tuple[int, Any]:
        hang.wait(60)
        return 200, "late"

    with ExitStack() as stack:
        stuck = [stack.enter_context(Plain(hanging)) for _ in range(3)]
        with routing([replica.address for replica in stuck], patience_seconds=0.0, answer_seconds=0.2, clock=clock) as (client, _):
            assert client.post("/v1/recommendations", json={"user": "u"}).status_code == 503
            assert sum(replica.asked for replica in stuck) == 1
        hang.set()


def test_a_client_that_leaves_frees_its_replica() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(*_: Any) -> tuple[int, Any]:
        entered.set()
        leave.wait(60)
        return 200, {}

    with Plain(slow) as a, routing([a.address]) as (client, router):
        with socket.create_connection((client.base_url.host, int(client.base_url.port or 0))) as peer:
            body = b'{"user": "u"}'
            peer.sendall(b"POST /v1/recommendations HTTP/1.1\r\nHost: h\r\nX-API-Key: test-key\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            assert entered.wait(60)
            assert sum(replica.requests for replica in router.replicas) == 1
        wait_until(lambda: sum(replica.requests for replica in router.replicas) == 0)
        leave.set()


def test_a_replica_that_hangs_is_passed_over_and_heads_have_no_body() -> None:
    hang = threading.Event()

    def hanging(*_: Any) -> tuple[int, Any]:
        hang.wait(60)
        return 200, "late"

    with Plain(hanging) as stuck, Plain(lambda *_: (200, "here")) as free, routing([stuck.address, free.address], answer_seconds=1.0) as (client, _):
        user = 0
        while not stuck.asked:  # which users are whose depends on the ports
            assert client.post("/v1/recommendations", json={"user": str(user)}).json() == "here"
            user += 1
        hang.set()
    with Plain(lambda *_: (200, "body")) as free, routing([free.address]) as (client, _):
        answer = client.head("/v1/serving/live")
        assert (answer.status_code, answer.content) == (200, b"")


def test_keys_and_limits_hold_at_the_router() -> None:
    with Plain(lambda *_: (200, {})) as a, routing([a.address]) as (client, _):
        url = str(client.base_url).rstrip("/")
        assert asyncio.run(post(url, "/v1/recommendations", {"user": "u"}, "wrong"))[0] == 401
        for method, path in (("POST", "/v1/recommendations"), ("PUT", "/v1/uploads/large")):
            assert client.request(method, path, content=(b"x" * 1000 for _ in range(1001))).status_code == 413
        assert a.asked == 0


def test_wrong_names_are_refused() -> None:
    for wrong in ("ftp://host", "http://host/path", "http://", "http://host:99999", f"http://{'x' * 64}:8000"):
        with pytest.raises(ValueError, match="route_to"):
            Router([wrong], 1.0, 1.0, 1, time.monotonic)
    with pytest.raises(ValueError, match="SEMANTIDE_ROUTE_TO"):
        Router([], 1.0, 1.0, 1, time.monotonic)


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ({"items": [], "history_items": 12, "unknown_history_items": 3}, 12),
        ({"unknown_history_items": 3, "history_items": 0}, 0),
        ({"items": [{"title": 'a "history_items":7 of "unknown_history_items":8'}], "history_items": 5}, 5),
        ({"unknown_history_items": 3}, None),
        ({"history_items": None}, None),
        ({}, None),
    ],
)
def test_an_answer_tells_how_long_the_history_was(answer: dict[str, Any], items: int | None) -> None:
    for text in (json.dumps(answer, separators=(",", ":")), json.dumps(answer)):
        assert _history_items(text.encode()) == items
    assert _history_items(b"") is None


def test_the_router_learns_what_requests_take() -> None:
    def answer(path: str, body: bytes) -> tuple[int, Any]:
        return 200, {"items": [], "history_items": json.loads(body)["beam_width"], "unknown_history_items": 0}

    with Plain(answer) as one, Plain(answer) as other, routing([one.address, other.address]) as (client, router):
        for number in range(40):
            told = client.post("/v1/recommendations", json={"user": f"u{number % 5}", "beam_width": 50})
            assert told.status_code == 200
        assert router.replicas._estimate._seen == 40 and len(router.replicas._visits) == 5
        assert all(replica.requests == 0 and replica.work == 0 for replica in router.replicas)
        before = one.asked
        for _ in range(5):
            client.post("/v1/recommendations", json={"user": "u1", "beam_width": 50})
        assert one.asked - before in (0, 5), "a user whose prompt is kept comes back to it"
