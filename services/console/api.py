"""The console's door: sign-in, sessions, the pages below /console, and the client that they talk to the stack with."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.client import responses
from typing import Any
from urllib.parse import parse_qs, quote

import httpx

from semantide.services.console import sessions
from semantide.services.console.answers import Refused
from semantide.services.console.login import login_page, safe_target
from semantide.shared.api_keys import ApiKey, api_keys
from semantide.shared.config import Settings
from semantide.shared.http import FastAPI, Response, presented_key

ROOT = "/console"
_PATIENCE_SECONDS = 30.0
_PROBE_SECONDS = 1.0
_WRONG_KEY_SECONDS = 0.5  # so that guessing is slow
_FORM_BYTES = 8 * 1024
# Everything comes from this server; the pages' library compiles templates and styles in the browser.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]

Scope = dict[str, Any]


class RestStack:
    """The stack's API over HTTP, with one key."""

    def __init__(self, client: httpx.AsyncClient, key: ApiKey) -> None:
        self.key, self._client, self._headers = key, client, {"Authorization": f"Bearer {key.secret}"}

    async def get(self, path: str, **parameters: Any) -> Any:
        """GET with query parameters; those that are None are left out."""
        return await self._call("GET", path, params={name: value for name, value in parameters.items() if value is not None})

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """Send a JSON body."""
        return await self._call(method, path, json=body)

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = await self._client.request(method, path, headers=self._headers, **options)
        except httpx.HTTPError as error:
            raise Refused(f"the stack does not answer ({type(error).__name__}): is it running?", 0) from error
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if answer.is_success:
            return answer.json() if is_json else answer.text
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{method} {path}: {answer.status_code} {responses.get(answer.status_code, '')}"
        raise Refused(message, answer.status_code)


class Console:
    """ASGI: the console below /console, everything else as ``app`` answers it. A browser that comes to / is led to the console."""

    def __init__(self, app: Any, pages: Any, keys: Sequence[ApiKey], client: httpx.AsyncClient) -> None:
        self._app, self._pages, self._keys, self._client = app, pages, {key.secret: key for key in keys}, client
        main = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(served: Any) -> AsyncIterator[Any]:
            with warnings.catch_warnings():
                # At its start the pages' library looks at every object of the process, and some of other libraries' warn when they are looked at.
                warnings.simplefilter("ignore", FutureWarning)
                pages_run = self._pages.router.lifespan_context(self._pages)
                await pages_run.__aenter__()
            try:
                async with main(served) as state:
                    yield state
            finally:
                await pages_run.__aexit__(None, None, None)
                await client.aclose()

        app.router.lifespan_context = lifespan

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer, or hand on."""
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or not (path == ROOT or path.startswith(f"{ROOT}/")):
            if scope["type"] == "http" and path == "/" and b"text/html" in dict(scope["headers"]).get(b"accept", b""):
                await Response(status_code=307, headers={"location": f"{ROOT}/"})(scope, receive, send)
                return
            await self._app(scope, receive, send)
            return
        await self._inside(scope, receive, send)

    async def _inside(self, scope: Scope, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        key = self._key(headers)
        if scope["type"] == "websocket":
            if key is None or not _own_origin(headers):
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._pages({**scope, "semantide_key": key}, self._while_held(headers, receive, send), send)
            return
        send = _with_headers(send)
        # A browser sends cookies and Basic credentials along with whatever page asks it to.
        if scope["method"] not in ("GET", "HEAD") and not _own_origin(headers):
            await Response("another site's page sent this\n", status_code=403)(scope, receive, send)
        elif scope["path"] == f"{ROOT}/login":
            await self._login(scope, receive, send)
        elif scope["path"] == f"{ROOT}/logout":
            leave = {"location": f"{ROOT}/login", "set-cookie": sessions.set_cookie("", ROOT, _secure(scope, headers))}
            await Response(status_code=303, headers=leave)(scope, receive, send)
        elif key is None:
            await self._refuse(scope, headers, receive, send)
        elif scope["path"].startswith(f"{ROOT}/reports/"):
            await self._report(scope, key, receive, send)
        elif scope["path"] == ROOT:
            await Response(status_code=307, headers={"location": f"{ROOT}/"})(scope, receive, send)
        else:
            await self._pages({**scope, "semantide_key": key}, receive, send)

    def _while_held(self, headers: dict[bytes, bytes], receive: Any, send: Any) -> Any:
        """An open page says something every half minute: it is cut off once its session has ended."""

        async def held() -> dict[str, Any]:
            message: dict[str, Any] = await receive()
            if message["type"] == "websocket.receive" and self._key(headers) is None:
                await send({"type": "websocket.close", "code": 1008})
                return {"type": "websocket.disconnect", "code": 1008}
            return message

        return held

    def _key(self, headers: dict[bytes, bytes]) -> ApiKey | None:
        held = sessions.holder(sessions.cookie_of(headers.get(b"cookie", b"").decode("latin-1")), list(self._keys), time.time())
        return self._keys[held] if held else self._same(presented_key(headers))

    def _same(self, presented: str) -> ApiKey | None:
        return next((key for secret, key in self._keys.items() if sessions.same(secret, presented)), None)

    async def _refuse(self, scope: Scope, headers: dict[bytes, bytes], receive: Any, send: Any) -> None:
        if b"text/html" in headers.get(b"accept", b"") and scope["method"] == "GET":
            wanted = quote(scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""), safe="/")
            await Response(status_code=303, headers={"location": f"{ROOT}/login?next={wanted}"})(scope, receive, send)
            return
        await Response("sign in first\n", status_code=401, headers={"www-authenticate": 'Basic realm="semantide"'})(scope, receive, send)

    async def _login(self, scope: Scope, receive: Any, send: Any) -> None:
        action = f"{ROOT}/login"
        if scope["method"] != "POST":
            wanted = parse_qs(scope["query_string"].decode("latin-1")).get("next", [""])[0]
            await Response(login_page(action, safe_target(wanted, ROOT)), media_type="text/html")(scope, receive, send)
            return
        form = parse_qs((await _body(receive)).decode("utf-8", "replace"))
        given, target = form.get("key", [""])[0].strip(), safe_target(form.get("next", [""])[0], ROOT)
        key = self._same(given)
        if key is None:
            await asyncio.sleep(_WRONG_KEY_SECONDS)
            await Response(login_page(action, target, "This is no key of this stack."), status_code=401, media_type="text/html")(scope, receive, send)
            return
        cookie = sessions.set_cookie(sessions.issue(key.secret, time.time()), ROOT, _secure(scope, dict(scope["headers"])))
        await Response(status_code=303, headers={"location": target, "set-cookie": cookie})(scope, receive, send)

    async def _report(self, scope: Scope, key: ApiKey, receive: Any, send: Any) -> None:
        job = quote(scope["path"].removeprefix(f"{ROOT}/reports/"), safe="")
        try:
            answer = Response(await RestStack(self._client, key).get(f"/v1/jobs/{job}/report"), media_type="text/html")
        except Refused as refusal:
            answer = Response(str(refusal), status_code=refusal.status or 503, media_type="text/plain")
        await answer(scope, receive, send)


def open_console(app: Any, settings: Settings) -> Console:
    """The console in front of an application that has the APIs; it shows those of ``console_stack`` where that is set."""
    there: dict[str, Any] = {"base_url": settings.console_stack}
    if not settings.console_stack:
        there = {"base_url": "http://localhost", "transport": httpx.ASGITransport(app, raise_app_exceptions=False)}
    return _console(app, settings, httpx.AsyncClient(timeout=_PATIENCE_SECONDS, **there))


def open_alone(settings: Settings) -> Console:
    """The console in a process of its own.

    Raises: ValueError where ``console_stack`` does not say whose APIs it shows.
    """
    if not settings.console_stack:
        raise ValueError("the console alone has no APIs to show: SEMANTIDE_CONSOLE_STACK says where they are, as in http://api:8000")
    client = httpx.AsyncClient(timeout=_PATIENCE_SECONDS, base_url=settings.console_stack)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        # The pages say it too: a console that left because the APIs are away would tell nobody why.
        try:
            (await client.get("/healthz", timeout=_PROBE_SECONDS)).raise_for_status()
        except httpx.HTTPError as error:
            return {"status": "degraded", "problems": [f"the APIs at {settings.console_stack} do not answer ({type(error).__name__})"], "state": []}
        return {"status": "ok", "problems": [], "state": []}

    return _console(app, settings, client)


def _console(app: Any, settings: Settings, client: httpx.AsyncClient) -> Console:
    from semantide.services.console.site import mount

    os.environ.setdefault("NICEGUI_STORAGE_PATH", str(settings.data_dir.absolute() / "console"))
    pages = mount(FastAPI(openapi_url=None, docs_url=None, redoc_url=None), ROOT, lambda key: RestStack(client, key))
    return Console(app, pages, api_keys(settings), client)


def _own_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether one of our own pages sends this. Clients that are no browsers name no origin, and keep no credentials that others could use."""
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] in (headers.get(b"host"), headers.get(b"x-forwarded-host"))


def _secure(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    return bool(scope.get("scheme") == "https" or headers.get(b"x-forwarded-proto", b"").lower() == b"https")


def _with_headers(send: Any) -> Any:
    async def add(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
        await send(message)

    return add


async def _body(receive: Any) -> bytes:
    held, more = b"", True
    while more and len(held) <= _FORM_BYTES:
        message = await receive()
        held += message.get("body", b"")
        more = message.get("more_body", False)
    return held[:_FORM_BYTES]
