"""A user who is forgotten is nowhere any more, stays away, and whoever learned from them is named."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.services.ingestion import api, job, tasks
from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.forgotten import Forgotten
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.rows import interaction_table
from semantide.services.ingestion.stream import PARKED, encode
from semantide.services.ingestion.sweep import mentions
from semantide.shared import operations_api
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect
from semantide.shared.config import Settings
from semantide.shared.contracts import Interaction
from semantide.shared.errors import BadData, Corrupt
from semantide.shared.forgetting import KEY as FORGETTING
from semantide.shared.forgetting import Forgetting
from semantide.shared.http import build_app
from semantide.shared.job_ending import REPORT_FILE, end_job
from semantide.shared.job_process import run_job
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues
from semantide.shared.room import Room

WHO, OTHER = "anna-4711@example", "otto-4712@example"


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """A stack whose broker writes into the data folder, as on a laptop."""
    monkeypatch.setattr(job, "KNOWN_SECONDS", 0.2)
    with OwnBroker(tmp_path / "data" / "broker") as own:
        made = Settings(data_dir=tmp_path / "data", serving_deadline_seconds=0.1, redis_url=own.url, import_roots=str(tmp_path), api_keys="test-key")
        client = connect(own.url)
        yield Room("ingestion", made, client, ArtifactStore(made.artifacts_root), Queues(own.url))
        client.close()


@pytest.fixture
def client(room: Room) -> TestClient:
    return TestClient(build_app([room], [operations_api.build(room), api.build(room)]), headers={"X-API-Key": "test-key"})


def store(room: Room) -> None:
    """Write what was accepted to the log."""
    with closing(Manifest(room.settings.data_dir / "events")) as manifest:
        consumer = tasks.Consumer(room, manifest, block_ms=1)
        consumer.step()
        while room.broker.xlen("semantide:ingestion:stream"):
            consumer.step()


def work(room: Room) -> list[Any]:
    """Run the queued jobs of this room, oldest first."""
    jobs, outcomes = Jobs(room.broker), []
    for record in reversed(jobs.recent(state="queued")):
        context = JobContext(record, room.settings, room.store, room.broker, room.queues)
        outcome: JobOutcome = job.run(context)
        end_job(jobs, record, room.store, context.workdir, "succeeded", outcome=outcome)
        outcomes.append(outcome)
    return outcomes


def places(room: Room, who: str) -> set[str]:
    """Where a user's id is found: files of the data folder, in Parquet and Arrow also below compression, and keys and values of the broker."""
    import pyarrow.parquet as pq

    found = set()
    needle = who.encode()
    for path in room.settings.data_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".parquet":
                content += str(pq.read_table(path).to_pylist()).encode()
            if needle in content:
                found.add(str(path.relative_to(room.settings.data_dir)))
    for key in room.broker.scan_iter("*"):
        kind = room.broker.type(key)
        value: Any = {
            b"string": lambda key: room.broker.get(key),
            b"list": lambda key: room.broker.lrange(key, 0, -1),
            b"hash": lambda key: room.broker.hgetall(key),
            b"set": lambda key: room.broker.smembers(key),
            b"zset": lambda key: room.broker.zrange(key, 0, -1),
            b"stream": lambda key: room.broker.xrange(key),
        }[kind](key)
        if needle in key or who in str(value):
            found.add(key.decode())
    return found


def events(user: str, number: int, begin: int = 0) -> list[dict[str, Any]]:
    return [{"user": user, "item": f"i{n % 5}", "time": 1_700_000_000_000 + 60_000 * n, "action": "click"} for n in range(begin, begin + number)]


def test_no_trace_of_a_user_is_left_and_late_events_stay_out(room: Room, client: TestClient, tmp_path: Path) -> None:
    for user in (WHO, OTHER):
        assert client.post("/v1/interactions", json={"interactions": events(user, 20)}).status_code == 202
    store(room)
    log = tmp_path / "log.csv"
    log.write_text(
        "user,item,time\n"
        + "".join(f"{user},i{n % 5},{1_700_010_000_000 + n}\n" for n in range(9) for user in (WHO, OTHER))
        + f"{WHO},i1,nonsense\n{WHO},i1,more,than,fits\n"
    )
    assert client.put("/v1/uploads/in/log.csv", content=log.read_bytes()).status_code == 201
    assert client.post("/v1/imports", json={"path": str(room.settings.data_dir / "uploads" / "in" / "log.csv")}).status_code == 202
    client.post("/v1/jobs", json={"kind": "dataset"})
    dataset = work(room)[1].artifacts["dataset"]
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    (model_folder / "weights").write_text("learned")
    model = room.store.put("models", model_folder, inputs={"dataset": dataset})
    (model_folder / "weights").write_text("searched")
    beams = room.store.put("beams", model_folder, inputs={"dataset": dataset, "model": model})
    # A ranking kept for later pages, a parked batch, steps of a data set that was given up.
    room.broker.set("semantide:serving:default:page:x", json.dumps({"user": WHO, "answer": {}}))
    letter = {"entry": "1-1", "fields": {}, "error": ""}
    for user in (WHO, OTHER):
        fields = encode("interactions", interaction_table([Interaction(**events(user, 1)[0])]))
        fields = {name: value.hex() if name == "data" else value.decode() for name, value in fields.items()}
        room.broker.rpush(PARKED, json.dumps({**letter, "fields": fields}))
    steps = room.settings.data_dir / "jobs" / Jobs(room.broker).recent(kind="dataset")[0].id / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    (steps / "part.arrow").write_text(WHO)

    imported = room.settings.data_dir / "jobs" / Jobs(room.broker).recent(kind="import")[0].id
    assert WHO in (imported / REPORT_FILE).read_text()
    (imported / "outcome.json").write_text(json.dumps({"artifacts": {}, "result": {"rejects": [{"value": WHO}]}}))

    told = client.get(f"/v1/users/{WHO}/export").json()
    assert len(told["events"]) == 29 and len(told["history"]) == 29 and told["datasets"] == [dataset] and told["user"] == WHO
    assert len(places(room, WHO)) > 5
    answer = client.delete(f"/v1/users/{WHO}")
    assert answer.status_code == 202 and answer.json()["swept"] is None
    assert client.get(f"/v1/users/{WHO}/history").json()["events"] == []
    assert client.post("/v1/interactions", json={"interactions": events(WHO, 3, 100)}).status_code == 202
    store(room)
    (outcome,) = work(room)
    assert places(room, WHO) == set()
    assert outcome.result["users"] == 1 and outcome.result["events"] == 29 and set(outcome.result["removed"]) == {dataset, beams}
    assert outcome.result["saw"] == [model] and outcome.result["parked"] == 1 and outcome.result["uploads"] == 1
    assert not room.store.exists(dataset) and room.store.exists(model)
    (deletion,) = client.get("/v1/deletions").json()
    assert deletion["digest"] == answer.json()["digest"] and deletion["swept"] and deletion["found"]["saw"] == [model] and deletion["accept"] == "never"

    # The other one has all there was, and events that come late, by either way, stay out.
    kept = client.get(f"/v1/users/{OTHER}/export").json()
    assert len(kept["events"]) == 29 and len(kept["history"]) == 29
    client.post("/v1/interactions", json={"interactions": [*events(WHO, 5), *events(OTHER, 1, 50)]})
    client.post("/v1/imports", json={"path": str(log)})
    store(room)
    work(room)
    assert client.get(f"/v1/users/{WHO}/export").json() == {"user": WHO, "events": [], "history": [], "datasets": []}
    assert len(client.get(f"/v1/users/{OTHER}/export").json()["events"]) == 30


@pytest.mark.parametrize("who", [WHO, "o'neil <anna> & co", "4711", 'änne\\"x'])
def test_what_jobs_say_of_a_user_goes_and_they_still_can_be_resumed(room: Room, client: TestClient, tmp_path: Path, who: str) -> None:
    """An import that refused every row, some of which cannot be told apart into fields; its log, its report and its record quote them."""
    bad = tmp_path / "bad.tsv"
    bad.write_text("item\tuser\ttime\n" + f"i1\t{who}\tnonsense\n" + f"i2\t{OTHER}\tmore\tthan\tfits\n" + f"i1\t{who}\tmore\tthan\tfits\n" * 2)
    assert client.post("/v1/imports", json={"path": str(bad), "kind": "interactions"}).status_code == 202
    jobs = Jobs(room.broker)
    (record,) = jobs.recent(kind="import")
    folder = room.settings.data_dir / "jobs" / record.id
    folder.mkdir(parents=True)
    run_job(record.id, job.run, room.settings, room.store, room.broker, room.queues)
    record = jobs.get(record.id)
    assert record.state == "failed" and record.error
    rows = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    said = record.error + json.dumps(rows[-1]) + json.dumps(rows[-1], ensure_ascii=False) + json.dumps({"error": str(rows[-1])}) + who
    (folder / "log.txt").write_text(f"started\n{said}\nended\n")
    end_job(jobs, record, room.store, folder, "failed", error=f"{record.error} {who}")
    size = (folder / "rejects.jsonl").stat().st_size

    client.delete(f"/v1/users/{quote(who, safe='')}")
    work(room)
    left = {name: (folder / name).read_text() for name in ("rejects.jsonl", "log.txt", REPORT_FILE)}
    words = {who, unescape(who), json.dumps(who)[1:-1], json.dumps(who, ensure_ascii=False)[1:-1], escape(who), repr(who)[1:-1]}
    assert not [
        (name, word) for name, text in left.items() for word in words if re.search(rf"(?<![\w.#]){re.escape(word)}(?!\w)", text) and name != REPORT_FILE
    ]
    assert who == "4711" or not [word for word in words if word in left[REPORT_FILE]]
    assert not [word for word in words if word in str(jobs.get(record.id).error)]
    assert left["log.txt"].startswith("started\n") and left["log.txt"].endswith("\nended\n")
    assert OTHER in left["rejects.jsonl"] and (folder / "rejects.jsonl").stat().st_size == size
    assert len([json.loads(line) for line in left["rejects.jsonl"].splitlines()]) == len(rows)

    context = JobContext(jobs.resume(record.id), room.settings, room.store, room.broker, room.queues)
    with pytest.raises(BadData, match="none of the") as refused:
        job.run(context)
    assert who not in str(refused.value)


def test_what_requests_that_began_before_keep_of_a_user_goes_too(room: Room, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.delete(f"/v1/users/{WHO}")
    seen: list[dict[str, str]] = []

    def wait(_: JobContext, seconds: float) -> None:
        if seconds > 0.1:  # as a request does that ends meanwhile
            seen.append(Forgetting(room.broker).users())
            room.broker.set("semantide:serving:default:page:x", json.dumps({"user": WHO, "answer": {}}))

    monkeypatch.setattr(job, "KNOWN_SECONDS", 60.0)
    monkeypatch.setattr(job, "_wait", wait)
    work(room)
    assert [list(users.values()) for users in seen] == [[WHO]]
    assert places(room, WHO) == set()


def test_who_comes_back_may_be_taken_again(room: Room, client: TestClient) -> None:
    client.post("/v1/interactions", json={"interactions": events(WHO, 4)})
    store(room)
    since = client.delete(f"/v1/users/{WHO}", params={"accept": "later"}).json()["since"]
    work(room)
    client.post("/v1/interactions", json={"interactions": [*events(WHO, 4), {**events(WHO, 1)[0], "time": since + 5}]})
    store(room)
    assert [event["time"] for event in client.get(f"/v1/users/{WHO}/export").json()["events"]] == [since + 5]
    # Whoever is forgotten again is swept again.
    client.delete(f"/v1/users/{WHO}")
    (outcome,) = work(room)
    assert outcome.result["events"] == 1 and client.get(f"/v1/users/{WHO}/export").json()["events"] == []
    assert not room.broker.exists(FORGETTING)
    client.post("/v1/jobs", json={"kind": "forget"})
    assert work(room)[0].result == {"users": 0, "removed": [], "saw": []}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(data=st.data(), users=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40), gone=st.sets(st.sampled_from("abcdefxyz")), later=st.booleans())
def test_exactly_the_rows_of_the_forgotten_are_kept_out(
    tmp_path_factory: pytest.TempPathFactory, data: Any, users: list[str], gone: set[str], later: bool
) -> None:
    times = data.draw(st.lists(st.integers(0, 100), min_size=len(users), max_size=len(users)))
    table = interaction_table([Interaction(user=user, item=f"i{row}", time=time) for row, (user, time) in enumerate(zip(users, times, strict=True))])
    with closing(Manifest(tmp_path_factory.mktemp("log"))) as manifest:
        for user in gone:
            Forgotten(manifest).add(user, 50, accept_later=later)
        with manifest.writing():
            positions = EventLog(manifest).append(table)
        wanted = [row for row, user in enumerate(users) if user not in gone or (later and times[row] > 50)]
        assert positions == wanted
        stored = [row["item"] for segment in EventLog(manifest).segments() for row in read_segment(segment.path).to_pylist()]
        assert sorted(stored) == sorted(f"i{row}" for row in wanted) and manifest.counter("forgotten") == len(users) - len(wanted)


@given(st.text(min_size=1, max_size=12), st.text(max_size=6), st.text(max_size=6))
def test_an_id_is_found_where_it_stands_alone(user: str, before: str, after: str) -> None:
    pattern = mentions(user)
    assert pattern.search(json.dumps({"value": user})) and pattern.search(json.dumps({"value": user}, ensure_ascii=False))
    assert not mentions("42").search("1425 a42 42b 4.42") and mentions("42").search('{"user": "42"}')
    assert re.compile(pattern.pattern)


def test_a_log_of_before_learns_to_forget(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        for name in ("forgotten", "keys"):
            manifest.connection.execute(f"DROP TABLE {name}")
    with closing(Manifest(tmp_path)) as manifest:
        assert Forgotten(manifest).tombstones() == []


def test_a_damaged_segment_holds_nobody_else_back_and_is_named(room: Room, client: TestClient) -> None:
    for user in (WHO, OTHER):
        assert client.post("/v1/interactions", json={"interactions": events(user, 5)}).status_code == 202
        store(room)
    with closing(Manifest(room.settings.data_dir / "events")) as manifest:
        (damaged,) = [segment.path for segment in EventLog(manifest).segments() if WHO in str(read_segment(segment.path)["user"].to_pylist())]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for user in (WHO, OTHER):
        assert client.delete(f"/v1/users/{user}").status_code == 202
    with pytest.raises(Corrupt, match=damaged.name):
        work(room)
    with closing(Manifest(room.settings.data_dir / "events")) as manifest:
        assert len(Forgotten(manifest).tombstones(waiting=True)) == 2, "nobody is told that it is done"
        assert [segment.path for segment in EventLog(manifest).segments()] == [damaged] == [*damaged.parent.iterdir()], "who is elsewhere is gone"
    damaged.write_bytes(content)
    work(room)
    assert not places(room, WHO) and not places(room, OTHER)
    with closing(Manifest(room.settings.data_dir / "events")) as manifest:
        assert Forgotten(manifest).tombstones(waiting=True) == []


def test_a_damaged_data_set_keeps_nobody_from_what_is_stored_of_him(room: Room, client: TestClient) -> None:
    assert client.post("/v1/interactions", json={"interactions": [*events(WHO, 20), *events(OTHER, 20)]}).status_code == 202
    store(room)
    made = []
    for gap in (1800, 3600):
        client.post("/v1/jobs", json={"kind": "dataset", "config": {"session_gap_seconds": gap}})
        made.append(work(room)[0].artifacts["dataset"])
    path = room.store.get(made[0]) / "users.parquet"
    path.chmod(0o644)
    path.write_bytes(b"no Parquet any more")
    assert client.get(f"/v1/users/{WHO}/export").json()["datasets"] == [made[1]]
