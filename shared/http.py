"""The door to FastAPI: one application factory with the gate before it, error mapping, health and metrics.

Rooms' ``api.py`` import the names they need from here. Every route but ``/healthz`` and ``/readyz`` wants an API key (``shared/gate.py``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from semantide.shared import broker as broker_door
from semantide.shared.api_keys import api_keys
from semantide.shared.audit import AuditLog
from semantide.shared.error_answers import ERRORS, error_json
from semantide.shared.errors import BadData, BrokerUnavailable, Conflict, NotFound, SemantideError, SlowRequest, TransientError
from semantide.shared.gate import Gate
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
    "StreamingResponse",
    "build_app",
    "run_in_threadpool",
]

# ValueErrors that no caller's argument causes: stored state that cannot be parsed. Callers' bodies are checked before.
OUR_FAULTS = (ValidationError, json.JSONDecodeError, UnicodeError)

IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=200, description="Sent again with the same key, it is the same job and not a second one"),
]

_PROBE_SECONDS, _FIRST_PROBE_SECONDS = 1.0, 4.0  # for the broker's answer to a probe, and until it has answered one

_HEADERS = {503: {"Retry-After": "2"}, 408: {"Connection": "close"}}

Ready = Callable[[], tuple[bool, str]]


class Readiness(BaseModel):
    """What a process can do: ``state`` says what serves, ``problems`` what does not."""

    status: Literal["ok", "degraded", "unready"]
    problems: list[str]
    state: list[str]


def _error(status: int, kind: str, message: str, details: Any = None, headers: dict[str, str] | None = None) -> Response:
    return Response(error_json(kind, message, details), status_code=status, headers=headers, media_type="application/json")


def _status(error: SemantideError) -> int:
    if isinstance(error, SlowRequest):
        return 408
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
        return _error(status, type(error).__name__, redaction.text(str(error)), headers=_HEADERS.get(status))

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

    # Recommendations and scores make a span and measure themselves: the instrumentation's share of their time would be larger than the rest of HTTP together.
    FastAPIInstrumentor.instrument_app(app, excluded_urls="healthz,readyz,metrics,v1/recommendations,v1/scores", exclude_spans=["receive", "send"])
    settings = room.settings
    limits = RateLimits(settings.rate_limit, settings.rate_limit_burst, time.monotonic)
    log_of_admins = AuditLog(room.broker, settings.audit_days)
    app.add_middleware(Gate, keys=keys, max_body_bytes=settings.max_body_bytes, body_seconds=settings.body_seconds, limits=limits, audit=log_of_admins)
    return app
