"""What each role may do, by walking every route of every room."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion import api as ingestion
from semantide.services.negatives import api as negatives
from semantide.services.reward import api as reward
from semantide.services.serving import api as serving
from semantide.services.tokenization import api as tokenization
from semantide.services.training import api as training
from semantide.shared import operations_api
from semantide.shared.access import OPEN_PATHS, ROUTES, audited, needed_role, without_user
from semantide.shared.api_keys import ROLES, ApiKey, configured_keys, own_key, strongest
from semantide.shared.audit import AuditEntry, AuditLog
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS
from semantide.shared.http import build_app
from semantide.shared.rate_limits import RateLimits

DOORS = {"ingestion": ingestion, "tokenization": tokenization, "negatives": negatives, "training": training, "reward": reward, "serving": serving}
KEYS = "reader@read:key-of-reader,write:key-of-writer,key-of-old-form"


@pytest.fixture
def app(make_room: Callable[[str], Any]) -> Any:
    rooms = [make_room(name) for name in ROOMS]
    for room in rooms:
        room.settings.api_keys = KEYS
    return build_app(rooms, [operations_api.build(rooms[0]), *(DOORS[room.name].build(room) for room in rooms)])


def walked(routes: Any) -> set[tuple[str, str]]:
    """Method and path of every route, those of included routers too."""
    found: set[tuple[str, str]] = set()
    for route in routes:
        if hasattr(route, "methods"):
            found |= {(method, route.path) for method in route.methods}
        elif inner := getattr(route, "routes", None):
            found |= walked(inner)
    return found


def routes_of(app: Any) -> set[tuple[str, str]]:
    listed = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    own = {("GET", path) for path in (app.docs_url, app.swagger_ui_oauth2_redirect_url, app.redoc_url, app.openapi_url) if path}
    return listed | own | {(method, path) for method, path in walked(app.routes) if method != "HEAD"}


def plain(template: str) -> str:
    return re.sub(r":path\}", "}", template)


def test_every_route_has_a_role_and_every_role_a_route(app: Any) -> None:
    said = [plain(route) for routes in ROUTES.values() for route in routes]
    assert len(said) == len(set(said))
    there = {f"{method} {plain(path)}" for method, path in routes_of(app) if path not in OPEN_PATHS}
    assert there == set(said), (there - set(said), set(said) - there)


def test_each_role_gets_what_is_its_own_and_no_more(app: Any) -> None:
    client = TestClient(app, raise_server_exceptions=False)
    keys = {key.role: key for key in configured_keys(KEYS)}
    assert set(keys) == set(ROLES) and keys["read"].name == "reader"
    for method, template in sorted(routes_of(app)):
        path = re.sub(r"\{.*?\}", "x", template)
        wanted = needed_role(method, path)
        for role, key in keys.items():
            # A body that no route takes: what gets through the gate is refused there, and does nothing.
            answer = client.request(
                method, path, headers={"X-API-Key": key.secret}, content=b"[" if method in ("POST", "PUT") else None, follow_redirects=False
            )
            refused = answer.status_code == 403 and "wants a key with the role" in answer.text
            assert refused == (path not in OPEN_PATHS and ROLES.index(role) < ROLES.index(wanted)), (method, path, role, answer.text)


@given(st.text(alphabet="/abvu1usershistoryexport{}%.\n", max_size=40), st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]))
def test_what_no_route_names_only_an_admin_may_ask_for(path: str, method: str) -> None:
    role = needed_role(method, f"/nowhere/{path}")
    assert role == "admin"
    assert needed_role("HEAD", f"/v1/{path}") == needed_role("GET", f"/v1/{path}")


@given(st.text(min_size=1, max_size=30), st.sampled_from(["", "/history", "/export"]))
def test_a_path_fit_for_a_log_names_no_user(user: str, below: str) -> None:
    found = without_user(f"/v1/users/{user}{below}")
    assert found.startswith("/v1/users/{user}") and found.removeprefix("/v1/users/{user}") in ("", "/history", "/export")
    assert needed_role("DELETE", f"/v1/users/{user}") == "admin" and audited("GET", f"/v1/users/{user}/export") and audited("DELETE", f"/v1/users/{user}")


def test_keys_are_parsed_as_they_always_were_and_with_roles() -> None:
    old, new, named = configured_keys("a=b+/:c, read:r ,shop@write:w:1")
    assert (old.secret, old.role, new.secret, new.role, named.secret, named.role, named.name) == ("a=b+/:c", "admin", "r", "read", "w:1", "write", "shop")
    assert "a=b" not in repr(old) and old.name.startswith("key-") and strongest([new, named]) == "w:1" and strongest([]) is None
    assert own_key(Settings(api_keys="read:r,k")) == "k" and ApiKey.parse("k").may("write") and not new.may("write")
    with pytest.raises(ValueError, match="make a key for each"):
        configured_keys("read:r,write:r")


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from("ab")), max_size=60), st.floats(0.1, 20), st.integers(1, 10))
def test_nobody_gets_more_than_burst_and_rate_and_nobody_takes_from_others(steps: list[tuple[float, str]], rate: float, burst: int) -> None:
    now = [0.0]
    limits = RateLimits(rate, burst, lambda: now[0])
    taken: dict[str, int] = {}
    for pause, who in steps:
        now[0] += pause
        wait = limits.take(who)
        if wait:
            assert taken.get(who, 0) >= burst and 0 < wait <= 1 / rate + 1e-9
        else:
            taken[who] = taken.get(who, 0) + 1
            assert taken[who] <= burst + rate * now[0] + 1e-6
    assert RateLimits(0, 1, lambda: 0.0).take("a") == 0


def test_a_key_beyond_its_rate_is_told_when_to_come_again(make_room: Callable[[str], Any]) -> None:
    room = make_room("serving")
    room.settings.api_keys, room.settings.rate_limit, room.settings.rate_limit_burst = KEYS, 0.001, 2
    client = TestClient(build_app([room], [operations_api.build(room)]), headers={"X-API-Key": "key-of-reader"})
    assert [client.get("/v1/jobs").status_code for _ in range(3)] == [200, 200, 429]
    refused = client.get("/v1/jobs")
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "RateLimited"
    assert client.get("/metrics").status_code == client.get("/healthz").status_code == 200
    assert client.get("/v1/jobs", headers={"X-API-Key": "key-of-writer"}).status_code == 200


def test_the_audit_log_says_who_did_what_from_where_and_what_came_of_it(app: Any, broker: Any) -> None:
    client = TestClient(app, raise_server_exceptions=False, client=("10.0.0.7", 4711))
    admin, reader = {"X-API-Key": "key-of-old-form"}, {"X-API-Key": "key-of-reader"}
    job = client.post("/v1/jobs", json={"kind": "dataset", "seed": 7}, headers=admin).json()
    client.get("/v1/jobs", headers=reader)
    client.post(f"/v1/jobs/{job['id']}/cancel", headers=reader)
    client.post("/v1/serving/promote", content=b"{", headers=admin)
    entries = client.get("/v1/audit", headers=admin).json()
    assert [(entry["action"], entry["who"], entry["outcome"]) for entry in entries] == [
        ("POST /v1/serving/promote", ApiKey.parse("key-of-old-form").name, 422),
        (f"POST /v1/jobs/{job['id']}/cancel", "reader", 403),
        ("POST /v1/jobs", ApiKey.parse("key-of-old-form").name, 202),
    ]
    assert entries[2]["said"] == '{"kind":"dataset","seed":7}' and entries[0]["origin"] == "10.0.0.7:4711" and entries[2]["time"] > 1_600_000_000_000
    assert [entry["outcome"] for entry in client.get("/v1/audit", params={"who": "reader"}, headers=admin).json()] == [403]
    assert client.get("/v1/audit", params={"since": entries[0]["time"] + 1}, headers=admin).json() == []
    assert len(client.get("/v1/audit", params={"limit": 1}, headers=admin).json()) == 1
    assert client.get("/v1/audit", headers=reader).status_code == 403
    assert "key-of" not in str(entries)


def test_old_entries_go_and_a_broker_that_is_away_stops_no_action(broker: Any) -> None:
    log = AuditLog(broker, 1)
    for number in range(300):
        broker.xadd("semantide:audit", {"entry": f'{{"who": "a", "role": "admin", "origin": "", "action": "x", "outcome": {number}}}'}, id=f"{1000 + number}-1")
    log.append(AuditEntry(who="b", role="admin", origin="", action="y", outcome=200), 5 * 86_400_000)
    assert [entry.who for entry in log.read(limit=1)] == ["b"]
    assert len(log.read(limit=1000)) < 300  # the broker drops in blocks of a hundred
