"""One address for all replicas of serving: requests go where their user's prompt is kept and where there is room, and around replicas that come, go or fail.

    discover   names -> addresses, each second: a headless Service, or a plain list
    probe      GET /readyz of each replica: who is not ready gets nothing new
    forward    a recommendation that a replica did not answer whole (it left, it answered 503 or 429) is asked of the next one; without any it waits,
               but not for ever, and one that replicas do not survive is not handed round

Recommendations, scores and everything that only reads may be asked twice; what changes something is sent once, and its sender hears when nobody can tell what came of it.
An ASGI application; ``services/local.py`` puts the gate with keys and limits before it and runs it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.metrics import CallbackOptions, Observation

from semantide.services.serving.replica_connection import Headers, ReplicaConnections, ReplicaGone, Reply
from semantide.services.serving.replicas import NOTHING, Asked, Replica, Replicas
from semantide.shared.telemetry import fast_counter, logger, meter, metrics_page

SEARCHES = ("/v1/recommendations", "/v1/scores")
"""What models are asked: it may be asked twice, and goes where the user's prompt is kept."""

_DISCOVER_SECONDS = 1.0
_PROBE_SECONDS = 0.5
_ANSWER_SECONDS = 2.0  # of a probe
_PAUSE_SECONDS = 0.05  # before all replicas are asked once more
_UNAVAILABLE_SECONDS = 1.0  # for replicas that answer 503
_MOST_LEFT = 3  # replicas that left while they had one and the same request: it is likely to be the cause
_READING = ("GET", "HEAD", "OPTIONS")

Scope = dict[str, Any]
Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]


class Router:
    """Forwards requests to replicas. ``names`` are as in http://semantide-serving:8000; every address that a host has is a replica."""

    def __init__(self, names: Sequence[str], patience_seconds: float, answer_seconds: float, max_body_bytes: int, clock: Callable[[], float]) -> None:
        """``patience_seconds`` is how long a request waits for a replica, ``answer_seconds`` how long a recommendation may take before its replica counts as gone.

        A request is kept whole, to be asked again: one of more than ``max_body_bytes`` is refused.
        """
        self._names = [_host_and_port(name) for name in names]
        if not self._names:
            raise ValueError("no replicas to route to: name them in SEMANTIDE_ROUTE_TO, as in http://semantide-serving:8000")
        self._patience, self._answer_seconds, self._max_body, self._clock = patience_seconds, answer_seconds, max_body_bytes, clock
        self.replicas = Replicas()
        self._connections: dict[str, ReplicaConnections] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._log = logger("router")
        self._routed = fast_counter("semantide_routed_requests", "Requests that the router answered, by how", "outcome")
        self._again = fast_counter("semantide_routed_again", "Requests that were asked of another replica, by cause", "cause")
        made = meter("router")

        def gauge(name: str, value: Callable[[Replica], float], description: str, unit: str = "") -> None:
            def observe(_: CallbackOptions) -> Iterable[Observation]:
                return [Observation(value(replica), {"replica": replica.address}) for replica in self.replicas]

            made.create_observable_gauge(name, [observe], unit=unit, description=description)

        gauge("semantide_replica_ready", lambda replica: float(replica.ready), "Whether a replica takes requests")
        gauge("semantide_replica_requests", lambda replica: float(replica.requests), "Requests that a replica has from this router")
        gauge("semantide_replica_work", lambda replica: replica.work, "Work of these requests: time that they are expected to take", "s")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or live from start to end."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            reply = self._own(scope["path"]) or await self._unless_left(scope, receive)
            if reply is not None:
                headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
                await send({"type": "http.response.start", "status": reply.status, "headers": headers})
                await send({"type": "http.response.body", "body": reply.body})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def start(self) -> None:
        """Begin to look for replicas; the first look is over when this returns."""
        await self._discover()
        await asyncio.gather(*(self._probe(replica, self._connections[replica.address]) for replica in self.replicas))
        self._tasks.append(asyncio.create_task(self._keep_looking()))

    async def stop(self) -> None:
        """Look no more and close connections."""
        for task in [*self._tasks, *self._probes.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._probes.values(), return_exceptions=True)
        for connections in self._connections.values():
            connections.close()

    # Who is there.

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_DISCOVER_SECONDS)
            await self._discover()

    async def _discover(self) -> None:
        found: set[str] = set()
        for host, port in self._names:
            try:
                answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                # A name without addresses has no ready replicas at this moment; one that cannot be asked for says nothing of those that are known.
                if error.errno not in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
                    self._log.warning("replicas cannot be looked up, those that are known stay", host=host, error=str(error))
                    found |= {replica.address for replica in self.replicas}
                continue
            found |= {f"[{entry[4][0]}]:{port}" if entry[0] == socket.AF_INET6 else f"{entry[4][0]}:{port}" for entry in answers}
        for replica in self.replicas.set(found):
            self._connections[replica.address] = ReplicaConnections(replica.address)
            self._probes[replica.address] = asyncio.create_task(self._keep_probing(replica, self._connections[replica.address]))
        for address in set(self._probes) - found:
            self._probes.pop(address).cancel()
            self._connections.pop(address).close()

    async def _keep_probing(self, replica: Replica, connections: ReplicaConnections) -> None:
        while True:
            await self._probe(replica, connections)
            await asyncio.sleep(_PROBE_SECONDS)

    async def _probe(self, replica: Replica, connections: ReplicaConnections) -> None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                ready = (await connections.ask("GET", b"/readyz", (), b"")).status == 200
        except (ReplicaGone, TimeoutError):
            ready = False
        self._mark(replica, ready)

    def _mark(self, replica: Replica, ready: bool, cause: str = "") -> None:
        if ready != replica.ready:
            self._log.info("replica takes requests" if ready else "replica takes no requests", replica=replica.address, cause=cause)
        replica.ready = ready

    # What is asked.

    def _own(self, path: str) -> Reply | None:
        """What is asked of the router itself."""
        if path == "/healthz":
            return _json(200, {"status": "ok"})
        if path == "/readyz":
            ready = sum(replica.ready for replica in self.replicas)
            return _json(200, {"status": "ok", "replicas": ready}) if ready else _json(503, {"status": "unready", "problems": ["no replica is ready"]})
        if path == "/metrics":
            page, content_type = metrics_page()
            return Reply(200, [(b"content-type", content_type.encode())], page)
        return None

    async def _unless_left(self, scope: Scope, receive: Receive) -> Reply | None:
        """The answer, or None when the client left: its work is then given up at the replica too."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body:
                # The gate leaves uploads to the room that takes them piece by piece, which is not behind a router.
                return self._ended(_json(413, _error("TooLarge", f"the body is larger than {self._max_body} bytes: send files to an API of ingestion")))
            if not message.get("more_body", False):
                break
        answering = asyncio.create_task(self.forward(scope["method"], _target(scope), scope["headers"], bytes(body)))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._routed.labels("cancelled").inc()
                return None
            return answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def forward(self, method: str, target: bytes, headers: Headers, body: bytes) -> Reply:
        """Ask replicas until one has answered, or patience is over."""
        recommends = method == "POST" and target.partition(b"?")[0].decode("latin-1") in SEARCHES
        repeatable = recommends or method in _READING
        asked = Asked.of(body) if recommends else NOTHING
        began = self._clock()
        tried: set[str] = set()
        last: Reply | None = None
        left = 0
        hung = 0.0  # seconds that replicas hung: timers may fire a moment early, so the clock alone may say less
        while True:
            if max(self._clock() - began, hung) >= self._patience + self._answer_seconds:
                return self._ended(last or _unavailable(len(list(self.replicas))))
            replica = self.replicas.choose(asked, self._clock(), tried)
            if replica is None:
                # Where replicas answer, and all in the same way, waiting for long changes nothing.
                patience = self._patience if last is None else {429: 0.0}.get(last.status, min(self._patience, _UNAVAILABLE_SECONDS))
                if self._clock() - began >= patience:
                    return self._ended(last or _unavailable(len(list(self.replicas))))
                await asyncio.sleep(_PAUSE_SECONDS)
                tried.clear()
                continue
            tried.add(replica.address)
            given = self.replicas.begin(replica, asked, self._clock())
            items: int | None = None
            try:
                # The answer to HEAD is that to GET without its body, which the server in front leaves out.
                asking = self._connections[replica.address].ask("GET" if method == "HEAD" else method, target, headers, body, repeatable=repeatable)
                async with asyncio.timeout(self._answer_seconds if recommends else None):
                    last = await asking
                items = _history_items(last.body) if last.status == 200 else None
            except (ReplicaGone, TimeoutError) as gone:
                self._mark(replica, False, str(gone))
                if not repeatable:
                    return self._ended(
                        _json(502, _error("ReplicaGone", f"the replica left before it answered ({gone}): look whether it was done, then send it again"))
                    )
                left += isinstance(gone, ReplicaGone) and gone.had_request
                hung += self._answer_seconds if isinstance(gone, TimeoutError) else 0.0
                if left == _MOST_LEFT:
                    self._log.error("replicas leave while they have one and the same request: it is given up", replicas=left, last=replica.address)
                    return self._ended(
                        _json(502, _error("ReplicaGone", f"{left} replicas left while they had this request, so no other is asked: see their logs"))
                    )
                self._again.labels("gone").inc()
                last = None
                continue
            finally:
                self.replicas.end(given, self._clock(), items)
            if not repeatable or last.status not in (429, 503):
                return self._ended(last)
            self._again.labels("overloaded" if last.status == 429 else "unavailable").inc()

    def _ended(self, reply: Reply) -> Reply:
        self._routed.labels(f"{reply.status // 100}xx").inc()
        return reply


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _history_items(body: bytes) -> int | None:
    """How long the history was that an answer is based on. Within the texts of an answer quotes are escaped, so no item's name looks like the field."""
    _, found, rest = body.partition(b'"history_items":')
    digits = rest[:12].split(b",", 1)[0].split(b"}", 1)[0].strip() if found else b""
    return int(digits) if digits.isdigit() else None


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + scope["query_string"] if scope.get("query_string") else b"")


def _host_and_port(name: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises: ValueError.
    """
    parts = urlsplit(name if "//" in name else f"//{name}")
    try:
        host, port = parts.hostname or "", parts.port or 8000
        host.encode("idna")
    except ValueError as error:
        raise ValueError(f"route_to {name!r} is no address of replicas ({error}): write http://host:port") from error
    if not host or parts.scheme not in ("", "http") or parts.path.strip("/"):
        raise ValueError(f"route_to {name!r} is no address of replicas: write http://host:port")
    return host, port


def _json(status: int, value: Any) -> Reply:
    headers = [(b"content-type", b"application/json"), *([(b"retry-after", b"2")] if status == 503 else [])]
    return Reply(status, headers, json.dumps(value).encode())


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


def _unavailable(known: int) -> Reply:
    return _json(503, _error("TransientError", f"none of {known} replicas takes requests: try again in a moment"))
