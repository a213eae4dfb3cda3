"""The room's doors on a real broker and artifact store: the job, the queue handler and the routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from semantide.services.tokenization import api, tasks
from semantide.services.tokenization.job import run
from semantide.services.tokenization.spelling import Spelled
from semantide.services.tokenization.tasks import spell_new_items
from semantide.shared.catalog import Lineages
from semantide.shared.contracts import ItemsChanged, JobRecord, JobSpec
from semantide.shared.errors import BadData, JobCancelled, NotFound, TransientError
from semantide.shared.http import build_app
from semantide.shared.job_process import run_job
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.room import Room

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def room(make_room: Callable[[str], Room]) -> Room:
    return make_room("tokenization")


@pytest.fixture
def dataset(room: Room, dataset_folder: Callable[..., Path], rows_of: Rows) -> str:
    return room.store.put("datasets", dataset_folder(rows_of(120)))


@pytest.fixture
def put_items(room: Room, tmp_path: Path, items_table: Callable[..., pa.Table]) -> Callable[..., str]:
    def put(rows: list[dict[str, Any]]) -> str:
        folder = tmp_path / f"items{len(list(tmp_path.glob('items*')))}"
        folder.mkdir()
        pq.write_table(items_table(rows), folder / "items.parquet")
        return room.store.put("items", folder)

    return put


def new_rows(rows_of: Rows, count: int, seed: int, prefix: str = "new") -> list[dict[str, Any]]:
    return [{**row, "item": f"{prefix}{seed}-{number}"} for number, row in enumerate(rows_of(count, seed=seed))]


def context(room: Room, **spec: Any) -> JobContext:
    record = Jobs(room.broker).submit(JobSpec(kind="tokenize", **spec))
    return JobContext(record, room.settings, room.store, room.broker, room.queues)


def tokenize(room: Room, dataset: str, **spec: Any) -> JobOutcome:
    return run(context(room, inputs={"dataset": dataset}, **spec))


def waiting_messages(room: Room, reader: str, kind: str) -> int:
    return room.queues.depths(room.broker).get(f"semantide.{reader}.{kind}", 0)


def test_a_job_makes_a_catalog_and_tells_serving(room: Room, dataset: str) -> None:
    outcome = tokenize(room, dataset)
    ref = outcome.artifacts["catalog"]
    spelled = Spelled.load(room.store.get(ref))
    assert len(spelled.catalog) == 120 and spelled.header["dataset"] == dataset
    assert outcome.result["report"]["verdict"]["passed"] and outcome.result["tokenizer_digest"] == spelled.catalog.tokenizer_digest
    assert Lineages(room.broker).current() == ref and waiting_messages(room, "serving", "CatalogReady") == 1
    manifest = room.store.manifest(ref)
    assert manifest["inputs"] == {"dataset": dataset} and manifest["config"]["num_items"] == 120


def test_two_runs_give_one_reference_and_the_seed_another(room: Room, dataset: str) -> None:
    first, second, other = tokenize(room, dataset), tokenize(room, dataset), tokenize(room, dataset, seed=1)
    assert first.artifacts == second.artifacts != other.artifacts


def test_the_record_of_a_job_has_its_report(room: Room, dataset: str) -> None:
    record = Jobs(room.broker).submit(JobSpec(kind="tokenize", inputs={"dataset": dataset}, config={"level_sizes": [16, 32], "min_items": 4}))
    assert run_job(record.id, run, room.settings, room.store, room.broker, room.queues) == 0
    ended = Jobs(room.broker).get(record.id)
    assert ended.state == "succeeded" and ended.result["report"]["level_sizes"] == [16, 32] and ended.done == ended.total == 1


def test_a_collapsed_codebook_fails_the_job_and_writes_no_catalog(room: Room, dataset_folder: Callable[..., Path], rows_of: Rows) -> None:
    constant = room.store.put("datasets", dataset_folder([{**row, "embedding": [0.5] * 8} for row in rows_of(60)]))
    record = Jobs(room.broker).submit(JobSpec(kind="tokenize", inputs={"dataset": constant}))
    run_job(record.id, run, room.settings, room.store, room.broker, room.queues)
    ended: JobRecord = Jobs(room.broker).get(record.id)
    assert ended.state == "failed" and ended.error is not None and "effective rank 0.00" in ended.error
    assert room.store.list("catalogs") == [] and Lineages(room.broker).current() is None


def test_a_job_that_was_killed_half_way_gives_the_same_catalog(room: Room, dataset: str) -> None:
    job = context(room, inputs={"dataset": dataset})
    (job.workdir / "catalog").mkdir()
    (job.workdir / "catalog" / "left over").write_text("half a catalog")
    assert run(job).artifacts == tokenize(room, dataset).artifacts


def test_cancelling_ends_a_job_between_steps(room: Room, dataset: str) -> None:
    job = context(room, inputs={"dataset": dataset})
    job.stop()
    with pytest.raises(JobCancelled):
        run(job)
    assert room.store.list("catalogs") == []


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"inputs": {}}, "got inputs none"),
        ({"config": {"wrong": 1}}, "'wrong' is unknown"),
        ({"recipe": "wrong"}, "recipe 'wrong'"),
        ({"config": {"min_items": "x"}}, "give a number"),
    ],
)
def test_a_wrong_job_names_what_is_wrong(room: Room, dataset: str, spec: dict[str, Any], text: str) -> None:
    with pytest.raises(BadData, match=text):
        run(context(room, **{"inputs": {"dataset": dataset}, **spec}))


def test_new_items_are_spelled_and_known_ids_never_change(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str]) -> None:
    base = tokenize(room, dataset).artifacts["catalog"]
    for seed in (1, 2):
        spell_new_items(ItemsChanged(items=put_items(new_rows(rows_of, 5, seed))), room)
    current = Lineages(room.broker).current()
    assert current is not None and current != base
    old, new = Spelled.load(room.store.get(base)), Spelled.load(room.store.get(current))
    assert new.catalog.item_ids[:120] == old.catalog.item_ids and np.array_equal(new.catalog.codes[:120], old.catalog.codes)
    assert (room.store.get(base) / "tokenizer.safetensors").samefile(room.store.get(current) / "tokenizer.safetensors"), "its arrays are stored once"
    assert len(new.catalog) == 130 and new.catalog.tokenizer_digest == old.catalog.tokenizer_digest and len(new.header["items"]) == 2
    assert len(np.unique(new.catalog.codes, axis=0)) == 130 and waiting_messages(room, "serving", "CatalogReady") == 3


def test_the_same_message_twice_changes_nothing(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str]) -> None:
    tokenize(room, dataset)
    message = ItemsChanged(items=put_items(new_rows(rows_of, 3, 1)))
    spell_new_items(message, room)
    current, sent = Lineages(room.broker).current(), waiting_messages(room, "serving", "CatalogReady")
    spell_new_items(message, room)
    assert (Lineages(room.broker).current(), waiting_messages(room, "serving", "CatalogReady")) == (current, sent)


def test_before_the_first_catalog_items_wait_for_the_data_set(room: Room, rows_of: Rows, put_items: Callable[..., str]) -> None:
    spell_new_items(ItemsChanged(items=put_items(new_rows(rows_of, 3, 1))), room)
    assert Lineages(room.broker).current() is None and Lineages(room.broker).waiting() == []


def test_a_lost_race_is_tried_again(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize(room, dataset)
    message = ItemsChanged(items=put_items(new_rows(rows_of, 3, 1)))
    with monkeypatch.context() as patched:
        patched.setattr(Lineages, "extend", lambda *_: False)
        with pytest.raises(TransientError):
            spell_new_items(message, room)
    spell_new_items(message, room)
    current = Lineages(room.broker).current()
    assert current is not None and len(Spelled.load(room.store.get(current)).catalog) == 123


def test_a_missing_artifact_is_parked_and_blocks_nobody(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str]) -> None:
    tokenize(room, dataset)
    lost = "items/sha256-" + "0" * 64
    Lineages(room.broker).wait([put_items(new_rows(rows_of, 2, 1))])
    with pytest.raises(NotFound):
        spell_new_items(ItemsChanged(items=lost), room)
    current = Lineages(room.broker).current()
    assert current is not None and len(Spelled.load(room.store.get(current)).catalog) == 122
    spell_new_items(ItemsChanged(items=put_items(new_rows(rows_of, 1, 2))), room)


def test_many_new_items_become_a_job(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FEW_ITEMS", 4)
    base = tokenize(room, dataset).artifacts["catalog"]
    items = put_items(new_rows(rows_of, 9, 1))
    spell_new_items(ItemsChanged(items=items), room)
    job = Jobs(room.broker).recent(kind="tokenize", state="queued")[0]
    assert job.spec.inputs == {"catalog": base, "items": items}
    spell_new_items(ItemsChanged(items=put_items(new_rows(rows_of, 2, 2))), room)  # meanwhile somebody else is faster
    outcome = run(JobContext(job, room.settings, room.store, room.broker, room.queues))
    assert outcome.result["added"] == 9 and Lineages(room.broker).current() == outcome.artifacts["catalog"]
    catalog = Spelled.load(room.store.get(outcome.artifacts["catalog"])).catalog
    assert len(catalog) == 131 and len(np.unique(catalog.codes, axis=0)) == 131
    again = run(JobContext(job, room.settings, room.store, room.broker, room.queues))
    assert again.artifacts == outcome.artifacts and again.result["added"] == 0


def test_later_items_move_on_to_the_next_tokenizer(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str]) -> None:
    tokenize(room, dataset)
    spell_new_items(ItemsChanged(items=put_items(new_rows(rows_of, 4, 1))), room)
    second = tokenize(room, dataset, seed=1).artifacts["catalog"]
    assert len(Spelled.load(room.store.get(second)).catalog) == 120 and waiting_messages(room, "tokenization", "ItemsChanged") == 1
    spell_new_items(ItemsChanged(items=Lineages(room.broker).waiting()[-1]), room)
    both = [Spelled.load(room.store.get(entry.catalog)).catalog for entry in Lineages(room.broker).all()]
    assert [len(catalog) for catalog in both] == [124, 124] and both[0].tokenizer_digest != both[1].tokenizer_digest


def test_a_wrong_embedding_is_parked_and_the_others_are_spelled(
    room: Room, dataset_folder: Callable[..., Path], rows_of: Rows, put_items: Callable[..., str]
) -> None:
    random = np.random.default_rng(0)
    dataset = room.store.put("datasets", dataset_folder([{**row, "embedding": random.normal(size=8).tolist()} for row in rows_of(80)]))
    tokenize(room, dataset)
    rows = new_rows(rows_of, 3, 1)
    rows[1]["embedding"] = [1.0, 2.0]
    with pytest.raises(BadData, match="2 numbers where the catalog has 8"):
        spell_new_items(ItemsChanged(items=put_items(rows)), room)
    current = Lineages(room.broker).current()
    assert current is not None and len(Spelled.load(room.store.get(current)).catalog) == 82


def test_routes_lead_from_item_to_id_and_back(room: Room, dataset: str, rows_of: Rows, put_items: Callable[..., str]) -> None:
    with TestClient(build_app([room], [api.build(room)]), headers={"Authorization": "Bearer test-key"}) as client:
        assert client.get("/v1/catalogs").json() == {"current": None, "catalogs": []}
        assert client.get("/v1/catalogs/current/report").status_code == 404
        base = tokenize(room, dataset).artifacts["catalog"]
        odd = {**new_rows(rows_of, 1, 3)[0], "item": "a/b ü"}
        spell_new_items(ItemsChanged(items=put_items([odd])), room)
        listed = client.get("/v1/catalogs").json()
        assert {row["catalog"] for row in listed["catalogs"]} == {base, listed["current"]} and listed["current"] != base
        assert next(row for row in listed["catalogs"] if row["current"])["num_items"] == 121
        for name in ("current", base, base.removeprefix("catalogs/")):
            assert client.get(f"/v1/catalogs/{name}/report").json()["verdict"]["passed"]
        for item in ("i0", "i119", "a/b ü"):
            codes = client.get(f"/v1/catalogs/current/items/{item}").json()["codes"]
            below = client.get(f"/v1/catalogs/current/codes/{'-'.join(map(str, codes))}").json()
            assert [row["item"] for row in below["items"]] == [item] and below["total"] == 1
        first = client.get(f"/v1/catalogs/current/codes/{codes[0]}", params={"limit": 1}).json()
        assert len(first["items"]) == 1 <= first["total"]
        assert client.get("/v1/catalogs/current/items/nobody").status_code == 404
        assert client.get("/v1/catalogs/current/codes/999").json()["total"] == 0
        for wrong in ("x", "1-2-3-4-5", "-1", "1--2"):
            answer = client.get(f"/v1/catalogs/current/codes/{wrong}")
            assert answer.status_code == 422 and "joined by" in answer.json()["error"]["message"]
        walk = [[]]
        while len(walk[0]) < len(codes):  # the tree opens level by level, and loses nobody on the way
            answers = [client.get("/v1/catalogs/current/tree", params={"prefix": "-".join(map(str, prefix))}).json() for prefix in walk]
            assert sum(branch["items"] for answer in answers for branch in answer["branches"]) == 121
            walk = [[*answer["prefix"], branch["code"]] for answer in answers for branch in answer["branches"]]
        assert len(walk) == 121 and codes in walk
        assert client.get("/v1/catalogs/current/tree", params={"prefix": "999"}).json()["branches"] == []
        found = client.get("/v1/catalogs/current/search", params={"text": "B Ü"}).json()
        assert [row["item"] for row in found["items"]] == ["a/b ü"] and found["total"] == 1
        assert client.get("/v1/catalogs/current/search", params={"text": "i", "limit": 2}).json()["total"] >= 120
        assert json.loads(client.get("/v1/catalogs/catalogs/sha256-00/report").text)["error"]["type"] == "NotFound"
