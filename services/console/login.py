"""The page that asks for an API key. It needs no script."""

from __future__ import annotations

from html import escape
from urllib.parse import urlsplit

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5c6672;--line:#b9c1ca;--page:#f5f7f9;--card:#fff;--accent:#1f5fb0;--bad:#a3264c}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#9aa5b1;--line:#4a5563;--page:#12161c;--card:#1a2029;--accent:#7db4ff;--bad:#ff8fae}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0;display:grid;place-items:center;min-height:100vh}
main{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1.6rem;width:min(24rem,calc(100vw - 4rem))}
h1{font-size:1.3rem;margin:0 0 1rem}label{display:block;margin-bottom:.3rem}
input{box-sizing:border-box;width:100%;font:inherit;padding:.5rem;border:1px solid var(--line);border-radius:6px;background:var(--page);color:inherit}
button{font:inherit;margin-top:1rem;padding:.5rem 1.2rem;border:0;border-radius:6px;background:var(--accent);color:var(--card);cursor:pointer}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}.note{color:var(--soft);font-size:.9rem}.bad{color:var(--bad)}
"""


def login_page(action: str, target: str, problem: str = "") -> str:
    """The form; it leads on to ``target``."""
    said = f'<p class="bad" role="alert">{escape(problem)}</p>' if problem else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Sign in - Semantide</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><main><h1>Semantide</h1>{said}'
        f'<form method="post" action="{escape(action)}"><input type="hidden" name="next" value="{escape(target)}">'
        '<label for="key">API key</label><input id="key" name="key" type="password" autocomplete="current-password" required autofocus>'
        '<button>Sign in</button></form><p class="note">On this machine <code>semantide key</code> prints it.</p></main></body></html>'
    )


def safe_target(wanted: str, root: str) -> str:
    """Where to go after signing in: a page of the console, whatever was asked for."""
    parts = urlsplit(wanted)
    inside = not parts.scheme and not parts.netloc and "\\" not in wanted and (parts.path == root or parts.path.startswith(f"{root}/"))
    return wanted if inside and wanted.isprintable() and not wanted.startswith("//") else f"{root}/"
