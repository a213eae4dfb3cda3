"""Who is signed in: a cookie that names an end and nothing else, signed with the API key that was given.

Whoever has a cookie had the key; another key, or none any more, ends all sessions of it. The key itself is not in the cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie

COOKIE = "semantide_console"
SESSION_SECONDS = 12 * 3600


def issue(key: str, now: float) -> str:
    """A session of a key's holder. ``now`` is seconds since 1970."""
    text = f"{int(now) + SESSION_SECONDS}.{secrets.token_hex(8)}"
    return f"{text}.{_mac(key, text)}"


def holder(cookie: str, keys: Sequence[str], now: float) -> str | None:
    """The key whose holder this session is of, or None: it has ended, or was not made here."""
    text, _, mac = cookie.rpartition(".")
    end = text.partition(".")[0]
    found = None
    for key in keys:
        if hmac.compare_digest(_mac(key, text).encode(), mac.encode(errors="replace")):
            found = key
    return found if end.isascii() and end.isdigit() and len(end) < 16 and now < int(end) else None


def cookie_of(header: str) -> str:
    """This application's cookie among those of a request."""
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def set_cookie(value: str, root: str, secure: bool) -> str:
    """The header that keeps a session in the browser; an empty value ends it. No script of a page can read it, and no other site's page can send it along."""
    lasting = SESSION_SECONDS if value else 0
    return f"{COOKIE}={value}; Path={root}; Max-Age={lasting}; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}"


def _mac(key: str, text: str) -> str:
    return hmac.new(key.encode(), b"semantide console session\0" + text.encode(errors="replace"), hashlib.sha256).hexdigest()


def same(key: str, presented: str) -> bool:
    """Whether it is this key, told in the same time whatever was presented."""
    return hmac.compare_digest(key.encode(), presented.encode(errors="replace"))
