"""Sessions: whoever signed in stays in for their time, and nobody else gets in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semantide.services.console.login import login_page, safe_target
from semantide.services.console.sessions import COOKIE, SESSION_SECONDS, cookie_of, holder, issue, set_cookie

keys = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), min_size=1, max_size=4, unique=True)
moments = st.floats(0, 1e10)


@given(keys, moments, st.data())
def test_a_session_is_of_its_keys_holder_until_it_ends(accepted: list[str], now: float, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(accepted))
    cookie = issue(key, now)
    assert key not in cookie or len(key) < 8
    assert holder(cookie, accepted, now) == key and holder(cookie, accepted, now + SESSION_SECONDS - 2) == key
    assert holder(cookie, accepted, now + SESSION_SECONDS + 1) is None
    assert holder(cookie, [other for other in accepted if other != key], now) is None


@given(keys, moments, st.data())
def test_what_was_changed_is_no_session(accepted: list[str], now: float, data: st.DataObject) -> None:
    cookie = issue(accepted[0], now)
    place = data.draw(st.integers(0, len(cookie) - 1))
    letter = data.draw(st.characters().filter(lambda letter: letter != cookie[place]))
    assert holder(cookie[:place] + letter + cookie[place + 1 :], accepted, now) is None


@given(st.text(), keys)
def test_no_text_is_a_session_by_chance(text: str, accepted: list[str]) -> None:
    assert holder(text, accepted, 0.0) is None


@given(st.text())
def test_any_header_is_read(header: str) -> None:
    assert isinstance(cookie_of(header), str)


def test_no_script_and_no_other_site_gets_the_cookie() -> None:
    cookie = issue("key", 0.0)
    header = set_cookie(cookie, "/console", secure=True)
    assert cookie_of(header.partition(";")[0]) == cookie and all(word in header for word in ("HttpOnly", "SameSite=Lax", "Secure", "Path=/console"))
    assert "Secure" not in set_cookie("x", "/console", secure=False) and f"{COOKIE}=; " in set_cookie("", "/console", secure=False)


@given(
    st.text()
    | st.sampled_from(
        ["//evil.example/console/", "https://evil.example/console", "/console/../v1", "/consoles", "/console\\@evil", "/console/jobs?a=1\r\nset-cookie: a"]
    )
)
def test_signing_in_leads_nowhere_but_to_the_console(wanted: str) -> None:
    target = safe_target(wanted, "/console")
    assert target == "/console" or target.startswith(("/console/", "/console?", "/console#")), target
    assert target.isprintable() and "\\" not in target


def test_the_form_says_what_others_wrote_as_text() -> None:
    page = login_page("/console/login", '/console/"><script>', "<script>")
    assert "<script" not in page
