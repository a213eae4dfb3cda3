"""From files and REST to a data set artifact: the same events give the same artifact, however they came."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from semantide.services.ingestion import api, fileimport, job, tasks
from semantide.services.ingestion.manifest import Manifest
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, NotFound, TransientError
from semantide.shared.history import Histories
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues
from semantide.shared.room import Room

REPOSITORY = Path(__file__).resolve().parents[2]
T = int(time.time() * 1000) - 10_000_000
Run = Callable[..., JobOutcome]


@pytest.fixture
def stack(broker: Any, own_broker: Any, tmp_path: Path) -> Callable[[str], tuple[Room, Run]]:
    """A room and a way to run its jobs, each over a data folder of its own."""

    def make(name: str) -> tuple[Room, Run]:
        settings = Settings(data_dir=tmp_path / name, redis_url=own_broker.url, import_roots=f"{tmp_path}:{REPOSITORY}", api_keys="k")
        store, queues = ArtifactStore(settings.artifacts_root), Queues(settings.redis_url)

        def run(kind: str, **config: Any) -> JobOutcome:
            record = Jobs(broker).submit(JobSpec(kind=kind, config=config))  # type: ignore[arg-type]
            return job.run(JobContext(record, settings, store, broker, queues))

        return Room("ingestion", settings, broker, store, queues), run

    return make


def consume(room: Room) -> None:
    with closing(Manifest(room.settings.data_dir / "events")) as manifest:
        consumer = tasks.Consumer(room, manifest, block_ms=1)
        consumer.step()
        while consumer.step():
            pass


def test_files_and_rest_in_any_order_give_one_artifact(stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"user": f"u{n % 5}", "item": f"i{n * 7 % 13}", "time": T + n // 3 * 1000, "action": ["click", "exposure", "order"][n % 3]} for n in range(90)]
    items = [{"id": f"i{n}", "title": f"Item {n}", "categories": ["a"]} for n in range(15)]
    room, run = stack("one")
    intake = api.Intake(room)
    intake.interactions(events)
    intake.items(items)
    consume(room)
    first = run("dataset")

    def csv(rows: list[dict[str, Any]]) -> str:
        return "user,item,time,action\n" + "".join(f"{row['user']},{row['item']},{row['time']},{row['action']}\n" for row in rows)

    (tmp_path / "late.csv").write_text(csv(events[40:][::-1]))
    room, run = stack("two")
    monkeypatch.setattr(fileimport, "ROWS_PER_CHUNK", 8)
    run("import", path="late.csv")
    intake = api.Intake(room)
    intake.items(items[::-1])
    intake.interactions(events[:60])
    consume(room)
    second = run("dataset")
    assert first.artifacts == second.artifacts
    assert first.result["counts"]["log_events"] == 90


def test_a_data_set_waits_for_what_was_accepted(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room, run = stack("one")
    api.Intake(room).interactions([{"user": "u", "item": "i", "time": T}])
    monkeypatch.setattr(job, "_DRAIN_SECONDS", 0.1)
    with pytest.raises(TransientError, match="ingestion worker"):
        run("dataset")
    consume(room)
    assert run("dataset").result["counts"]["events"] == 1


def test_without_interactions_it_says_what_to_do(stack: Any) -> None:
    _, run = stack("one")
    with pytest.raises(BadData, match="POST /v1/interactions"):
        run("dataset")


def test_the_repository_s_sample_becomes_a_data_set(stack: Any, broker: Any) -> None:
    room, run = stack("one")
    result = run("import", path=str(REPOSITORY / "samples" / "kuairand")).result
    assert (result["interactions"], result["items"], result["rejected"], result["duplicates"]) == (105_832, 5_410, 0, 0)
    outcome = run("dataset")
    data = Dataset.load(room.store.get(outcome.artifacts["dataset"]))
    assert (len(data.user_ids), len(data.item_ids)) == (2_000, 5_410)
    assert sum(1 for _ in data.cases("test")) == 2_000
    assert outcome.result["pages"] == data.header["page_report"] and outcome.result["pages"]["can_pay"]
    with TestClient(FastAPI()) as client:
        client.app.include_router(api.build(room))  # type: ignore[attr-defined]
        ref = outcome.artifacts["dataset"]
        told = client.get(f"/v1/datasets/{ref}/pages").json()
        assert told == {"dataset": ref, **outcome.result["pages"]} == client.get(f"/v1/datasets/{ref.removeprefix('datasets/')}/pages").json()
        with pytest.raises(NotFound, match="no data set 'sha256-none'"):
            client.get("/v1/datasets/sha256-none/pages")
    settings = room.settings
    history = Histories(broker, settings.history_length, settings.history_ttl_seconds).get(data.user_ids[0])
    assert [event.time for event in history] == sorted(event.time for event in history)
    assert len(history) > 10
