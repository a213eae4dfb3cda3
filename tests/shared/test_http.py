"""The HTTP door: keys, sizes, errors, health."""

import base64
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from semantide.operators.page import Page
from semantide.shared import operations_api
from semantide.shared.access import OPEN_PATHS
from semantide.shared.api_keys import ApiKey, api_keys, local_key
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect, free_port
from semantide.shared.config import Settings
from semantide.shared.contracts import JOB_INPUTS, JOB_ROOMS, JobSpec
from semantide.shared.errors import BadData, Conflict, NotFound, PermanentError, TransientError
from semantide.shared.http import APIRouter, build_app
from semantide.shared.jobs import Jobs
from semantide.shared.queues import Queues
from semantide.shared.room import Room
from semantide.shared.server import Server

ERRORS = {
    "missing": (NotFound, 404),
    "clash": (Conflict, 409),
    "bad": (BadData, 422),
    "later": (TransientError, 503),
    "never": (PermanentError, 500),
    "wrong": (ValueError, 422),
}


@pytest.fixture
def app(make_room: Callable[[str], Any]) -> Any:
    room = make_room("serving")
    room.settings.max_body_bytes = 2048
    router = APIRouter()

    @router.get("/v1/raise/{name}")
    def fail(name: str) -> None:
        raise ERRORS[name][0](f"{name} happened: do otherwise")

    return build_app([room], [router, operations_api.build(room)], [lambda: (True, "")])


@pytest.fixture
def client(app: Any) -> TestClient:
    return TestClient(app, headers={"X-API-Key": "test-key"}, raise_server_exceptions=False)


def routes(app: Any) -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods] + [("GET", "/docs"), ("GET", "/openapi.json")]


def test_every_route_but_health_wants_a_key(app: Any) -> None:
    bare = TestClient(app)
    for method, path in routes(app):
        for headers in ({}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic ???"}):
            answer = bare.request(method, path, headers=headers)
            assert (answer.status_code == 401) != (path in OPEN_PATHS), (method, path)
    for odd in (b"Basic \xe9", b"Basic 4w==", b"Bearer \xe9", b"\xff"):
        assert bare.get("/v1/jobs", headers={b"Authorization": odd}).status_code == 401, odd
    assert "semantide key" in bare.get("/v1/jobs").json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["bearer", "header", "basic"])
def test_three_ways_to_present_a_key(app: Any, scheme: str) -> None:
    basic = base64.b64encode(b"anybody:test-key").decode()
    headers = {"bearer": {"Authorization": "Bearer test-key"}, "header": {"X-API-Key": "test-key"}, "basic": {"Authorization": f"Basic {basic}"}}[scheme]
    assert TestClient(app).get("/v1/jobs", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_one_shape(client: TestClient, name: str) -> None:
    answer = client.get(f"/v1/raise/{name}")
    assert answer.status_code == ERRORS[name][1]
    assert answer.json()["error"] == {"type": ERRORS[name][0].__name__, "message": f"{name} happened: do otherwise"}
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)


def test_a_wrong_field_is_named_with_its_value(client: TestClient) -> None:
    answer = client.post("/v1/jobs", json={"kind": "dance"})
    assert answer.status_code == 422
    assert "body.kind" in answer.json()["error"]["message"] and "dance" in answer.json()["error"]["message"]
    assert client.post("/v1/jobs", json={"kind": "train", "unknown": 1}).status_code == 422
    assert client.post("/v1/jobs", content=b"{").status_code == 422
    assert client.get("/v1/nowhere").status_code == 404


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused(client: TestClient, declared: bool) -> None:
    body = b'{"kind": "train", "recipe": "' + b"x" * 4096 + b'"}'
    content = body if declared else iter([body[:1000], body[1000:]])
    answer = client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})  # type: ignore[arg-type]
    assert answer.status_code == 413 and "SEMANTIDE_MAX_BODY_BYTES" in answer.json()["error"]["message"]


def test_a_job_with_an_unknown_input_is_refused(client: TestClient) -> None:
    spec = JobSpec(kind="train", inputs={"dataset": "datasets/sha256-" + "0" * 64})
    answer = client.post("/v1/jobs", json=spec.model_dump(mode="json"))
    assert answer.status_code == 404
    assert client.get("/v1/jobs").json() == []


def test_inputs_of_a_job_are_those_that_its_kind_knows(client: TestClient) -> None:
    """A name that nobody reads would be passed over in silence, and an artifact of another kind fails far from here."""
    every = {kind for inputs in JOB_INPUTS.values() for kinds in inputs.values() for kind in kinds}
    assert set(JOB_INPUTS) == set(JOB_ROOMS)
    for kind, known in JOB_INPUTS.items():
        wrong = {"jduge": f"rewards/sha256-{'0' * 64}"}
        answer = client.post("/v1/jobs", json={"kind": kind, "inputs": wrong})
        assert answer.status_code == 422 and "'jduge' is unknown" in answer.json()["error"]["message"], kind
        for name, kinds in known.items():
            for other in {*every, "evaluations"} if kinds else ():
                answer = client.post("/v1/jobs", json={"kind": kind, "inputs": {name: f"{other}/sha256-{'0' * 64}"}})
                assert answer.status_code == (404 if other in kinds else 422), (kind, name, other)
                assert other in kinds or f"name an artifact of {kinds[0]}" in answer.json()["error"]["message"]
    assert client.get("/v1/jobs").json() == []


def test_jobs_over_http(client: TestClient) -> None:
    job = client.post("/v1/jobs", json={"kind": "train", "recipe": "tiny"}).json()
    assert client.get(f"/v1/jobs/{job['id']}").json()["state"] == "queued"
    assert client.get("/v1/queues").json()["depths"]["semantide.training.RunJob"] == 1
    assert client.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job['id']}/cancel").status_code == 409
    assert client.post(f"/v1/jobs/{job['id']}/resume").json()["state"] == "queued"
    assert client.get(f"/v1/jobs/{job['id']}/metrics").json() == []
    assert client.get(f"/v1/jobs/{job['id']}/log").json() == {"log": ""}
    report = client.get(f"/v1/jobs/{job['id']}/report")
    assert report.headers["content-type"] == "text/html; charset=utf-8" and job["id"] in report.text
    assert client.get("/v1/jobs/nope/report").status_code == 404
    assert client.get("/v1/jobs/nope").status_code == 404


def test_health_says_what_is_wrong(make_room: Callable[[str], Any]) -> None:
    room = make_room("serving")
    client = TestClient(build_app([room], [], [lambda: (False, "serving: no model could be loaded")]))
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 503 and answer.json()["problems"] == ["serving: no model could be loaded"]
    fine = TestClient(build_app([room], [], [lambda: (True, "serving model 7")])).get("/readyz")
    assert fine.status_code == 200 and fine.json() == {"status": "ok", "problems": [], "state": ["serving model 7"]}
    said = [""]
    watched = TestClient(build_app([room], [], failed=[lambda: said[0]]))
    assert watched.get("/healthz").status_code == 200
    said[0] = "RuntimeError: CUDA error: unspecified launch failure"
    ended = watched.get("/healthz")
    assert (ended.status_code, ended.json()) == (503, {"status": said[0]}), "a kubelet starts it again"


def test_a_broker_that_goes_away_takes_no_process_out_of_service_but_none_begins_without_it(settings: Any, tmp_path: Any) -> None:
    with OwnBroker(tmp_path / "own") as own:
        alone = settings.model_copy(update={"redis_url": own.url})
        room = Room("serving", alone, connect(own.url), ArtifactStore(alone.artifacts_root), Queues(own.url))
        began = TestClient(build_app([room], [], [lambda: (True, "serving model 7")]))
        assert began.get("/readyz").json()["status"] == "ok"
        own.stop()
        said = began.get("/readyz")
        assert (said.status_code, said.json()["status"], said.json()["state"]) == (200, "degraded", ["serving model 7"])
        assert said.json()["problems"][0].startswith("broker: ")
        late = TestClient(build_app([room], [], [lambda: pytest.fail("it was asked before the broker answered")]))
        assert (late.get("/readyz").status_code, late.get("/readyz").json()["status"]) == (503, "unready")
        own.start()
        while (said := began.get("/readyz").json())["status"] != "ok":
            assert said["state"] == ["serving model 7"]


def test_a_probe_does_not_wait_for_a_broker_that_says_nothing(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    room, silent = make_room("serving"), threading.Event()
    client = TestClient(build_app([room], [], [lambda: (True, "serving model 7")]))
    assert client.get("/readyz").json()["status"] == "ok"
    resolve = socket.getaddrinfo

    def stuck(*arguments: Any, **options: Any) -> Any:
        silent.wait(60)
        return resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    room.broker.client_kill_filter(_type="normal", skipme=True)
    try:
        said = client.get("/readyz")
        assert said.status_code == 200 and "no answer within" in said.json()["problems"][0]
    finally:
        silent.set()


def test_keys_beyond_loopback_must_be_configured(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="SEMANTIDE_API_KEYS"):
        api_keys(Settings(data_dir=tmp_path, host="0.0.0.0", api_keys=""))
    assert api_keys(Settings(data_dir=tmp_path, host="0.0.0.0", api_keys="a, b")) == [ApiKey.parse("a"), ApiKey.parse("b")]
    made = api_keys(Settings(data_dir=tmp_path, api_keys=""))
    assert made == api_keys(Settings(data_dir=tmp_path, api_keys="")) == [ApiKey.parse(local_key(tmp_path) or "")]
    assert (tmp_path / "api_key").stat().st_mode & 0o077 == 0


def test_a_key_file_that_a_crash_left_empty_lets_nobody_in(make_room: Callable[[str], Any]) -> None:
    room = make_room("serving")
    room.settings.api_keys = ""
    room.settings.data_dir.mkdir(parents=True)
    (room.settings.data_dir / "api_key").touch()
    assert local_key(room.settings.data_dir) is None
    client = TestClient(build_app([room], [operations_api.build(room)]))
    assert client.get("/v1/jobs").status_code == 401
    assert client.get("/v1/jobs", headers={"X-API-Key": ""}).status_code == 401
    key = local_key(room.settings.data_dir)
    assert key and client.get("/v1/jobs", headers={"X-API-Key": key}).json() == []
    assert [path.name for path in room.settings.data_dir.glob("*api_key*")] == ["api_key"]


def test_another_sites_page_cannot_use_the_key_that_a_browser_keeps(app: Any) -> None:
    browser = TestClient(app, headers={"Authorization": "Basic " + base64.b64encode(b"me:test-key").decode()})
    spec = {"kind": "dataset"}
    assert browser.post("/v1/jobs", json=spec, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert browser.post("/v1/jobs", json=spec, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 202
    assert browser.get("/v1/jobs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_stored_state_that_cannot_be_read_is_no_fault_of_the_caller(make_room: Callable[[str], Any]) -> None:
    room = make_room("serving")
    jobs = Jobs(room.broker)
    record = jobs.submit(JobSpec(kind="train"))
    room.broker.hset(Jobs.key(record.id), "state", '"nonsense"')
    client = TestClient(build_app([room], [operations_api.build(room)]), headers={"X-API-Key": "test-key"}, raise_server_exceptions=False)
    assert client.get(f"/v1/jobs/{record.id}").status_code == 500


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.text.startswith("# HELP")


@pytest.mark.parametrize("number", range(3))
def test_at_its_end_a_server_answers_whoever_got_through(make_room: Callable[[str], Any], number: int) -> None:
    """Connections in the system's queue and those that have not said anything yet included; whoever comes later is refused at once."""
    router, room = APIRouter(), make_room("serving")

    @router.get("/v1/block")
    async def block() -> str:
        time.sleep(0.05)  # nothing is taken meanwhile
        return "done"

    server = Server(build_app([room], [router]), "127.0.0.1", port := free_port())
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    outcomes: Counter[str] = Counter()
    request = b"GET /v1/block HTTP/1.1\r\nHost: x\r\nX-API-Key: test-key\r\nConnection: close\r\n\r\n"

    def client(place: int) -> None:
        time.sleep(0.03 * place)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
                time.sleep(0.1 if place % 2 else 0)
                sock.sendall(request)
                answer = b"".join(iter(lambda: sock.recv(4096), b""))
            outcomes["answered" if answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'"done"') else f"{answer!r}"] += 1
        except ConnectionRefusedError:
            outcomes["refused"] += 1
        except OSError as error:
            outcomes[repr(error)] += 1

    clients = [threading.Thread(target=client, args=(place,)) for place in range(40)]
    for each in clients:
        each.start()
    while outcomes["answered"] < 3:
        time.sleep(0.001)
    time.sleep(0.01 * number)
    server.should_exit = True
    for each in [*clients, thread]:
        each.join(60)
    client(0)  # nobody listens any more
    assert outcomes["answered"] >= 3 and outcomes["refused"] and set(outcomes) == {"answered", "refused"}, outcomes


def test_the_cluster_is_what_the_operators_page_says(app: Any, client: TestClient, make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/v1/cluster").json() == {"configured": False, "time": None, "nodes": [], "jobs": [], "services": []}
    seen = {"time": 7.0, "nodes": [{"name": "a"}], "jobs": [], "services": []}
    said: list[dict[str, Any]] = [seen]
    page = Page(0, bytes, lambda: said.pop(0), lambda: True, lambda: True)
    page.start()
    room = make_room("serving")
    room.settings.operator_url = f"http://127.0.0.1:{page.port}/"
    asked = TestClient(build_app([room], [operations_api.build(room)]), headers={"X-API-Key": "test-key"}, raise_server_exceptions=False)
    try:
        assert asked.get("/v1/cluster").json() == {"configured": True, **seen}
        # Of several behind one name, the one that leads; if none does, what they say of that.
        resolve = socket.getaddrinfo

        def named(host: str, port: int, *more: Any, **others: Any) -> Any:
            places = [f"127.0.0.{n}" for n in (1, 1, 2, 3)] if host == "operators.test" else [host]
            return [found for place in places for found in resolve(place, port, *more, **others)]

        monkeypatch.setattr(socket, "getaddrinfo", named)
        room.settings.operator_url = f"http://operators.test:{page.port}"
        waits = {"time": None, "nodes": [], "jobs": [], "services": []}
        said[:] = [waits, seen, waits]
        assert asked.get("/v1/cluster").json() == {"configured": True, **seen} and said == [waits]
        said[:] = [waits] * 3
        assert asked.get("/v1/cluster").json() == {"configured": True, **waits} and not said
    finally:
        page.stop()
    gone = asked.get("/v1/cluster")
    assert gone.status_code == 503 and "SEMANTIDE_OPERATOR_URL" in gone.json()["error"]["message"]
