"""The door to FastAPI: one application factory with authentication, body limits, error mapping, health and metrics; and the server that it runs in.

Rooms' ``api.py`` import the names they need from here. Every route but ``/healthz`` and ``/readyz`` wants an API key:
``Authorization: Bearer KEY``, ``X-API-Key: KEY``, or Basic with the key as password (so that a browser can open ``/docs``).
An error is ``{"error": {"type", "message", "details"?}}``.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import APIRouter, Body, Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from semantide.shared import broker as broker_door
from semantide.shared.access import OPEN_PATHS, UNLIMITED_PATHS, audited, needed_role, without_user
from semantide.shared.api_keys import ApiKey, api_keys
from semantide.shared.audit import AuditEntry, AuditLog
from semantide.shared.errors import BadData, BrokerUnavailable, Conflict, NotFound, SemantideError, TransientError
from semantide.shared.listening import EVERY, bound_socket, listening_address
from semantide.shared.rate_limits import RateLimits
from semantide.shared.redaction import Redaction
from semantide.shared.room import Room
from semantide.shared.telemetry import logger, metrics_page
from semantide.shared.version import code_version

__all__ = [
    "OUR_FAULTS",
    "APIRouter",
    "Body",
    "Depends",
    "FastAPI",
    "HTTPException",
    "IdempotencyKey",
    "JSONResponse",
    "PathParameter",
    "Query",
    "Request",
    "Response",
    "Server",
    "StreamingResponse",
    "build_app",
    "presented_key",
    "run_in_threadpool",
]

# ValueErrors that no caller's argument causes: stored state that cannot be parsed. Callers' bodies are checked before.
OUR_FAULTS = (ValidationError, json.JSONDecodeError, UnicodeError)
UPLOAD_PREFIX = "/v1/uploads/"  # streams to disk with a limit of its own

IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=200, description="Sent again with the same key, it is the same job and not a second one"),
]

_SAID_BYTES = 4000  # of a body, for the audit log
_LAST_CALL_SECONDS = 0.5  # for the requests of connections that are through when a server ends
_DRAIN_SECONDS = 15  # for the answers
_PROBE_SECONDS, _FIRST_PROBE_SECONDS = 1.0, 4.0  # for the broker's answer to a probe, and until it has answered one

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Ready = Callable[[], tuple[bool, str]]


def presented_key(headers: dict[bytes, bytes]) -> str:
    """The key that a request presents, in whichever of the three ways; empty where it presents none."""
    if key := headers.get(b"x-api-key"):
        return key.decode("latin-1")
    scheme, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:  # no base64, no ASCII, no UTF-8
            return ""
    return ""


def _sent_by_another_site(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """A browser repeats Basic credentials for whatever page makes it send a request: a foreign page must not change anything with them."""
    basic = headers.get(b"authorization", b"")[:6].lower() == b"basic "
    return basic and scope["method"] not in ("GET", "HEAD") and headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


class ErrorBody(BaseModel):
    """What was wrong, with what value, and what to do; ``details`` names single fields or rows."""

    type: str
    message: str
    details: Any = None


class Readiness(BaseModel):
    """What a process can do: ``state`` says what serves, ``problems`` what does not."""

    status: Literal["ok", "degraded", "unready"]
    problems: list[str]
    state: list[str]


class ErrorAnswer(BaseModel):
    """Every answer that is an error."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request is malformed",
        401: "No valid key",
        403: "The key's role does not suffice, or the place may not be read",
        404: "What was asked for does not exist",
        405: "The route knows no such method",
        409: "The request contradicts what is there",
        413: "The body is too large",
        422: "A value cannot be used",
        429: "Too many requests: come again after Retry-After seconds",
        500: "A fault of ours; the log has its trace",
        503: "The cause may pass: come again after Retry-After seconds",
        507: "The disk has no room",
    }.items()
}
"""What any route may answer instead."""


class _ErrorResponse(JSONResponse):
    """An error may quote anything that a caller sent. Half of a surrogate pair, which UTF-8 cannot say, is escaped as JSON does."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")


def _error(status: int, kind: str, message: str, details: Any = None, headers: dict[str, str] | None = None) -> JSONResponse:
    body: dict[str, Any] = {"type": kind, "message": message}
    if details is not None:
        body["details"] = details
    return _ErrorResponse({"error": body}, status_code=status, headers=headers)


class Gate:
    """ASGI middleware: API key first, then its role and rate, then the body's size; what an admin changes goes into the audit log."""

    def __init__(self, app: Any, keys: Sequence[ApiKey], max_body_bytes: int, limits: RateLimits, audit: AuditLog | None = None) -> None:
        assert keys and all(key.secret for key in keys), "an empty key would let everybody in"
        self._app, self._keys, self._max = app, [(key.secret.encode(), key) for key in keys], max_body_bytes
        self._limits, self._audit = limits, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer 401 or 413."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        presented = presented_key(headers).encode()
        holders = [key for secret, key in self._keys if hmac.compare_digest(presented, secret)]
        if not holders:
            answer = _error(
                401,
                "Unauthorized",
                "no valid API key: send `Authorization: Bearer KEY` (`semantide key` prints the local one)",
                headers={"WWW-Authenticate": 'Basic realm="semantide"'},
            )
            await answer(scope, receive, send)  # type: ignore[arg-type]
            return
        if _sent_by_another_site(scope, headers):
            refusal = _error(403, "Forbidden", "another site's page sent this with the key that the browser keeps: send the key as a Bearer token")
            await refusal(scope, receive, send)  # type: ignore[arg-type]
            return
        holder, held = holders[0], list[dict[str, Any]]()
        if scope["path"] not in UNLIMITED_PATHS and (wait := self._limits.take(holder.name)):
            busy = _error(
                429,
                "RateLimited",
                f"key {holder.name} makes more requests than SEMANTIDE_RATE_LIMIT allows: try again in {wait:.2f} s",
                headers={"Retry-After": str(math.ceil(wait))},
            )
            await busy(scope, receive, send)  # type: ignore[arg-type]
            return
        if self._audit is not None and audited(scope["method"], scope["path"]):
            send = self._noting(scope, holder, held, send)
        role = needed_role(scope["method"], scope["path"])
        if not holder.may(role):
            weak = _error(403, "Forbidden", f"{scope['method']} {scope['path']} wants a key with the role {role}, and {holder.name} has the role {holder.role}")
            await weak(scope, receive, send)  # type: ignore[arg-type]
            return
        if scope["path"].startswith(UPLOAD_PREFIX):
            await self._app(scope, receive, send)
            return
        too_large = _error(413, "TooLarge", f"the body is larger than {self._max} bytes: send smaller batches, or raise SEMANTIDE_MAX_BODY_BYTES")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max:
            await too_large(scope, receive, send)  # type: ignore[arg-type]
            return
        # Read whole before the route runs: a body that turns out too large must not be half-handled.
        size, more = 0, True
        while more:
            message = await receive()
            held.append(message)
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > self._max:
                await too_large(scope, receive, send)  # type: ignore[arg-type]
                return
        messages = iter(held)

        async def replay() -> dict[str, Any]:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send)

    def _noting(self, scope: Scope, holder: ApiKey, held: Sequence[dict[str, Any]], send: Send) -> Send:
        """Write down what was asked before its outcome is told: whoever has the answer finds it in the log."""

        async def noting(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                said = b"".join(each.get("body", b"") for each in held)[:_SAID_BYTES].decode(errors="replace")
                origin, port = scope.get("client") or ("", 0)
                action = f"{scope['method']} {without_user(scope['path'])}"
                entry = AuditEntry(who=holder.name, role=holder.role, origin=f"{origin}:{port}", action=action, said=said, outcome=message["status"])
                await run_in_threadpool(self._note, entry)
            await send(message)

        return noting

    def _note(self, entry: AuditEntry) -> None:
        assert self._audit is not None
        try:
            self._audit.append(entry, int(time.time() * 1000))
        except broker_door.RedisError as error:
            logger("audit").error("the audit log cannot be written, the entry is here", **entry.model_dump(exclude={"id", "time"}), error=str(error))


class Server(uvicorn.Server):
    """Runs one application on one port. At its end whoever got through to it is answered, and whoever comes later is refused by the system, not cut off."""

    def __init__(self, app: FastAPI | Gate, host: str, port: int, backlog: int = 2048) -> None:
        options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "timeout_graceful_shutdown": _DRAIN_SECONDS}
        super().__init__(uvicorn.Config(app, host=listening_address(host), port=port, backlog=backlog, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, on addresses of both kinds where all are asked for."""
        if sockets is None and self.config.host == EVERY:
            try:
                sockets = [bound_socket(EVERY, self.config.port)]
            except OSError as error:
                logger("http").error("this address and port cannot be listened on", port=self.config.port, error=str(error))
                self.should_exit = True
                return
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait to be taken, close the port, give what was taken a moment to send its request; then as usual."""
        waiting = []
        for server in self.servers:
            ports = [each.dup() for each in server.sockets]
            server.close()  # the loop takes no more, the system keeps a port as long as the copy is open
            for port in ports:
                with port, suppress(BlockingIOError):
                    while True:
                        waiting.append(port.accept()[0])
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        await asyncio.sleep(_LAST_CALL_SECONDS)
        await super().shutdown(sockets)

    def _protocol(self) -> Any:
        return self.config.http_protocol_class(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def _status(error: SemantideError) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, Conflict):
        return 409
    if isinstance(error, BadData):
        return 422
    if isinstance(error, TransientError):
        return 503
    return 500


def _json_safe(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)[:200]
    return value if not isinstance(value, str) else value[:200]


class _BrokerWatch:
    """Whether the broker answers, told in a moment: a name that nobody resolves keeps whoever asks for it waiting for seconds."""

    def __init__(self, url: str) -> None:
        self._broker = broker_door.connect(url, check=False, patience_seconds=_FIRST_PROBE_SECONDS / 2)
        self._asking: threading.Thread | None = None
        self._lock = threading.Lock()
        self._said = ""
        self.reached = False

    def look(self) -> str:
        """Why the broker does not answer; empty where it does."""
        with self._lock:
            asking = self._asking
            if asking is None or not asking.is_alive():
                self._asking = asking = threading.Thread(target=self._ask, name="broker-watch", daemon=True)
                asking.start()
        patience = _PROBE_SECONDS if self.reached else _FIRST_PROBE_SECONDS
        asking.join(patience)
        return f"no answer within {patience:g} s" if asking.is_alive() else self._said

    def _ask(self) -> None:
        try:
            self._broker.ping()
        except broker_door.RedisError as error:
            self._said = str(error)
            return
        self._said, self.reached = "", True


def build_app(
    rooms: Sequence[Room],
    routers: Sequence[APIRouter],
    ready: Sequence[Ready] = (),
    start: Sequence[Callable[[], Callable[[], None]]] = (),
    failed: Sequence[Callable[[], str]] = (),
) -> FastAPI:
    """One application for the given rooms.

    ``ready`` hooks say whether a room can answer; each ``start`` runs at start-up and returns what to call at the end; ``failed`` ones say what
    went wrong with this process for good, so that whoever watches it starts it again.
    """
    room = rooms[0]
    keys = api_keys(room.settings)
    log, redaction = logger("http"), Redaction.of(room.settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        stops = [begin() for begin in start]
        yield
        for stop in reversed(stops):
            await run_in_threadpool(stop)

    app = FastAPI(
        title="Semantide",
        version=code_version().partition("+")[0],
        description="Generative recommendation: " + ", ".join(r.name for r in rooms),
        lifespan=lifespan,
        responses=ERRORS,
    )

    @app.get("/healthz", tags=["health"], summary="The process is alive")
    def healthz(response: Response) -> dict[str, str]:
        if wrong := [text for hook in failed if (text := hook())]:
            response.status_code = 503
        return {"status": "; ".join(wrong) or "ok"}

    # A probe asks what this process can do: what all of them share may be away, and leaving would help nobody.
    watch = _BrokerWatch(room.settings.redis_url)

    @app.get(
        "/readyz",
        tags=["health"],
        summary="This process can work; a broker that has gone away since it began is said, and takes no process out of service",
        response_model=Readiness,
        responses={503: {"model": Readiness}},
    )
    def readyz() -> Response:
        problems: list[str] = []
        state: list[str] = []
        away = watch.look()
        for hook in ready if watch.reached else ():
            fine, text = hook()
            (state if fine else problems).append(text)
        unready = bool(problems) or not watch.reached
        problems += [f"broker: {away}"] if away else []
        status = "unready" if unready else "degraded" if problems else "ok"
        return JSONResponse({"status": status, "problems": problems, "state": state}, status_code=503 if unready else 200)

    @app.get("/metrics", tags=["health"], summary="Prometheus metrics of this process", response_class=PlainTextResponse)
    def metrics() -> Response:
        page, content_type = metrics_page()
        return Response(page, media_type=content_type)

    for router in routers:
        app.include_router(router)

    @app.exception_handler(SemantideError)
    async def own_error(_: Request, error: SemantideError) -> Response:
        status = _status(error)
        if status == 500:
            log.error("request failed", error=str(error), exc_info=error)
        return _error(status, type(error).__name__, redaction.text(str(error)), headers={"Retry-After": "2"} if status == 503 else None)

    @app.exception_handler(ValueError)
    async def wrong_argument(request: Request, error: ValueError) -> Response:
        if isinstance(error, OUR_FAULTS):
            log.error("request failed", error=str(error), exc_info=error)
            return await unexpected(request, error)
        return _error(422, "ValueError", redaction.text(str(error)))

    @app.exception_handler(broker_door.RedisError)
    async def broker_away(_: Request, error: Exception) -> Response:
        return _error(503, BrokerUnavailable.__name__, redaction.text(f"the broker is away ({error}): try again"), headers={"Retry-After": "2"})

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        details = [{"field": ".".join(str(part) for part in e["loc"]), "problem": e["msg"], "value": _json_safe(e.get("input"))} for e in error.errors()[:50]]
        first = details[0] if details else {"field": "body", "problem": "is malformed", "value": ""}
        return _error(422, "InvalidRequest", f"{first['field']}: {first['problem']} (got {str(first['value'])[:80]!r})", details)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(_: Request, error: StarletteHTTPException) -> Response:
        return _error(error.status_code, "HTTPError", redaction.text(str(error.detail)), headers=dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return _error(500, "InternalError", f"an unexpected {type(error).__name__} happened here; the log has its trace")

    # Recommendations make a span and measure themselves: the instrumentation's share of their time would be larger than the rest of HTTP together.
    FastAPIInstrumentor.instrument_app(app, excluded_urls="healthz,readyz,metrics,v1/recommendations", exclude_spans=["receive", "send"])
    settings = room.settings
    limits = RateLimits(settings.rate_limit, settings.rate_limit_burst, time.monotonic)
    app.add_middleware(Gate, keys=keys, max_body_bytes=settings.max_body_bytes, limits=limits, audit=AuditLog(room.broker, settings.audit_days))
    return app
