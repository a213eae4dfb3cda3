"""The gate before every application: who may enter, how often, with how much and how slowly. It knows no web framework.

A key comes in one of three ways: ``Authorization: Bearer KEY``, ``X-API-Key: KEY``, or Basic with the key as password (so that a browser can open ``/docs``).
No route behind it is a WebSocket, so none is let in; the console's, below ``/console``, never come here and have a sign-in of their own.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from semantide.shared.access import OPEN_PATHS, UNLIMITED_PATHS, audited, needed_role, without_user
from semantide.shared.api_keys import ApiKey
from semantide.shared.audit import AuditEntry, AuditLog
from semantide.shared.broker import RedisError
from semantide.shared.error_answers import error_json
from semantide.shared.errors import SlowRequest
from semantide.shared.rate_limits import RateLimits
from semantide.shared.telemetry import logger

UPLOAD_PREFIX = "/v1/uploads/"  # streams to disk with a limit of its own
_POLICY_VIOLATION = 1008
_SAID_BYTES = 4000  # of a body, for the audit log

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def presented_key(headers: Mapping[bytes, bytes]) -> str:
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


def _sent_by_another_site(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """A browser repeats Basic credentials for whatever page makes it send a request: a foreign page must not change anything with them."""
    basic = headers.get(b"authorization", b"")[:6].lower() == b"basic "
    return basic and scope["method"] not in ("GET", "HEAD") and headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


async def _refuse(send: Send, status: int, kind: str, message: str, **headers: str) -> None:
    body = error_json(kind, message)
    said = {"content-type": "application/json", "content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    await send({"type": "http.response.start", "status": status, "headers": [(name.encode(), value.encode()) for name, value in said.items()]})
    await send({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware: API key first, then its role and rate, then the body's size and pace; what an admin changes goes into the audit log."""

    def __init__(self, app: Any, keys: Sequence[ApiKey], max_body_bytes: int, body_seconds: float, limits: RateLimits, audit: AuditLog | None = None) -> None:
        """``body_seconds`` is how long a body may take; an upload's may take longer, but not pause for that long."""
        assert keys and all(key.secret for key in keys), "an empty key would let everybody in"
        self._app, self._keys, self._max, self._seconds = app, [(key.secret.encode(), key) for key in keys], max_body_bytes, body_seconds
        self._limits, self._audit = limits, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer why not."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        presented = presented_key(headers).encode()
        holders = [key for secret, key in self._keys if hmac.compare_digest(presented, secret)]
        if not holders:
            text = "no valid API key: send `Authorization: Bearer KEY` (`semantide key` prints the local one)"
            await _refuse(send, 401, "Unauthorized", text, www_authenticate='Basic realm="semantide"')
            return
        if _sent_by_another_site(scope, headers):
            await _refuse(send, 403, "Forbidden", "another site's page sent this with the key that the browser keeps: send the key as a Bearer token")
            return
        holder, held = holders[0], list[Message]()
        if scope["path"] not in UNLIMITED_PATHS and (wait := self._limits.take(holder.name)):
            text = f"key {holder.name} makes more requests than SEMANTIDE_RATE_LIMIT allows: try again in {wait:.2f} s"
            await _refuse(send, 429, "RateLimited", text, retry_after=str(math.ceil(wait)))
            return
        if self._audit is not None and audited(scope["method"], scope["path"]):
            send = self._noting(scope, holder, held, send)
        role = needed_role(scope["method"], scope["path"])
        if not holder.may(role):
            text = f"{scope['method']} {scope['path']} wants a key with the role {role}, and {holder.name} has the role {holder.role}"
            await _refuse(send, 403, "Forbidden", text)
            return
        if scope["method"] == "PUT" and scope["path"].startswith(UPLOAD_PREFIX):
            await self._app(scope, self._in_time(receive), send)
            return
        length = headers.get(b"content-length", b"0")
        if (length.isdigit() and int(length) > self._max) or not await self._held(receive, held):
            await _refuse(send, 413, "TooLarge", f"the body is larger than {self._max} bytes: send smaller batches, or raise SEMANTIDE_MAX_BODY_BYTES")
            return
        if not held:
            text = f"the body did not come within {self._seconds:g} s: send it faster, or raise SEMANTIDE_BODY_SECONDS"
            await _refuse(send, 408, SlowRequest.__name__, text, connection="close")
            return
        messages = iter(held)

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send)

    async def _held(self, receive: Receive, held: list[Message]) -> bool:
        """Read the body whole before the route runs, since one that turns out too large must not be half-handled; whether it is not. Nothing is held of one that came too slowly."""
        size, more = 0, True
        try:
            async with asyncio.timeout(self._seconds):
                while more and size <= self._max:
                    message = await receive()
                    held.append(message)
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            held.clear()
        return size <= self._max

    def _in_time(self, receive: Receive) -> Receive:
        async def patient() -> Message:
            try:
                return await asyncio.wait_for(receive(), self._seconds)
            except TimeoutError as error:
                text = f"the upload paused for {self._seconds:g} s: send it again without such a pause, or raise SEMANTIDE_BODY_SECONDS"
                raise SlowRequest(text) from error

        return patient

    def _noting(self, scope: Scope, holder: ApiKey, held: Sequence[Message], send: Send) -> Send:
        """Write down what was asked before its outcome is told: whoever has the answer finds it in the log."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = b"".join(each.get("body", b"") for each in held)[:_SAID_BYTES].decode(errors="replace")
                origin, port = scope.get("client") or ("", 0)
                action = f"{scope['method']} {without_user(scope['path'])}"
                entry = AuditEntry(who=holder.name, role=holder.role, origin=f"{origin}:{port}", action=action, said=said, outcome=message["status"])
                await asyncio.to_thread(self._note, entry)
            await send(message)

        return noting

    def _note(self, entry: AuditEntry) -> None:
        assert self._audit is not None
        try:
            self._audit.append(entry, int(time.time() * 1000))
        except RedisError as error:
            logger("audit").error("the audit log cannot be written, the entry is here", **entry.model_dump(exclude={"id", "time"}), error=str(error))
