"""Whatever takes a path or a reference stays where it belongs: a sweep over all routes, and over the jobs whose configuration names a path."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from semantide.services.ingestion import job as ingestion_job
from semantide.services.training.starting_point import checkpoint_folder
from semantide.shared import operations_api
from semantide.shared.contracts import JOB_ROOMS, ROOMS, JobSpec
from semantide.shared.errors import SemantideError
from semantide.shared.http import build_app
from semantide.shared.jobs import JobContext, Jobs

from .test_access import DOORS, routes_of

CANARY = "a-canary-that-nobody-may-see"


@pytest.fixture
def rooms(make_room: Callable[[str], Any], tmp_path: Path) -> list[Any]:
    rooms = [make_room(name) for name in ROOMS]
    (tmp_path / "open").mkdir()
    for room in rooms:
        room.settings.import_roots = str(tmp_path / "open")
    return rooms


@pytest.fixture
def client(rooms: list[Any]) -> TestClient:
    app = build_app(rooms, [operations_api.build(rooms[0]), *(DOORS[room.name].build(room) for room in rooms)])
    return TestClient(app, headers={"X-API-Key": "test-key"}, raise_server_exceptions=False)


@pytest.fixture
def outside(tmp_path: Path, rooms: list[Any]) -> Path:
    """A folder beside all that is open, as somebody would like it: a file of data, an artifact, a checkpoint; and links to it from within."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("log.csv", "manifest.json", "report.json", "reward.json", "beams.json", "semantide.json", "dataset.json", "config.json", "rejects.jsonl"):
        (folder / name).write_text(f'{{"files": {{}}, "canary": "{CANARY}"}}\n')
    data = rooms[0].settings.data_dir
    for inside in (tmp_path / "open", data / "uploads", data / "artifacts" / "models", data / "jobs"):
        inside.mkdir(parents=True, exist_ok=True)
        (inside / "link").symlink_to(folder)
    return folder


def ways_out(outside: Path) -> list[str]:
    up = "../" * 12
    return [
        *(f"{prefix}{up}{str(outside).lstrip('/')}{name}" for prefix, name in (("", ""), ("", "/log.csv"), ("models/", ""))),
        str(outside),
        f"{outside}/log.csv",
        f"//{outside}/log.csv",
        f"file://{outside}/log.csv",
        f"file:{outside}/log.csv",
        "../outside/log.csv",
        "link/log.csv",
        "link",
        "models/link",
        f"local://{outside}",
        "s3://bucket/key",
        "http://127.0.0.1:9/x",
        "memory://x",
        "~/x",
        "..",
        "../..",
        "\\..\\..\\outside\\log.csv",
        "log.csv\x00",
        "",
    ]


def test_no_route_follows_a_way_out(client: TestClient, outside: Path) -> None:
    before = {path: path.read_bytes() for path in outside.iterdir()}
    app: Any = client.app
    tried = 0
    for method, template in sorted(routes_of(app)):
        # Users and items are names of the callers' own, which nothing makes a path of.
        if "{" not in template or re.search(r"\{(user|item)", template):
            continue
        for way in ways_out(outside):
            for said in {quote(way, safe=""), *([quote(way, safe="/:")] if ":path}" in template else [])}:
                path = re.sub(r"\{.*?\}", lambda _, said=said: said, template)
                answer = client.request(method, path, content=b"x" if method == "PUT" else None, follow_redirects=False)
                tried += 1
                assert CANARY not in answer.text and answer.status_code < 500, (method, path, answer.status_code, answer.text[:200])
                # What normalises to another route, or to a name within the folder, is that.
                assert answer.status_code >= 300 or "outside" not in answer.text or method != "PUT", (method, path, answer.text)
    assert tried > 300
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_no_body_names_a_way_out(client: TestClient, outside: Path) -> None:
    reference = "models/sha256-" + "0" * 64
    for kind in JOB_ROOMS:
        assert client.post("/v1/jobs", json={"kind": kind, "inputs": {"any": "models/../../outside"}}).status_code == 422, kind
    for way in ways_out(outside):
        answer = client.post("/v1/imports", json={"path": way})
        assert answer.status_code in (403, 404, 422), (way, answer.text)
        assert client.post("/v1/jobs", json={"kind": "train", "inputs": {"dataset": way}}).status_code == 422, way
        for body in ({"model": way}, {"model": reference, "catalog": way or "x"}):
            assert client.post("/v1/serving/promote", json=body).status_code in (404, 422), body
        assert client.put("/v1/serving/variants", json={"variants": [{"name": "a", "model": way, "share": 0.5}]}).status_code in (404, 409, 422), way
        assert client.post("/v1/reward/scores", json={"reward": way, "users": [{"items": ["a"]}]}).status_code == 422, way
    assert client.get("/v1/jobs").json() == []


def test_no_job_reads_what_its_configuration_may_not_name(rooms: list[Any], outside: Path) -> None:
    """POST /v1/jobs takes any configuration: what the route for imports checks, the job checks too."""
    ingestion, training = (next(room for room in rooms if room.name == name) for name in ("ingestion", "training"))
    for way in ways_out(outside):
        for room, kind in ((ingestion, "import"), (training, "train")):
            record = Jobs(room.broker).submit(JobSpec(kind=kind, config={"path": way}))
            context = JobContext(record, room.settings, room.store, room.broker, room.queues)
            try:
                found = ingestion_job.run(context) if kind == "import" else checkpoint_folder(context, way)
            except (SemantideError, ValueError) as refused:
                assert CANARY not in str(refused)
            else:
                # A name that looks like an address is that of a folder below what is open; whether one is there its reader sees.
                assert isinstance(found, Path) and found.is_relative_to((outside.parent / "open").resolve()), (kind, way, found)
