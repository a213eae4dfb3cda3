"""The console's door: who is let in, who is led where, and that everything else stays as the APIs answer it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantide.services.console import sessions
from semantide.services.console.answers import Refused, all_of, known
from semantide.services.console.api import Console, RestStack, open_alone
from semantide.shared.api_keys import ApiKey
from semantide.shared.config import Settings
from semantide.shared.http import FastAPI, JSONResponse, Request, Response

HTML = {"accept": "text/html"}
SIGNED = {"cookie": f"{sessions.COOKIE}={sessions.issue('key-b', 4e9)}"}


def api() -> FastAPI:
    """An application with the routes that the tests ask for."""
    app = FastAPI()

    @app.get("/v1/jobs/{job}/report")
    def report(job: str, request: Request) -> Response:
        if job == "gone":
            return JSONResponse({"error": {"type": "NotFound", "message": "no job 'gone'"}}, status_code=404)
        return Response(f"{job} for {request.headers['authorization']}", media_type="text/html")

    @app.get("/v1/broken")
    def broken() -> Response:
        return Response("no json", status_code=502)

    @app.get("/")
    def root() -> dict[str, str]:
        return {"root": "api"}

    return app


async def pages(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Stands for the pages: says whose key it was handed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    await Response(f"pages of {scope['semantide_key'].secret}")(scope, receive, send)


pages.router = FastAPI().router  # type: ignore[attr-defined]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr("semantide.services.console.api._WRONG_KEY_SECONDS", 0.0)
    app = api()
    return Console(app, pages, [ApiKey("key-a"), ApiKey("key-b")], httpx.AsyncClient(base_url="http://stack", transport=httpx.ASGITransport(app)))


def ask(front: Console, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://here") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_a_browser_is_led_to_the_form_and_back(front: Console) -> None:
    assert ask(front, "GET", "/", headers=HTML).headers["location"] == "/console/"
    assert ask(front, "GET", "/").json() == {"root": "api"}
    away = ask(front, "GET", "/console/jobs?state=failed", headers=HTML)
    assert (away.status_code, away.headers["location"]) == (303, "/console/login?next=/console/jobs%3Fstate%3Dfailed")
    form = ask(front, "GET", away.headers["location"])
    assert form.status_code == 200 and 'value="/console/jobs?state=failed"' in form.text
    inside = ask(front, "POST", "/console/login", data={"key": " key-b ", "next": "/console/jobs?state=failed"})
    assert (inside.status_code, inside.headers["location"]) == (303, "/console/jobs?state=failed")
    cookie = inside.headers["set-cookie"].partition(";")[0]
    assert ask(front, "GET", "/console/jobs", headers={"cookie": cookie}).text == "pages of key-b"
    assert ask(front, "GET", "/console", headers={"cookie": cookie}).headers["location"] == "/console/"
    assert "Max-Age=0" in ask(front, "GET", "/console/logout", headers={"cookie": cookie}).headers["set-cookie"]


@pytest.mark.parametrize("key", ["", "wrong", "key-", "key-aa", "\x00", "ключ"])
def test_a_wrong_key_stays_outside(front: Console, key: str) -> None:
    answer = ask(front, "POST", "/console/login", data={"key": key, "next": "/console/"})
    assert answer.status_code == 401 and "set-cookie" not in answer.headers and "no key of this stack" in answer.text


@pytest.mark.parametrize("path", ["/console/", "/console/_nicegui_ws/socket.io", "/console/reports/a", "/console/anything"])
def test_nothing_is_shown_without_a_session(front: Console, path: str) -> None:
    assert ask(front, "GET", path).status_code == 401
    assert ask(front, "POST", path).status_code == 401
    assert ask(front, "GET", path, headers={"cookie": f"{sessions.COOKIE}={sessions.issue('other', 4e9)}"}).status_code == 401
    for way in ({"x-api-key": "key-a"}, {"authorization": "Bearer key-a"}):
        assert ask(front, "GET", path, headers=way).status_code in (200,)
    assert ask(front, "GET", path, auth=("anybody", "key-a")).status_code == 200


@pytest.mark.parametrize(
    "foreign", [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "http://evil.example"}, {"origin": "null"}], ids=str
)
def test_another_site_can_do_nothing_with_a_session(front: Console, foreign: dict[str, str]) -> None:
    assert ask(front, "POST", "/console/_nicegui_ws/socket.io", headers={**SIGNED, **foreign}).status_code == 403
    assert ask(front, "POST", "/console/login", headers=foreign, data={"key": "key-a"}).status_code == 403
    assert socket(front, {**SIGNED, **foreign}) == ["websocket.close"]
    assert socket(front, foreign) == ["websocket.close"]


@pytest.mark.parametrize("own", [{}, {"origin": "http://here"}, {"sec-fetch-site": "same-origin", "origin": "https://outside.example"}], ids=str)
def test_own_pages_may_talk(front: Console, own: dict[str, str]) -> None:
    assert ask(front, "POST", "/console/_nicegui_ws/socket.io", headers={**SIGNED, **own}).status_code == 200
    assert socket(front, {**SIGNED, **own}) == ["websocket.accept"]
    assert socket(front, own) == ["websocket.close"]


def socket(front: Console, headers: dict[str, str]) -> list[str]:
    """What a websocket is told first."""
    sent: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    raw = [(name.encode(), value.encode()) for name, value in {"host": "here", **headers}.items()]
    asyncio.run(front({"type": "websocket", "path": "/console/_nicegui_ws/socket.io", "headers": raw}, None, send))
    return sent


def test_everything_is_answered_with_a_policy(front: Console) -> None:
    for path in ("/console/login", "/console/", "/console/reports/a"):
        policy = ask(front, "GET", path, headers=SIGNED).headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "http" not in policy


def test_reports_are_fetched_with_the_sessions_key(front: Console) -> None:
    assert ask(front, "GET", "/console/reports/train-1", headers=SIGNED).text == "train-1 for Bearer key-b"
    gone = ask(front, "GET", "/console/reports/gone", headers=SIGNED)
    assert (gone.status_code, gone.text) == (404, "no job 'gone'")


def test_alone_it_says_whether_the_apis_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("semantide.services.console.site.mount", lambda app, root, stack_of: pages)
    with pytest.raises(ValueError, match="SEMANTIDE_CONSOLE_STACK says where"):
        open_alone(Settings(data_dir=tmp_path / "data", api_keys="key-a", console_stack=""))
    alone = open_alone(Settings(data_dir=tmp_path / "data", api_keys="key-a,read:key-b", console_stack="http://127.0.0.1:1"))
    assert ask(alone, "GET", "/healthz").status_code == 200
    away = ask(alone, "GET", "/readyz")
    assert away.status_code == 200 and away.json()["status"] == "degraded" and "http://127.0.0.1:1" in away.json()["problems"][0]
    assert ask(alone, "GET", "/console/", auth=("anybody", "key-b")).text == "pages of key-b"
    assert ask(alone, "GET", "/", headers=HTML).headers["location"] == "/console/"
    for path in ("/v1/jobs", "/metrics", "/docs", "/openapi.json"):
        assert ask(alone, "GET", path, headers={"x-api-key": "key-a"}).status_code == 404
    assert not (tmp_path / "data").exists()


def test_a_refusal_says_what_the_stack_says() -> None:
    async def run() -> None:
        client = httpx.AsyncClient(base_url="http://stack", transport=httpx.ASGITransport(api()))
        stack = RestStack(client, ApiKey("key"))
        with pytest.raises(Refused, match="no job 'gone'"):
            await stack.get("/v1/jobs/gone/report")
        with pytest.raises(Refused, match="502 Bad Gateway"):
            await stack.get("/v1/broken")
        assert await known(stack, "/v1/jobs/gone/report") is None and await known(stack, "/v1/catalogs/gone/report") is None
        assert await all_of(stack, "/v1/jobs/{}/report", ["gone", "there"]) == {"there": "there for Bearer key"}
        with pytest.raises(Refused, match="is it running"):
            await RestStack(httpx.AsyncClient(base_url="http://127.0.0.1:1"), ApiKey("key")).get("/v1/jobs")

    asyncio.run(run())
