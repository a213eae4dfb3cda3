"""Whoever signs in sees every page, whatever their key's role: what it may not do is off with the reason beside it, and is never asked of the stack. Nobody else gets in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import nicegui
import pytest
from nicegui import ui
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from semantide.services.console.answers import barred
from semantide.services.console.api import open_console
from semantide.shared.api_keys import ROLES, ApiKey, api_keys
from semantide.shared.config import Settings
from semantide.shared.gate import Gate
from semantide.shared.http import FastAPI, JSONResponse, Request, Response
from semantide.shared.rate_limits import RateLimits

KEYS = ",".join(f"{role}-person@{role}:secret-of-{role}" for role in ROLES)
PAGES = ("/", "/try", "/catalog", "/jobs", "/jobs/train-1", "/compare?jobs=train-1,train-2", "/models", "/cluster")
# What a page has beyond its words for keys without the role.
NEEDS_ADMIN = {"/": set(), "/jobs/train-1": {"Cancel"}, "/models": {"Roll back", "Promote", "If not worse", "Begin or change", "End the split"}}
SOCKET = "/console/_nicegui_ws/socket.io/?EIO=4&transport=websocket"

_JOB: dict[str, Any] = {
    "id": "train-1",
    "state": "running",
    "spec": {"kind": "train", "recipe": "tiny", "config": {"epochs": 2}, "inputs": {"dataset": "datasets/sha256-1"}, "seed": 1},
    "artifacts": {},
    "result": {},
    "error": "",
    "created": 1,
    "started": 2,
    "finished": None,
    "done": 1,
    "total": 2,
    "stage": "epoch 1",
    "attempt": 1,
    "npujob": None,
    "cancel_requested": False,
}
_SIDES = [
    {"name": "live", "model": "models/sha256-1", "catalog": "catalogs/sha256-1", "share": 0.9, "loaded": True, "error": None},
    {"name": "challenger", "model": "models/sha256-2", "catalog": "catalogs/sha256-1", "share": 0.1, "loaded": True, "error": None},
]
_COLLISIONS = {"items": 0, "rate": 0.0}
_LEVEL = {"level": 0, "used": 3, "size": 4, "utilisation": 0.75, "entropy_bits": 1.5, "normalised_entropy": 0.75, "largest_prefix_group": 2}
ANSWERS: dict[str, Any] = {
    "/v1/interactions/stats": {"interactions": 7, "items": 3, "waiting_batches": 0},
    "/v1/queues": {"depths": {"semantide.training.RunJob": 2}, "parked": {}, "dead_letters": 0},
    "/v1/jobs": [_JOB],
    "/v1/jobs/train-1": _JOB,
    "/v1/jobs/train-2": {**_JOB, "id": "train-2"},
    "/v1/jobs/train-1/metrics": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
    "/v1/jobs/train-2/metrics": [{"step": 1, "loss": 3.0}],
    "/v1/jobs/train-1/log": {"log": "what the process said"},
    "/v1/serving/live": {"model": "models/sha256-1", "loaded_model": "models/sha256-1", "previous": [{}], "retriever": None, "error": None},
    "/v1/serving/variants": {"variants": _SIDES},
    "/v1/serving/candidates": {"candidates": []},
    "/v1/serving/decisions": {"decisions": []},
    "/v1/artifacts": ["models/sha256-1"],
    "/v1/models": [{"model": f"models/sha256-{n}", "model_type": "generator", "recipe": "tiny", "metrics": {"recall@10": 0.1}} for n in (1, 3)],
    "/v1/catalogs/current/report": {
        "catalog": "catalogs/sha256-1",
        "items": 3,
        "level_sizes": [4, 4],
        "collisions": {"before": _COLLISIONS, "after": _COLLISIONS},
        "moved_items": 0,
        "verdict": {"reasons": [], "warnings": []},
        "levels": [_LEVEL],
        "reconstruction": {"after": {"share_of_variance": 0.1}},
    },
    "/v1/catalogs/current/tree": {"level_sizes": [4, 4], "branches": [{"code": 1, "items": 3, "examples": ["red thing"]}]},
    "/v1/cluster": {"configured": False, "time": None, "nodes": [], "jobs": [], "services": []},
    "/metrics": "",
}


@dataclass
class Front:
    """The console before a stack whose answers are fixed and whose gate is the real one; what the gate let through or not."""

    client: TestClient
    asked: list[tuple[str, int]] = field(default_factory=list)

    def sign_in(self, role: str) -> None:
        """Be that key's holder from now on."""
        self.client.cookies.clear()
        inside = self.client.post("/console/login", data={"key": f"secret-of-{role}"}, follow_redirects=False)
        assert inside.status_code == 303

    def open(self, path: str) -> tuple[str, list[Any]]:
        """A page's markup, and the elements that the server keeps of it."""
        before = set(nicegui.Client.instances)
        answer = self.client.get(f"/console{path}")
        assert answer.status_code == 200, answer.text
        (made,) = set(nicegui.Client.instances) - before
        return answer.text, list(nicegui.Client.instances[made].elements.values())


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("data"), host="127.0.0.1", api_keys=KEYS, redis_url="")
    app = FastAPI()
    asked: list[tuple[str, int]] = []

    @app.get("/{path:path}")
    def answer(path: str) -> Response:
        found = ANSWERS.get(f"/{path}")
        return JSONResponse({"error": {"type": "NotFound", "message": f"no {path}"}}, status_code=404) if found is None else JSONResponse(found)

    app.add_middleware(Gate, keys=api_keys(settings), max_body_bytes=1 << 20, body_seconds=60.0, limits=RateLimits(0.0, 1, lambda: 0.0))

    @app.middleware("http")
    async def noting(request: Request, further: Callable[[Request], Any]) -> Any:
        given = await further(request)
        asked.append((request.url.path, given.status_code))
        return given

    with TestClient(open_console(app, settings)) as client:
        yield Front(client, asked)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole_for_every_role(front: Front, role: str, path: str) -> None:
    front.sign_in(role)
    front.asked.clear()
    markup, elements = front.open(path)
    assert f"{role}-person ({role})" in markup
    assert front.asked and {status for _, status in front.asked} <= {200, 404}, "the pages ask for nothing that the key may not have"
    assert not [each for each in elements if each.props.get("role") == "alert"]
    texts = [each.text for each in elements if isinstance(each, ui.label)]
    reasons = {text for text in texts if text.startswith("This wants a key")}
    on = {each.text for each in elements if isinstance(each, ui.button) and each.enabled}
    if path in NEEDS_ADMIN and role != "admin":
        assert reasons == {f"This wants a key with the role admin, and yours has the role {role}."}
        assert not on & NEEDS_ADMIN[path]
    else:
        assert not reasons and NEEDS_ADMIN.get(path, set()) <= on


@pytest.mark.parametrize("role", ROLES)
def test_what_is_hidden_is_not_called_fine(front: Front, role: str) -> None:
    front.sign_in(role)
    _, elements = front.open("/")
    pictures = "".join(str(each.content) for each in elements if isinstance(each, ui.html))
    texts = {each.text for each in elements if isinstance(each, ui.label)}
    assert ("2 waiting, 1 jobs" in pictures) == (role == "admin") and ("1 jobs" in pictures) and ("idle" in pictures) == (role == "admin")
    assert ("All queues are empty." in texts) is False
    assert ("Nothing, of what this key shows." in texts) == (role != "admin")
    _, elements = front.open("/jobs/train-1")
    texts = {each.text for each in elements if isinstance(each, ui.label)}
    assert ("what the process said" in texts) == (role == "admin")


@pytest.mark.parametrize("role", ROLES)
def test_reasons_are_those_of_the_gate(role: str) -> None:
    @dataclass
    class Holder:
        key: ApiKey

    stack: Any = Holder(ApiKey("x", role))  # type: ignore[arg-type]
    assert barred(stack, "GET", "/v1/jobs") == ""
    assert (barred(stack, "POST", "/v1/items") == "") == (role != "read")
    assert (barred(stack, "POST", "/v1/serving/promote") == "") == (barred(stack, "GET", "/v1/nowhere") == "") == (role == "admin")


def test_a_websocket_wants_a_session(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    front.client.cookies.clear()
    wrong = [{}, {"cookie": "semantide_console=4000000000.a.b"}, {"authorization": "Bearer nobody"}, {"x-api-key": ""}]
    for path in (SOCKET, "/console", "/console/", "/console/jobs", "/console/login", "/console/logout"):
        for headers in wrong:
            with pytest.raises(WebSocketDisconnect) as ended, front.client.websocket_connect(path, headers=headers):
                pass
            assert ended.value.code == 1008
    # Whatever is not the console's has no websockets at all.
    for path in ("/", "/v1/jobs", "/consoles", "//console/_nicegui_ws/socket.io/", "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"):
        with pytest.raises(WebSocketDisconnect), front.client.websocket_connect(path):
            pass
    polling = SOCKET.replace("websocket", "polling")
    assert front.client.get(polling).status_code == front.client.post(polling).status_code == 401
    front.sign_in("read")
    with pytest.raises(WebSocketDisconnect), front.client.websocket_connect(SOCKET, headers={"origin": "http://evil.example"}):
        pass
    with front.client.websocket_connect(SOCKET, headers={"upgrade": "websocket"}) as socket:
        assert socket.receive_text().startswith("0{")
        socket.send_text("40")
        assert socket.receive_text().startswith("40")
        # Once the session has ended, so does what was opened in it.
        monkeypatch.setattr("semantide.services.console.api.time.time", lambda: 1e10)
        socket.send_text("3")
        with pytest.raises(WebSocketDisconnect) as ended:
            socket.receive_text()
        assert ended.value.code == 1008
