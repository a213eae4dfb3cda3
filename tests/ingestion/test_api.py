"""What the ingestion routes answer, above all to bad input."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from semantide.services.ingestion import api, uploads
from semantide.services.ingestion.sources import confined, files_below
from semantide.services.ingestion.stream import STREAM, decode, encode
from semantide.shared.http import build_app

NOW = int(time.time() * 1000)
GOOD = {"user": "u", "item": "i", "time": NOW, "action": "click"}


@pytest.fixture
def client(make_room: Any) -> Iterator[TestClient]:
    room = make_room("ingestion")
    with TestClient(build_app([room], [api.build(room)]), headers={"X-API-Key": "test-key"}, raise_server_exceptions=False) as client:
        yield client


def send(client: TestClient, *rows: Any) -> Any:
    return client.post("/v1/interactions", content=json.dumps({"interactions": list(rows)}))


def send_items(client: TestClient, *rows: Any) -> Any:
    return client.post("/v1/items", content=json.dumps({"items": list(rows)}))


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("action", {"action": "purchas"}, "SEMANTIDE_ACTIONS"),
        ("time", {"time": NOW // 1000}, "milliseconds: multiply by 1000"),
        ("time", {"time": NOW + 86_400_000}, "clock"),
        ("time", {"time": NOW * 1000}, "milliseconds"),
        ("time", {"time": "yesterday"}, "milliseconds"),
        ("time", {"time": NOW + 0.5}, "milliseconds"),
        ("time", {"time": 10**30}, "milliseconds"),
        ("time", {"time": -5}, "milliseconds"),
        ("user", {"user": ""}, "at least one character"),
        ("user", {"user": "a\nb"}, "control characters"),
        ("item", {"item": "x" * 300}, "256"),
        ("item", {"item": None}, "text"),
        ("item", {"item": ["a"]}, "text"),
        ("value", {"value": math.inf}, "finite"),
        ("position", {"position": -1}, "from 0 on"),
        ("propensity", {"propensity": 0}, "above 0"),
        ("propensity", {"propensity": 1.5}, "at most 1"),
        ("propensity", {"propensity": math.nan}, "number"),
        ("signals", {"signals": ["click", "purchas"]}, "SEMANTIDE_ACTIONS"),
        ("signals", {"signals": "click"}, "list"),
        ("signals", {"signals": ["click"] * 65}, "fewer"),
        ("valeu", {"valeu": 1}, "spelling"),
        ("user", {"user": "\ud800"}, "UTF-8"),
    ],
)
def test_a_bad_row_is_named_and_the_good_ones_go_in(client: TestClient, broker: Any, field: str, change: dict[str, Any], says: str) -> None:
    answer = send(client, GOOD, {**GOOD, **change}, GOOD)
    assert answer.status_code == 202, answer.text
    body = answer.json()
    assert (body["accepted"], body["rejected"]) == (2, 1)
    error = body["errors"][0]
    assert (error["index"], error["field"]) == (1, field)
    assert says in error["remedy"]
    assert "value" in error
    assert broker.xlen(STREAM) == 1


@pytest.mark.parametrize("row", [7, None, "text", [], {}])
def test_a_row_that_is_no_interaction_is_refused(client: TestClient, broker: Any, row: Any) -> None:
    answer = send(client, row)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["index"] == 0
    assert "none of the 1 rows" in answer.json()["error"]["message"]
    assert broker.exists(STREAM) == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b'{"interactions": [{"user": "\xff"}]}', "not UTF-8"),
        (b"user,item", "not JSON"),
        (b"[]", "one key"),
        (b'{"interactions": []}', "empty"),
        (b'{"interactions": {}, "more": 1}', "one key"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_body_says_what_to_send(client: TestClient, body: bytes, says: str) -> None:
    answer = client.post("/v1/interactions", content=body)
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]


def test_too_many_rows_are_413(client: TestClient, settings: Any) -> None:
    assert send(client, *[GOOD] * (settings.max_batch_rows + 1)).status_code == 413


def test_numeric_ids_are_taken_as_their_digits(client: TestClient) -> None:
    assert send(client, {**GOOD, "user": 7, "item": 8}).json()["accepted"] == 1


@pytest.mark.parametrize(
    ("field", "item", "says"),
    [
        ("title", {"id": "x", "title": "t" * 10_000_000}, "shorten"),
        ("embedding", {"id": "x", "embedding": [1.0, math.nan]}, "send the row again"),
        ("embedding", {"id": "x", "embedding": [1.0, 2.0, 3.0]}, "2 numbers"),
        ("id", {"id": "first"}, "once in a batch"),
        ("id", {"title": "nameless"}, "send the field"),
        ("price", {"id": "x", "price": 3}, "spelling"),
    ],
)
def test_a_bad_item_is_named(client: TestClient, field: str, item: dict[str, Any], says: str) -> None:
    answer = send_items(client, {"id": "first", "embedding": [0.0, 1.0]}, item, {"id": "textless"})
    body = answer.json()
    assert (answer.status_code, body["accepted"], body["rejected"]) == (202, 2, 1), answer.text[:500]
    error = body["errors"][0]
    assert (error["index"], error["field"].split(".")[0]) == (1, field)
    assert says in error["remedy"]
    assert len(answer.content) < 2000, "a huge value is cut in the answer"


def test_deletion_hides_at_once(client: TestClient, broker: Any) -> None:
    assert client.delete("/v1/items/a/b").status_code == 202
    assert broker.smembers("semantide:items:unavailable") == {b"a/b"}


def test_counts_and_unknown_things(client: TestClient) -> None:
    send(client, GOOD)
    stats = client.get("/v1/interactions/stats").json()
    assert (stats["interactions"], stats["waiting_batches"], stats["items"]) == (0, 1, 0)
    assert client.get("/v1/items/nobody").status_code == 404
    assert client.get("/v1/users/nobody/history").json() == {"user": "nobody", "events": []}


def test_a_broker_without_append_only_file_is_not_called_durable(client: TestClient, broker: Any) -> None:
    broker.config_set("appendonly", "no")
    try:
        answer = send(client, GOOD)
        assert answer.status_code == 503
        assert "appendonly yes" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    finally:
        broker.config_set("appendonly", "yes")


def test_imports_stay_inside_their_folders(client: TestClient, tmp_path: Path, settings: Any) -> None:
    inside = tmp_path / "logs"
    inside.mkdir()
    (inside / "link.csv").symlink_to("/etc/passwd")
    (inside / "log.csv").write_text("user,item,time\na,b,1\n")
    for path in ("/etc/passwd", "logs/../../../../../../etc/passwd", str(inside / "link.csv"), "/"):
        answer = client.post("/v1/imports", json={"path": path})
        assert answer.status_code == 403, path
        assert "SEMANTIDE_IMPORT_ROOTS" in answer.json()["error"]["message"]
    assert client.post("/v1/imports", json={"path": "logs/none.csv"}).status_code == 404
    assert client.post("/v1/imports", json={"path": "logs/log.csv", "time_unit": "h"}).status_code == 422
    answer = client.post("/v1/imports", json={"path": "logs/log.csv"})
    assert answer.status_code == 202
    assert answer.json()["spec"]["config"]["path"] == str(inside / "log.csv")


def test_imports_read_no_hidden_files_and_not_our_own_state(client: TestClient, tmp_path: Path, settings: Any) -> None:
    for name in (".env", ".cache/log.csv", "data/api_key", "data/broker/password", "data/jobs/x/rejects.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("secret\n")
        (tmp_path / "link.csv").unlink(missing_ok=True)
        (tmp_path / "link.csv").symlink_to(tmp_path / name)
        for path in (name, str(tmp_path / name), "link.csv"):
            answer = client.post("/v1/imports", json={"path": path})
            assert answer.status_code == 403 and "secret" not in answer.text, path
    (tmp_path / "log.csv").touch()
    private = settings.data_dir.resolve()
    assert files_below(tmp_path, [tmp_path], private) == [tmp_path / "log.csv"]
    own = tmp_path / "data" / "downloads"
    own.mkdir()
    (own / "log.csv").touch()
    assert confined("log.csv", [own], private) == own / "log.csv", "a folder that is named itself is open"


def test_uploads_appear_whole(client: TestClient, settings: Any) -> None:
    content = b"user,item,time\n" * 1000
    answer = client.put("/v1/uploads/day/log.csv", content=content)
    assert answer.status_code == 201
    assert Path(answer.json()["path"]).read_bytes() == content
    assert client.post("/v1/imports", json={"path": "day/log.csv"}).status_code == 202
    for name in ("../x", ".hidden", "a//b", "a/../b"):
        assert client.put(f"/v1/uploads/{name.replace('/', '%2F')}", content=b"x").status_code == 422, name
    assert client.delete("/v1/uploads/day/log.csv").status_code == 204
    assert client.delete("/v1/uploads/day/log.csv").status_code == 404
    assert list((settings.data_dir / "uploads").iterdir()) == []


def test_an_upload_that_does_not_fit_is_507(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_SPARE_BYTES", 1 << 60)
    assert client.put("/v1/uploads/log.csv", content=b"x").status_code == 507


def test_what_an_exposure_says_of_itself_reaches_the_log(client: TestClient, broker: Any) -> None:
    told = {"tab": 7, "position": 3, "propensity": 0.25, "signals": ["click", "like"]}
    assert send(client, {**GOOD, **told}, GOOD).json()["accepted"] == 2
    table = decode(*broker.xrange(STREAM)[0]).table
    assert table.select(list(told)).to_pylist() == [{**told, "tab": "7"}, dict.fromkeys(told)]
    # An API of an earlier version may still be sending.
    old = encode("interactions", table.drop_columns(list(told)))
    read = decode(b"1-0", {key.encode(): value for key, value in old.items()}).table
    assert read.schema.equals(table.schema) and read.select(list(told)).to_pylist() == [dict.fromkeys(told)] * 2
