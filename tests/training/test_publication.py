"""Serving follows a table while it is trained: links lead to the run's own vectors bit for bit, on any number of ranks, resumed or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from semantide.services.serving import tasks
from semantide.services.serving.registry import Registry
from semantide.services.serving.retrieval import Asking, LoadedRetriever, RetrieverWatch
from semantide.services.training import publication as publication_module
from semantide.services.training.change_log import ChangeLog
from semantide.services.training.item_tables import pieces
from semantide.services.training.job import run
from semantide.services.training.publication import Link, Publication, Store
from semantide.services.training.retrieval_objective import ITEMS
from semantide.services.training.world import World
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import TablePublished
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, JobCancelled, StoreUnavailable
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.table_snapshots import SNAPSHOTS, TableSnapshot

from .conftest import write_dataset
from .rank_threads import on_threads
from .test_item_tables import configured, objective_of, with_features

MakeJob = Callable[..., JobContext]
CONFIG = {
    "epochs": 2, "evaluate_every": 2, "items_per_batch": 64, "warmup_steps": 3, "learning_rate": 1e-2, "num_negatives": 8, "staleness": 1, "sync_steps": 4,
    "publish_every": 2, "promote": True, "log_every": 2, "features": ["actions"],
}  # fmt: skip


def published(queues: Any) -> list[TablePublished]:
    return [message for message in queues.sent if isinstance(message, TablePublished)]


def answers(loaded: LoadedRetriever) -> list[Any]:
    nobody = SimpleNamespace(items=frozenset())
    asked = [Asking([(f"item-{item}", "click", 1000 * item) for item in range(first, first + 4)], 60) for first in (0, 17, 40)]
    return [loaded.answer(asking, {"click": 1.0}, nobody).hits for asking in asked]  # type: ignore[arg-type]


def test_serving_answers_with_the_newest_rows_of_a_run_bit_for_bit(
    make_job: MakeJob, make_room: Any, inputs: dict[str, str], store: ArtifactStore, queues: Any
) -> None:
    job = make_job("train", recipe="retriever-tiny", config=CONFIG, inputs={"dataset": inputs["dataset"]}, seed=3)
    model = run(job).artifacts["model"]
    told = published(queues)
    assert [message.model.split("/")[0] for message in told] == ["models", *[SNAPSHOTS] * (len(told) - 1)] and len(told) >= 5
    assert [message.step for message in told] == [4 + 2 * number for number in range(len(told))] and all(message.promote for message in told)
    metrics = Jobs(job.broker).metrics(job.id)
    assert any(row.get("publish_seconds", -1) >= 0 and row["changed_rows"] > 0 for row in metrics)
    room = make_room("serving")
    registry, watch = Registry(room.broker), RetrieverWatch(Registry(room.broker), store)
    seen = []
    for message in told:
        for _ in range(2):  # at least once
            tasks.follow_table(message, room)
        watch.poll()
        assert watch.current is not None and watch.current.ref == message.model and watch.error is None
        seen.append(answers(watch.current))
    assert len({str(lists) for lists in seen}) == len(told), "every link changed what is answered"
    # The last link is of the last step, as the model is.
    assert watch.current is not None and watch.current.table.number == len(told) - 1
    whole = LoadedRetriever.load(store, model)
    assert torch.equal(watch.current.table.vectors_ND, whole.table.vectors_ND) and watch.current.item_ids == whole.item_ids
    assert answers(watch.current) == answers(whole)

    # What was done with an item counts, as it did in training; of what is not known nothing is made.
    def first(action: str) -> Any:
        return whole.answer(Asking([("item-3", action, 0)], 1), {"click": 1.0, "like": 1.0, "other": 1.0}, SimpleNamespace(items=frozenset())).hits  # type: ignore[arg-type]

    assert len({first("click"), first("like"), first("other")}) == 3
    # A process that comes late reads the whole chain, and an older message changes nothing.
    late = RetrieverWatch(registry, store)
    late.poll()
    assert late.current is not None and answers(late.current) == answers(whole)
    for message in random.Random(1).sample(told, len(told)):
        tasks.follow_table(message, room)
    assert registry.read().retriever == told[-1].model
    # Once the finished model, or nothing at all, took its place, the run's messages are of the past.
    registry.retrieve(model)
    for message in told:
        tasks.follow_table(message, room)
    assert registry.read().retriever == model


def test_a_missing_link_leaves_what_answers_as_it_is(make_job: MakeJob, make_room: Any, inputs: dict[str, str], store: ArtifactStore, queues: Any) -> None:
    run(make_job("train", recipe="retriever-tiny", config=CONFIG, inputs={"dataset": inputs["dataset"]}, seed=3))
    told, room = published(queues), make_room("serving")
    watch = RetrieverWatch(Registry(room.broker), store)
    for message in told[:2]:
        tasks.follow_table(message, room)
    watch.poll()
    assert watch.current is not None
    before = answers(watch.current)
    with pytest.raises(BadData, match="what changed in a table"):
        run(make_job("train", recipe="retriever-tiny", config={**CONFIG, "checkpoint": told[1].model}, inputs={"dataset": inputs["dataset"]}))
    store.remove(told[2].model)
    tasks.follow_table(told[3], room)
    watch.poll()
    assert watch.error is not None and told[2].model in watch.error
    assert watch.current.ref == told[1].model and answers(watch.current) == before
    # Messages that never asked to be promoted are not followed.
    Registry(room.broker).retrieve(None)
    tasks.follow_table(told[3].model_copy(update={"promote": False, "job_id": "another"}), room)
    assert Registry(room.broker).read().retriever is None


def test_a_run_that_was_stopped_writes_the_links_of_one_left_alone(
    make_job: MakeJob, inputs: dict[str, str], queues: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def links(stop_at: int | None) -> tuple[list[tuple[str, int]], str]:
        queues.sent.clear()
        job = make_job("train", recipe="retriever-tiny", config=CONFIG, inputs={"dataset": inputs["dataset"]}, seed=3)
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise JobCancelled("stop")

        monkeypatch.setattr(job, "check_cancelled", check)
        if stop_at is not None:
            with pytest.raises(JobCancelled):
                run(job)
        model = run(job).artifacts["model"]
        return list(dict.fromkeys((message.model, message.step) for message in published(queues))), model

    assert links(8) == links(None)


def test_a_run_that_goes_on_from_a_model_tells_what_is_new_and_what_is_gone(make_job: MakeJob, store: ArtifactStore, queues: Any, tmp_path: Path) -> None:
    def dataset(name: str, first: int, last: int) -> str:
        folder = write_dataset(tmp_path / name)
        items, users = pq.read_table(folder / "items.parquet"), pq.read_table(folder / "users.parquet").to_pydict()
        pq.write_table(items.slice(first, last - first), folder / "items.parquet")
        moved = [[(item - first) % (last - first) for item in history] for history in users["items"]]
        pq.write_table(pq.read_table(folder / "users.parquet").set_column(1, "items", [moved]), folder / "users.parquet")
        return store.put("datasets", folder)

    config = {**CONFIG, "publish_every": 0, "epochs": 1}
    before = run(make_job("train", recipe="retriever-tiny", config=config, inputs={"dataset": dataset("old", 0, 50)}, seed=1)).artifacts["model"]
    again = {**CONFIG, "checkpoint": before, "learning_rate": 1e-3}
    after = run(make_job("train", recipe="retriever-tiny", config=again, inputs={"dataset": dataset("new", 10, 60)}, seed=1)).artifacts["model"]
    told = published(queues)
    assert told[0].model.startswith(SNAPSHOTS), "the model that it goes on from is the base"
    first, last, whole = (TableSnapshot.load(store.get, ref) for ref in (told[0].model, told[-1].model, after))
    assert set(first.item_ids) == {f"item-{item}" for item in range(10, 60)} == set(last.item_ids)
    assert all(torch.equal(last.vectors_ND[last.row_of[item]], whole.vectors_ND[whole.row_of[item]]) for item in whole.item_ids)
    with pytest.raises(BadData, match="of a retriever's tables"):
        run(make_job("train", recipe="tiny", config={"publish_every": 3}, inputs={}))


@pytest.mark.parametrize("features", [(), ("categories",)])
def test_links_do_not_depend_on_the_number_of_ranks(ring: Dataset, tmp_path: Path, features: tuple[str, ...]) -> None:
    """Two groups of two ranks with a copy each, against one process."""
    ring, store = with_features(ring), ArtifactStore(str(tmp_path / "store"))
    config = configured(features=features, table_group=2)

    def work(world: Any, name: str) -> tuple[list[str], Tensor]:
        objective, _ = objective_of(ring, config, world)
        table, told = objective.tables[ITEMS], []
        folder = tmp_path / f"{name}-link"

        def base(step: int) -> str:
            vectors = pieces(60, objective.read, world.rank == 0)
            if world.rank:
                assert not sum(map(len, vectors))
                return ""
            objective.model.save_pretrained(tmp_path / f"{name}-base", vectors, ring.item_ids)
            return store.put("models", tmp_path / f"{name}-base")

        logs = {which: ChangeLog(entry) for which, entry in objective.tables.items()}
        keep = Store(lambda made, step: store.put(SNAPSHOTS, made), store.remove, lambda ref, step: told.append(ref), lambda step, why: pytest.fail(why))
        publication, link = Publication(world, objective, ring.item_ids, folder, base, keep), Link()
        for step in range(4):
            for which, entry in sorted(objective.tables.items()):
                # In each step one rank alone changes rows, so that no sum is rounded in another order.
                rows = torch.arange(3 * step, 3 * step + 9, 2) if which == ITEMS else torch.tensor([step % 2])
                route = entry.route(rows if world.rank == step % world.size else rows[:0])
                vectors = entry.fetch(route)
                entry.update(route, torch.ones_like(vectors) * (1 + route.ids_U.unsqueeze(1)), 0.1)
                inner: Any = route
                while hasattr(inner, "share"):
                    inner = inner.share
                logs[which].touch(inner.ids_U)
            for _, entry in sorted(objective.tables.items()):
                entry.settle()
            made = publication.publish(step, link, {which: log.rows() for which, log in logs.items()})
            assert made is not None
            link = made
            for log in logs.values():
                log.clear()
        assert table.places_N is None
        return told, objective.read(torch.arange(60))

    alone, vectors = work(World.single(), "one")
    found = on_threads(4, lambda world: work(world, "four"))
    for rank, (told, read) in enumerate(found):
        assert torch.equal(read, vectors)
        assert len(told) == (4 if rank == 0 else 0)
    for one, four in zip(alone, found[0][0], strict=True):
        first, second = TableSnapshot.load(store.get, one), TableSnapshot.load(store.get, four)
        assert first.digest == second.digest and torch.equal(first.vectors_ND, second.vectors_ND)
    assert torch.equal(first.vectors_ND, vectors)
    rows = sum(pq.read_table(path).num_rows for path in store.get(four).glob("rows-*.parquet"))
    assert rows < 60 if features else rows == 5, "only what changed is written"


def test_a_full_disk_costs_a_link_and_no_training(ring: Dataset, tmp_path: Path) -> None:
    objective, _ = objective_of(ring, configured(), World.single())
    failures: list[str] = []

    def full(*_: Any) -> str:
        raise OSError("no space left on device")

    keep = Store(full, lambda ref: None, lambda ref, step: pytest.fail("nothing is there to be told of"), lambda step, why: failures.append(why))
    publication = Publication(World.single(), objective, ring.item_ids, tmp_path / "link", full, keep)
    assert publication.publish(1, Link(), {ITEMS: torch.arange(3)}) is None
    assert publication.publish(2, Link("models/sha256-" + "0" * 64), {ITEMS: torch.arange(3)}) is None
    assert failures == ["OSError: no space left on device"] * 2
    log = ChangeLog(objective.tables[ITEMS])
    log.touch(torch.tensor([4, 2]))
    assert log.rows().tolist() == [2, 4]
    log.touch_all()
    assert len(log.rows()) == 60 and np.count_nonzero(log.changed_N) == 60
    log.clear()
    assert not len(log.rows())


def test_what_serving_has_long_left_behind_is_taken_away(ring: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_module, "LINKS", 2)
    objective, _ = objective_of(ring, configured(), World.single())
    store, told = ArtifactStore(str(tmp_path / "store")), []

    def base(step: int) -> str:
        objective.model.save_pretrained(tmp_path / f"base-{step}", pieces(60, objective.read, True), ring.item_ids)
        return store.put("models", tmp_path / f"base-{step}")

    dropped: list[str] = []

    def drop(ref: str) -> None:
        dropped.append(ref)
        if len(dropped) == 1:
            raise StoreUnavailable("the store is away for a moment, which is no matter for training")
        store.remove(ref)

    keep = Store(lambda made, step: store.put(SNAPSHOTS, made), drop, lambda ref, step: told.append(ref), lambda step, why: pytest.fail(why))
    publication, link = Publication(World.single(), objective, ring.item_ids, tmp_path / "link", base, keep), Link()
    for step in range(8):
        objective.tables[ITEMS].weight_ND[step] += 1
        made = publication.publish(step, link, {ITEMS: torch.tensor([step])})
        assert made is not None
        link = made
    kinds = [ref.split("/")[0] for ref in told]
    assert kinds == ["models", SNAPSHOTS, SNAPSHOTS, "models", SNAPSHOTS, SNAPSHOTS, "models", SNAPSHOTS]
    assert dropped == told[1:3] and set(store.list(SNAPSHOTS)) == {told[1], told[4], told[5], told[7]} and len(store.list("models")) == 3
    assert torch.equal(TableSnapshot.load(store.get, told[-1]).vectors_ND, objective.tables[ITEMS].weight_ND)


def test_a_generator_has_no_table_to_publish() -> None:
    with pytest.raises(ValueError, match=r"ema is 0\.9"):
        replace(configured(), ema=0.9)
