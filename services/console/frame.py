"""What every page has: title, ways to the other pages, the look, and the words for what went wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from nicegui import ui

from semantide.services.console.answers import Refused, Stack, barred

_ANSWER_SECONDS = 20.0
# What the system says, only the browser knows. The choice is kept before it is seen: whoever goes on at once takes it along.
_TOGGLE = """(() => {
const dark = !document.body.classList.contains('body--dark');
document.cookie = `semantide_look=${dark ? 'dark' : 'light'}; path=/console; max-age=31536000; samesite=lax`;
return dark;
})()"""

PAGES = (("/", "Overview"), ("/try", "Try it"), ("/catalog", "Catalog"), ("/jobs", "Jobs"), ("/models", "Models"), ("/cluster", "Cluster"))

STYLE = """
body{--ink:#1c2430;--soft:#5c6672;--line:#d3d9e0;--page:#f4f6f8;--card:#fff;--accent:#1f5fb0;--good:#1d7046;--bad:#a3264c;--warn:#8a5a00;
 background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
body.body--dark{--ink:#e4e8ee;--soft:#9aa5b1;--line:#3a4450;--page:#12161c;--card:#1a2029;--accent:#7db4ff;--good:#6fd3a0;--bad:#ff8fae;--warn:#f0c36a;background:var(--page)}
.q-page{padding:0}
.skip{position:absolute;left:-999px}.skip:focus{position:static;padding:.5rem 1rem;display:block}
.top{display:flex;flex-wrap:wrap;align-items:center;gap:.2rem 1.1rem;padding:.6rem 1.2rem;background:var(--card);border-bottom:1px solid var(--line)}
.top .brand{font-weight:700;color:var(--ink)}.top a{color:var(--soft);text-decoration:none;padding:.25rem 0}
.top a.here{color:var(--accent);border-bottom:2px solid var(--accent)}.top .end{margin-left:auto;display:flex;gap:.4rem;align-items:center}
main{display:block;max-width:1360px;margin:0 auto;padding:1rem 1.2rem 3rem}
h1{font-size:1.45rem;line-height:1.3;margin:.3rem 0 1rem;font-weight:650}h2{font-size:1.05rem;line-height:1.4;margin:0 0 .5rem;font-weight:650}h3{font-size:.95rem;margin:.8rem 0 .2rem;line-height:1.3;font-weight:650}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.1rem;margin:0 0 1rem;min-width:0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 1rem;align-items:start}
.line{display:flex;flex-wrap:wrap;gap:.6rem;align-items:flex-end}.line>*{min-width:0}.card .line{margin:.5rem 0}
a{color:var(--accent)}:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:14px}caption{text-align:left;color:var(--soft);padding:0 0 .3rem}
td,th{padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto;max-width:100%}
.note{color:var(--soft);font-size:14px;margin:0 0 .5rem}.soft{color:var(--soft);font-size:14px}.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.mono{font-family:ui-monospace,monospace;font-size:13px;overflow-wrap:anywhere}pre.log{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;max-height:28rem;overflow:auto;margin:0}
svg{width:100%;height:auto;display:block}svg text{fill:var(--ink)}figure svg text{fill:var(--soft);font-size:11px}figure{margin:0 0 1rem}
.key{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .35em 0 .9em}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.wide{display:block}.narrow{display:none}@media(max-width:700px){.wide{display:none}.narrow{display:block}main{padding:.8rem .8rem 3rem}.top{padding:.5rem .8rem}}
.q-field{min-width:min(100%,12rem)}.q-btn{text-transform:none}.body--dark .q-btn.text-primary{color:var(--accent)!important}.body--dark .q-btn.text-negative{color:var(--bad)!important}
"""


def heading(text: str, level: int = 2) -> Any:
    """A heading."""
    return ui.html(escape(text), sanitize=False, tag=f"h{level}")


def note(text: str, classes: str = "") -> Any:
    """A sentence in small print."""
    return ui.label(text).classes(f"note {classes}".strip())


def picture(svg: str) -> Any:
    """Markup of our own making, all foreign text in it escaped."""
    return ui.html(svg, sanitize=False)


@contextmanager
def card(title: str = "", level: int = 2) -> Iterator[Any]:
    """A part of a page."""
    with ui.element("section").classes("card") as made:
        if title:
            heading(title, level)
        yield made


@contextmanager
def frame(title: str, here: str, dark: str, who: str) -> Iterator[None]:
    """The page around its content, for ``who`` is signed in. ``dark`` is "dark", "light", or anything else for what the system says."""
    ui.page_title(f"{title} - Semantide")
    ui.query(".nicegui-content").style("padding:0;display:block;width:100%")
    ui.colors(primary="#1f5fb0", negative="#a3264c")
    mode = ui.dark_mode(True if dark == "dark" else False if dark == "light" else None)

    async def toggle() -> None:
        mode.value = await ui.run_javascript(_TOGGLE, timeout=_ANSWER_SECONDS)

    ui.html('<a class="skip" href="#content">Skip to the content</a>', sanitize=False)
    with ui.element("header").classes("top"):
        ui.label("Semantide").classes("brand")
        with ui.element("nav").classes("line").props('aria-label="Pages"'):
            for path, name in PAGES:
                link = ui.link(name, path)
                if path == here:
                    link.classes("here").props('aria-current="page"')
        with ui.element("div").classes("end"):
            ui.button("Light or dark", on_click=toggle).props("flat dense no-caps")
            ui.label(who).classes("soft").props('title="Whose key this is, and its role"')
            ui.link("Sign out", "/logout")
    with ui.element("main").props('id="content" tabindex="-1"'):
        heading(title, 1)
        yield


def permitted(stack: Stack, method: str, path: str, *controls: Any) -> bool:
    """Whether this key's holder may do that; where not, the controls are off and the reason stands beside them."""
    if reason := barred(stack, method, path):
        for control in controls:
            control.disable()
        note(reason, "warn")
    return not reason


def refusal(error: Exception) -> None:
    """Why there is nothing to see here."""
    with ui.element("div").props('role="alert"'):
        ui.label(str(error)).classes("bad")


async def live(refresh: Callable[[], Awaitable[None]], seconds: float) -> Any:
    """Fill the page now, and again every so many seconds as long as somebody looks; the timer. Why it cannot be is said on the page."""
    lost = ui.label("").classes("bad").props('role="status"')

    async def turn() -> None:
        try:
            await refresh()
        except Refused as error:
            lost.set_text(str(error))
        else:
            lost.set_text("")

    await turn()
    return ui.timer(seconds, turn, immediate=False)


async def told(action: Callable[[], Awaitable[str]]) -> bool:
    """Do something and say how it went. What began it may be gone from the page by then, the page is not."""
    page = ui.context.client
    try:
        said = await action()
    except Refused as error:
        with page:
            ui.notify(str(error), type="negative", multi_line=True, close_button="Close", timeout=0)
        return False
    if said:
        with page:
            ui.notify(said, type="positive")
    return True
