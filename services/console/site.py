"""The pages and their addresses, below the console's root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any

from nicegui import ui

from semantide.services.console import catalog, cluster, frame, jobs, models, overview, recommend
from semantide.services.console.answers import Refused, Stack
from semantide.shared.api_keys import ApiKey
from semantide.shared.http import Request

_PAGE_SECONDS = 60.0  # for the answers that a page begins with
_RECONNECT_SECONDS = 20.0

Show = Callable[[Stack], Awaitable[None]]


def mount(app: Any, root: str, stack_of: Callable[[ApiKey], Stack]) -> Any:
    """The application that has the pages; whose key a request has, its scope says."""
    ui.add_css(frame.STYLE, shared=True)

    async def framed(request: Any, title: str, here: str, show: Show) -> None:
        key: ApiKey = request.scope["semantide_key"]
        with frame.frame(title, here, _look(request), f"{key.name} ({key.role})"):
            try:
                await show(stack_of(key))
            except Refused as error:
                frame.refusal(error)

    _pages(framed)
    ui.run_with(
        app,
        title="Semantide",
        favicon=_ICON,
        mount_path=root,
        dark=None,
        language="en-US",
        tailwind=False,
        reconnect_timeout=_RECONNECT_SECONDS,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return app


_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="3" r="2.4" fill="#1f5fb0"/><circle cx="3" cy="12.5" r="2.4" fill="#c2571a"/>'
    '<circle cx="13" cy="12.5" r="2.4" fill="#2e8b57"/><path d="M8 3L3 12.5H13z" fill="none" stroke="#66707c"/></svg>'
)


def _look(request: Any) -> str:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get("semantide_look")
    except CookieError:
        return ""
    return found.value if found else ""


def _pages(framed: Callable[[Any, str, str, Show], Awaitable[None]]) -> None:
    plain = (("/", "Overview", overview.show), ("/try", "Try it", recommend.show), ("/catalog", "Catalog", catalog.show))
    for path, title, show in (*plain, ("/jobs", "Jobs", jobs.show_list), ("/models", "Models", models.show), ("/cluster", "Cluster", cluster.show)):
        _page(path, title, show, framed)

    @ui.page("/jobs/{ident}", response_timeout=_PAGE_SECONDS)
    async def one_job(request: Request, ident: str) -> None:
        await framed(request, "Job", "/jobs", lambda stack: jobs.show_one(stack, ident))

    @ui.page("/compare", response_timeout=_PAGE_SECONDS)
    async def compared(request: Request) -> None:
        asked = request.query_params.get("jobs", "")
        await framed(request, "Compare runs", "/jobs", lambda stack: jobs.show_compared(stack, asked))


def _page(path: str, title: str, show: Show, framed: Callable[[Any, str, str, Show], Awaitable[None]]) -> None:
    @ui.page(path, response_timeout=_PAGE_SECONDS)
    async def page(request: Request) -> None:
        await framed(request, title, path, show)
