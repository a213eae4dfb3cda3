"""The room's doors on a real broker and artifact store, and the run that trains on what comes out of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from semantide.services.negatives import api, job, tasks
from semantide.services.negatives.newest_models import NewestModels
from semantide.shared import negative_shards, negative_source
from semantide.shared import queues as queue_door
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import JobSpec, ModelTrained, NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errands import KEPT_SECONDS, Errands
from semantide.shared.errors import BadData, BrokerUnavailable, Conflict, JobCancelled, StoreUnavailable
from semantide.shared.http import build_app
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.models.retriever import ItemVectors, Retriever
from semantide.shared.models.retriever_search import ExactSearch
from semantide.shared.negative_sampling import NegativeMix
from semantide.shared.negative_shards import NegativeShards
from semantide.shared.negative_source import BeamLists, NegativeSource, TrainingEvents
from semantide.shared.queues import queue_name
from semantide.shared.room import Room
from semantide.shared.table_snapshots import SNAPSHOTS, RowsFile, row_digests, told, total, write_card


@pytest.fixture
def room(make_room: Callable[[str], Room]) -> Room:
    return make_room("negatives")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (negative_source, negative_shards):
        monkeypatch.setattr(module, "SHARD_EVENTS", 32)
    tasks._source.cache_clear()


class Clock:
    """Seconds that pass when somebody waits; what happens meanwhile may be given."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def shards_of(room: Room, wanted: NegativesWanted, send: Callable[[NegativesWanted], None], clock: Clock, **options: Any) -> NegativeShards:
    source = NegativeSource.of(wanted, room.store)
    return NegativeShards(source, wanted, room.store, room.broker, send, clock=clock, pause=clock.pause, wait_seconds=5, **options)


def waiting(room: Room) -> int:
    return int(room.broker.llen("semantide:queue:" + queue_name(NegativesWanted, "negatives")))


def test_what_the_room_draws_is_what_a_run_would_draw_itself(room: Room, dataset: str) -> None:
    wanted = NegativesWanted(dataset=dataset, mix={"popularity": 5}, seed=7)
    sent: list[NegativesWanted] = []
    clock = Clock(meanwhile=lambda: tasks.draw_shard(sent.pop(0), room) if sent else None)
    shards = shards_of(room, wanted, sent.append, clock)
    events_T = np.random.default_rng(0).permutation(shards.source.num_events)[:50]
    alone = shards_of(room, wanted, lambda _: None, Clock())
    for epoch in range(3):
        own, drawn = alone.draw(epoch, events_T), shards.draw(epoch, events_T)
        assert np.array_equal(drawn, own)
    total = shards.source.num_shards
    assert (shards.drawn_here, shards.from_room) == (0, 3 * total)
    assert alone.drawn_here > 0, "what was taken away or never made is drawn by the run"


def test_the_wish_goes_through_a_real_queue_and_worker(room: Room, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery.contrib.testing.worker import start_worker

    monkeypatch.setattr(queue_door, "_handlers", {NegativesWanted: tasks.draw_shard, ModelTrained: tasks.note_model})
    room.queues.prepare(room)
    wanted = NegativesWanted(dataset=dataset, mix={"popularity": 3}, seed=2)
    source = NegativeSource.of(wanted, room.store)
    with start_worker(room.queues.app, perform_ping_check=False, pool="solo", shutdown_timeout=10):
        shards = NegativeShards(source, wanted, room.store, room.broker, room.send, clock=time.monotonic, pause=time.sleep, wait_seconds=60)
        drawn = shards.draw(0, np.arange(50))
    assert np.array_equal(drawn[:32], source.shard(2, 0, 0)) and (shards.from_room, shards.drawn_here) == (2, 0)
    assert room.queues.parked(room.broker) == {}


def test_epochs_are_asked_for_ahead_once_and_taken_away_behind(room: Room, dataset: str) -> None:
    wanted = NegativesWanted(dataset=dataset, mix={"popularity": 2})
    shards = shards_of(room, wanted, room.send, Clock())
    total = shards.source.num_shards
    shards.prefetch(0)
    shards.prefetch(0)
    assert waiting(room) == total
    for epoch in (0, 1):
        for number in range(total):
            tasks.draw_shard(wanted.model_copy(update={"epoch": epoch, "shard": number}), room)
    everything = np.arange(shards.source.num_events)
    shards.draw(0, everything)
    assert waiting(room) == 2 * total and len(room.store.list("negatives")) == 2 * total
    shards.draw(1, everything)
    assert len(room.store.list("negatives")) == total and Errands(NegativesWanted, room.broker, room.store).waiting() == total
    follower = shards_of(room, wanted, room.send, Clock(), leader=False)
    before = waiting(room)
    assert np.array_equal(follower.draw(1, everything), shards.draw(1, everything))
    assert waiting(room) == before and follower.from_room == total


def test_a_message_that_comes_twice_draws_once(room: Room, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = NegativesWanted(dataset=dataset, mix={"uniform": 3})
    tasks.draw_shard(message, room)
    ref = Errands(NegativesWanted, room.broker, room.store).find(message)
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "store_shard", lambda *_: pytest.fail("drawn again"))
        tasks.draw_shard(message, room)
    assert ref is not None and room.store.list("negatives") == [ref]
    room.store.remove(ref)
    tasks.draw_shard(message, room)
    assert room.store.list("negatives") == [ref], "one that was lost is drawn again"


def test_a_run_goes_on_without_room_or_broker(room: Room, dataset: str) -> None:
    wanted = NegativesWanted(dataset=dataset, mix={"popularity": 3})

    def away(_: NegativesWanted) -> None:
        raise BrokerUnavailable("the broker is away")

    clock = Clock()
    shards = shards_of(room, wanted, away, clock)
    assert shards.draw(0, np.arange(40)).shape == (40, 3)
    assert shards.drawn_here == 2 and 5 <= clock.now < 6, "it waits once, not for every shard"


def test_a_run_goes_on_without_the_store_and_what_it_could_not_take_away_is_swept(room: Room, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = NegativesWanted(dataset=dataset, mix={"popularity": 3})
    shards = shards_of(room, wanted, room.send, Clock())
    for epoch in (0, 1):
        for number in range(shards.source.num_shards):
            tasks.draw_shard(wanted.model_copy(update={"epoch": epoch, "shard": number}), room)
    everything = np.arange(shards.source.num_events)
    shards.draw(0, everything)

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        for name in ("get", "remove"):
            patched.setattr(ArtifactStore, name, away)
        assert np.array_equal(shards.draw(1, everything), np.concatenate([shards.source.shard(0, 1, number) for number in range(shards.source.num_shards)]))
    board = Errands(NegativesWanted, room.broker, room.store)
    assert board.waiting() == 2 * shards.source.num_shards
    assert board.sweep(time.time() + 2 * KEPT_SECONDS) == 2 * shards.source.num_shards and not room.store.list("negatives")


def test_what_runs_leave_behind_is_swept_a_day_later(room: Room, dataset: str) -> None:
    message = NegativesWanted(dataset=dataset, mix={"popularity": 2})
    tasks.draw_shard(message, room)
    board = Errands(NegativesWanted, room.broker, room.store)
    assert room.broker.ttl(board.key(message)) > 0
    (ref, drawn_at) = room.broker.zrange("semantide:errands:NegativesWanted:made", 0, -1, withscores=True)[0]
    assert board.sweep(drawn_at + 60) == 0 and board.waiting() == 1
    assert board.sweep(drawn_at + KEPT_SECONDS + 1) == 1
    assert board.waiting() == 0 and not room.store.exists(ref.decode())


def test_a_job_draws_whole_epochs_that_a_run_finds(room: Room, dataset: str, catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mix = {"dataset": dataset, "catalog": catalog}, {"popularity": 3, "prefix": 1}
    made = context(room, inputs=inputs, config={"epochs": 2, "mix": mix}, seed=6)
    stored, calls = job.store_shard, 0

    def dies(*arguments: Any) -> str:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise JobCancelled("stop")
        return stored(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(job, "store_shard", dies)
        with pytest.raises(JobCancelled):
            job.run(made)
    result = job.run(made).result
    wanted = NegativesWanted(dataset=dataset, catalog=catalog, mix=NegativeMix.of(mix).values(), seed=6)
    shards = shards_of(room, wanted, lambda _: None, Clock())
    assert result == {"shards": 2 * shards.source.num_shards, "epochs": 2, "events": shards.source.num_events, "negatives": 4}
    for epoch in (0, 1):
        drawn = shards.draw(epoch, np.arange(shards.source.num_events))
        assert np.array_equal(drawn, np.concatenate([shards.source.shard(6, epoch, number) for number in range(shards.source.num_shards)]))
    assert (shards.from_room, shards.drawn_here) == (result["shards"], 0)
    for config, given, text in (
        ({"epochs": 0}, inputs, "whole number from 1"),
        ({"epochs": 1, "width": 3}, inputs, "draws no shards"),
        ({"epochs": 1, "mix": {"wrong": 3}}, inputs, "'wrong' is unknown"),
        ({"epochs": 1}, {**inputs, "model": dataset}, "catalog, dataset, model"),
    ):
        with pytest.raises(BadData, match=text):
            job.run(context(room, inputs=given, config=config))


def test_a_wrong_wish_names_what_is_wrong(room: Room, dataset: str) -> None:
    with pytest.raises(BadData, match="name the catalog"):
        tasks.draw_shard(NegativesWanted(dataset=dataset, mix={"prefix": 1}), room)
    with pytest.raises(BadData, match="shard 500"):
        tasks.draw_shard(NegativesWanted(dataset=dataset, mix={"uniform": 1}, shard=500), room)


def context(room: Room, **spec: Any) -> JobContext:
    return JobContext(Jobs(room.broker).submit(JobSpec(kind="negatives", **spec)), room.settings, room.store, room.broker, room.queues)


def test_beams_hold_items_that_the_user_did_not_have_before(room: Room, store: ArtifactStore, dataset: str, catalog: str, model: str) -> None:
    outcome = job.run(context(room, inputs={"dataset": dataset, "catalog": catalog, "model": model}, config={"width": 6, "points": 3, "batch": 7}))
    ref = outcome.artifacts["beams"]
    lists = BeamLists.load(store.get(ref))
    events = TrainingEvents.of(Dataset.load(store.get(dataset)))
    per_user = np.bincount(events.users_E)
    assert outcome.result["histories"] == len(lists.cuts_C) == sum(min(3, length - 1) for length in per_user.tolist() if length > 1)
    assert (np.diff(lists.cuts_C) > 0).all()
    for cut, row in zip(lists.cuts_C.tolist(), lists.rows_CW.tolist(), strict=True):
        user = events.users_E[cut]
        before = set(events.rows_E[:cut][events.users_E[:cut] == user].tolist())
        held = [item for item in row if item >= 0]
        assert before and not before & set(held) and len(held) == len(set(held)) and 39 not in held, "the catalog lacks the last item"
        assert len(held) == 6 or before == {39}
    wanted = NegativesWanted(dataset=dataset, beams=ref, mix={"popularity": 2, "beams": 3}, seed=1)
    tasks.draw_shard(wanted, room)
    shard = NegativeSource.of(wanted, store).shard(1, 0, 0)
    allowed = lists.of(np.arange(len(shard)), events)
    assert all(set(rows[2:]) - {-1} <= set(beams) for rows, beams in zip(shard.tolist(), allowed.tolist(), strict=True))
    assert (shard[:, 2:] >= 0).any()


def test_of_a_retriever_the_best_items_are_taken_that_the_user_did_not_have(room: Room, store: ArtifactStore, dataset: str, retriever: str) -> None:
    outcome = job.run(context(room, inputs={"dataset": dataset, "model": retriever}, config={"width": 6, "points": 3, "batch": 7}))
    lists = BeamLists.load(store.get(outcome.artifacts["beams"]))
    assert outcome.result["catalog"] is None and outcome.result["histories"] == len(lists.cuts_C) > 40
    data = Dataset.load(store.get(dataset))
    events, seconds_E = TrainingEvents.of(data), np.concatenate([*data.train_times()]) // 1000
    folder = store.get(retriever)
    table = ItemVectors.load(folder)
    search = ExactSearch(Retriever.from_pretrained(folder), lambda: table.vectors_ND, 5)
    names = np.array(data.item_ids)
    for cut, row in zip(lists.cuts_C.tolist(), lists.rows_CW.tolist(), strict=True):
        first = int(np.argmax(events.users_E == events.users_E[cut]))
        before, moments = names[events.rows_E[first:cut]].tolist(), seconds_E[first:cut]
        known = [place for place, item in enumerate(before) if item in table.item_ids]
        if not known:
            assert row == [-1] * 6
            continue
        history = np.array([table.item_ids.index(before[place]) for place in known])
        ranked = search.scores([history], [moments[known]])[0].argsort(descending=True).tolist()
        expected = [item for item in (table.item_ids[place] for place in ranked) if item not in before and item != "gone"]
        assert names[row].tolist() == expected[:6]
    wanted = NegativesWanted(dataset=dataset, beams=outcome.artifacts["beams"], mix={"beams": 3}, seed=1)
    assert (NegativeSource.of(wanted, store).shard(1, 0, 0) >= 0).any(), "what was found can be trained on"


def test_the_newest_table_of_a_run_that_publishes_is_searched_like_a_whole_model(
    room: Room, store: ArtifactStore, dataset: str, retriever: str, tmp_path: Path
) -> None:
    """A link that changes every vector, against a model that has those vectors."""
    folder = store.get(retriever)
    model, names = Retriever.from_pretrained(folder), ItemVectors.load(folder).item_ids
    vectors = torch.randn(len(names), 16, generator=torch.Generator().manual_seed(9))
    for name in ("whole", "link"):
        model.save_dense(tmp_path / name)
        shutil.copy(folder / "semantide.json", tmp_path / name)
    model.save_pretrained(tmp_path / "whole", vectors, names)
    rows = RowsFile(tmp_path / "link" / "rows-00000.parquet", 16)
    rows.add(names, vectors)
    rows.close()
    write_card(tmp_path / "link", retriever, 1, told(total(row_digests(names, vectors))), [])
    found = []
    for ref in (store.put("models", tmp_path / "whole"), store.put(SNAPSHOTS, tmp_path / "link"), retriever):
        outcome = job.run(context(room, inputs={"dataset": dataset, "model": ref}, config={"width": 6, "points": 3}))
        found.append(BeamLists.load(store.get(outcome.artifacts["beams"])).rows_CW)
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def test_a_cancelled_search_goes_on_where_it_was(room: Room, dataset: str, catalog: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_CHUNK_CUTS", 8)
    inputs = {"dataset": dataset, "catalog": catalog, "model": model}
    whole = job.run(context(room, inputs=inputs, config={"width": 4, "batch": 4})).artifacts["beams"]
    running = context(room, inputs=inputs, config={"width": 4, "batch": 4})
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise JobCancelled("stop")

    with monkeypatch.context() as patched:
        patched.setattr(running, "check_cancelled", stop)
        with pytest.raises(JobCancelled):
            job.run(running)
    assert len(list((running.workdir / "searched").glob("*.npy"))) == 2
    assert job.run(running).artifacts["beams"] == whole


def test_without_a_model_the_newest_generator_is_taken(room: Room, dataset: str, catalog: str, model: str) -> None:
    with pytest.raises(Conflict, match="no generator has been trained"):
        job.run(context(room, inputs={"dataset": dataset}))
    tasks.note_model(ModelTrained(job_id="train-1", model=model, catalog=catalog), room)
    tasks.note_model(ModelTrained(job_id="train-2", model="models/sha256-" + "0" * 64), room)  # a retriever
    assert NewestModels(room.broker).find("e" * 64) is None
    for inputs in ({"dataset": dataset}, {"dataset": dataset, "catalog": catalog}):
        assert job.run(context(room, inputs=inputs, config={"width": 2, "points": 1})).result["model"] == model
    with TestClient(build_app([room], [api.build(room)]), headers={"Authorization": "Bearer test-key"}) as client:
        listed = client.get("/v1/negatives").json()
        assert listed["models"] == {"f" * 64: model} and len(listed["beams"]) == 1 and listed["shards"] == 0
        one = client.get("/v1/negatives/" + listed["beams"][0]["beams"]).json()
        assert one["width"] == 2 and one["model"] == model
        assert client.get("/v1/negatives/beams/sha256-00").status_code == 404


def test_a_wrong_job_names_what_is_wrong(room: Room, store: ArtifactStore, dataset: str, catalog: str, model: str, tmp_path: Any) -> None:
    folder = tmp_path / "sasrec"
    folder.mkdir()
    (folder / "semantide.json").write_text(json.dumps({"model_type": "sasrec"}))
    sasrec = store.put("models", folder)
    (folder / "semantide.json").write_text(json.dumps({"model_type": "generator"}))
    homeless = store.put("models", folder)
    for spec, error, text in (
        ({"inputs": {}}, BadData, "got inputs none"),
        ({"inputs": {"dataset": dataset}, "config": {"wide": 3}}, BadData, "'wide' is unknown"),
        ({"inputs": {"dataset": dataset}, "config": {"width": 0}}, BadData, "width is 0"),
        ({"inputs": {"dataset": dataset, "catalog": catalog, "model": sasrec}}, Conflict, "is a sasrec: name a generator"),
        ({"inputs": {"dataset": dataset, "model": homeless}}, Conflict, "without a catalog"),
    ):
        with pytest.raises(error, match=text):
            job.run(context(room, **spec))
    assert torch.is_grad_enabled()
