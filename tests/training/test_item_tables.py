"""Tables of a retriever's items: the same on any number of ranks, at first, after an earlier model, with shared rows and with features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.item_tables import ItemTables, item_tables, pieces, write_rows
from semantide.services.training.objective import LossSum, TableRows
from semantide.services.training.rankers import RetrieverRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import FEATURES, ITEMS, NextItemSampled
from semantide.services.training.retriever_job import write_retriever
from semantide.services.training.trainer import Listener, Trainer
from semantide.services.training.world import World
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict, Corrupt, JobCancelled, TransientError
from semantide.shared.jagged import Jagged
from semantide.shared.models.item_rows import TableGrowth
from semantide.shared.models.retriever import ItemVectors, Retriever, RetrieverConfig

from .conftest import write_dataset
from .rank_threads import on_threads

SHAPE = RetrieverConfig(hidden_size=8, num_layers=1, num_heads=1, max_items=8, time_buckets=8, dropout=0.0, embedding_dropout=0.0)
GROWTHS = [TableGrowth(), TableGrowth("hash", 7), TableGrowth("admission", 5, 6)]


def configured(**changes: object) -> TrainConfig:
    config: TrainConfig = replace(recipe("retriever-tiny"), retriever=SHAPE, max_items=8, num_negatives=6, **changes)  # type: ignore[arg-type]
    return config


def with_features(ring: Dataset, num_items: int | None = None) -> Dataset:
    """The ring's items with one or two categories, none for every fifth, and a brand; a part of them for another data set."""
    number = len(ring.item_ids) if num_items is None else num_items
    categories = [[f"kind {item % 4}", *(["even"] if item % 2 else [])] if item % 5 else [] for item in range(number)]
    table = ring.item_table.slice(0, number).append_column("categories", pa.array(categories, pa.list_(pa.string())))
    table = table.append_column("attributes", pa.array([json.dumps({"brand": str(item % 3)}) for item in range(number)]))
    return replace(ring, item_ids=ring.item_ids[:number], item_table=table)


def counts_of(ring: Dataset) -> Tensor:
    return torch.bincount(torch.from_numpy(np.concatenate([*ring.train_histories()]).astype(np.int64)), minlength=len(ring.item_ids))[: len(ring.item_ids)]


def objective_of(ring: Dataset, config: TrainConfig, world: Any, before: Path | None = None) -> tuple[NextItemSampled, ItemTables]:
    torch.manual_seed(0)
    counts = counts_of(ring)
    tables = item_tables(ring, counts, config, world, 3, before)
    return NextItemSampled(Retriever(config.retriever), tables.items, counts, config, None, tables.featured), tables


@pytest.mark.parametrize("features", [(), ("categories", "attributes.brand")])
@pytest.mark.parametrize("growth", GROWTHS)
def test_items_have_the_same_vectors_on_any_number_of_ranks(ring: Dataset, growth: TableGrowth, features: tuple[str, ...]) -> None:
    ring, config = with_features(ring), configured(growth=growth, features=features, table_group=2)
    everything = torch.arange(len(ring.item_ids))
    single, tables = objective_of(ring, config, World.single())
    whole = single.read(everything)
    values = [() if tables.featured is None else tuple(tables.featured.features.asked(everything[item : item + 1]).tolist()) for item in range(60)]
    assert len({tuple(vector) for vector in whole.tolist()}) == len({*zip(tables.rows.rows_N.tolist(), values, strict=True)})

    def work(world: Any) -> tuple[Tensor, Tensor, int]:
        objective, _ = objective_of(ring, config, world)
        mine = torch.tensor([5 + world.rank, 3, 3])[: world.rank]
        return objective.read(everything), objective.read(mine), len(objective.tables[ITEMS].share.table.weight_ND)

    for rank, (vectors, some, rows) in enumerate(on_threads(4, work)):
        assert torch.equal(vectors, whole)
        assert torch.equal(some, whole[torch.tensor([5 + rank, 3, 3])[:rank]])
        assert rows <= len(single.tables[ITEMS].weight_ND) // 2 + 1, "a rank makes no more than its share"


def rows_of(objective: NextItemSampled, ids: Mapping[str, Tensor]) -> dict[str, TableRows]:
    rows = {}
    for name, table in objective.tables.items():
        route = table.route(ids[name])
        rows[name] = TableRows(route.ids_U, table.fetch(route).requires_grad_(), route.inverse_T, ids[name])
    return rows


def loss_of(objective: NextItemSampled, ids: Mapping[str, Tensor]) -> tuple[LossSum, dict[str, TableRows]]:
    items = Jagged.from_sequences([[3, 9, 4, 20], [7, 3]])
    rows = rows_of(objective, ids)
    sums = objective.loss(HistoryBatch.of(items, torch.arange(6) * 60), rows)
    sums.total().backward()
    return sums, rows


@pytest.mark.parametrize("negatives", [0, 6])
def test_a_step_with_features_is_that_of_a_table_of_the_composed_vectors(ring: Dataset, negatives: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ring = with_features(ring)
        config = replace(configured(features=("categories",)), num_negatives=negatives)
        objective, tables = objective_of(ring, config, World.single())
        plain, _ = objective_of(ring, replace(config, features=()), World.single())
        assert tables.featured is not None
        everything = torch.arange(60)
        plain.tables[ITEMS].weight_ND.copy_(objective.read(everything))
        batch = HistoryBatch.of(Jagged.from_sequences([[3, 9, 4, 20], [7, 3]]))
        ids = objective.draw(batch, torch.Generator().manual_seed(1))
        found, rows = loss_of(objective, ids)
        expected, whole = loss_of(plain, {ITEMS: ids[ITEMS]})
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found.total(), expected.total())
    gradients_ND = torch.zeros(60, 8, dtype=torch.float64)
    gradients_ND[whole[ITEMS].ids_U] = whole[ITEMS].vectors_UD.grad
    torch.testing.assert_close(rows[ITEMS].vectors_UD.grad, gradients_ND[rows[ITEMS].ids_U])
    features = tables.featured.features
    for row, gradient in zip(rows[FEATURES].ids_U.tolist(), rows[FEATURES].vectors_UD.grad, strict=True):
        having = [item for item in range(60) if row in features.asked(torch.tensor([item])).tolist()]
        wanted = sum((gradients_ND[item] / int(features.lengths(torch.tensor([item]))) for item in having), torch.zeros(8, dtype=torch.float64))
        torch.testing.assert_close(gradient, wanted)


def test_items_that_share_a_row_learn_together_and_are_no_negatives_of_each_other(ring: Dataset) -> None:
    objective, tables = objective_of(ring, configured(growth=TableGrowth("hash", 1)), World.single())
    ids = objective.draw(HistoryBatch.of(Jagged.from_sequences([[3, 9, 4, 20], [7, 3]])), torch.Generator().manual_seed(1))
    sums, rows = loss_of(objective, ids)
    assert rows[ITEMS].ids_U.tolist() == [0] and tables.figures["colliding_items"] == 60
    assert float(sums.total().detach()) == pytest.approx(0.0, abs=1e-6)  # nothing is left to compare with
    with pytest.raises(ValueError, match="ids from 60 to 60"):
        objective.tables[ITEMS].route(torch.tensor([60]))


def stored(folder: Path, ring: Dataset, config: TrainConfig, world: Any = None) -> NextItemSampled:
    """A model with other vectors than first ones, written as a job does."""
    objective, tables = objective_of(ring, config, World.single())
    for name, table in objective.tables.items():
        table.weight_ND += torch.randn(table.weight_ND.shape, generator=torch.Generator().manual_seed(len(name)))
    objective.model.save_pretrained(folder, pieces(len(ring.item_ids), objective.read, True), ring.item_ids)
    write_rows(folder, tables, config)
    return objective


@pytest.mark.parametrize("features", [(), ("categories",)])
@pytest.mark.parametrize("growth", GROWTHS)
def test_a_run_goes_on_from_what_an_earlier_one_knew_of_each_item(ring: Dataset, tmp_path: Path, growth: TableGrowth, features: tuple[str, ...]) -> None:
    config = configured(growth=growth, features=features)
    old, now = with_features(ring, 40), with_features(ring)
    earlier = stored(tmp_path / "model", old, config)
    before = earlier.read(torch.arange(40))
    assert torch.equal(ItemVectors.load(tmp_path / "model").vectors_ND, before)
    on_ranks = on_threads(3, lambda world: objective_of(now, config, world, tmp_path / "model")[0].read(torch.arange(60)))
    objective, tables = objective_of(now, config, World.single(), tmp_path / "model")
    after = objective.read(torch.arange(60))
    assert all(torch.equal(vectors, after) for vectors in on_ranks)
    torch.testing.assert_close(after[:40], before)
    if growth.rows == "own":
        fresh, _ = objective_of(now, config, World.single())
        assert torch.equal(objective.tables[ITEMS].weight_ND[40:], fresh.tables[ITEMS].weight_ND[40:]), "unseen items begin at first values"
    if growth.rows == "admission":
        # What came to have enough events goes on from the row that it shared, and what was admitted stays so.
        seldom = item_tables(now, torch.zeros(60, dtype=torch.int64), config, World.single(), 3, tmp_path / "model")
        assert seldom.rows.own_N[:40].tolist() == (counts_of(ring)[:40] >= 6).tolist() and not seldom.rows.own_N[40:].any()
        often = item_tables(now, torch.full((60,), 9), config, World.single(), 3, tmp_path / "model")
        vectors = often.items.read(torch.arange(40))
        assert bool(often.rows.own_N.all())
        if not features:
            torch.testing.assert_close(vectors, before)
    if features:
        assert tables.featured is not None and tables.figures["feature_rows"] == 5


def test_an_earlier_model_of_another_size_or_a_damaged_one_is_refused(ring: Dataset, tmp_path: Path) -> None:
    stored(tmp_path / "model", ring, configured())
    with pytest.raises(Conflict, match=r"vectors of 8 numbers and retriever\.hidden_size is 16"):
        item_tables(ring, counts_of(ring), replace(configured(), retriever=replace(SHAPE, hidden_size=16)), World.single(), 0, tmp_path / "model")
    pq.write_table(pa.table({"own": [True] * 3}), tmp_path / "model" / "item_rows.parquet")
    with pytest.raises(Corrupt, match=r"60 items in vectors\.parquet and 3 in item_rows\.parquet"):
        item_tables(ring, counts_of(ring), configured(growth=GROWTHS[2]), World.single(), 0, tmp_path / "model")
    (tmp_path / "model" / "vectors.parquet").write_bytes(b"no")
    with pytest.raises(Corrupt, match="cannot be read"):
        item_tables(ring, counts_of(ring), configured(), World.single(), 0, tmp_path / "model")


@given(st.integers(0, 9), st.integers(1, 5), st.booleans())
def test_lists_over_ranks_are_those_of_one_process(rankers: tuple[Any, RetrieverRanker], number: int, n: int, exclude_seen: bool) -> None:
    made, single = rankers
    rng = np.random.default_rng(number)
    histories = [rng.integers(0, 60, rng.integers(0, 12)) for _ in range(number)]
    expected = single.rank(histories, n, exclude_seen)

    def work(world: Any) -> Any:
        return made(world).rank(histories[world.rank :: 3], n, exclude_seen)

    for rank, lists in enumerate(on_threads(3, work)):
        assert lists.tolist() == expected[rank::3].tolist()


@pytest.fixture(scope="module")
def rankers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, RetrieverRanker]:
    """One of a process alone, and a function that makes a rank's."""
    ring = Dataset.load(write_dataset(tmp_path_factory.mktemp("ranks") / "ring"))
    alone, _ = objective_of(ring, configured(), World.single())

    def made(world: Any) -> RetrieverRanker:
        objective, _ = objective_of(ring, configured(), world)
        objective.model.load_state_dict(alone.model.state_dict())
        return RetrieverRanker(objective.model, objective.read, np.arange(60), 8, agree=lambda number: max(world.gather_json(number)))

    return made, made(World.single())


class TableRun:
    """A run with shared rows and features."""

    def __init__(self, ring: Dataset, folder: Path, stop_at: int | None = None) -> None:
        config = configured(growth=TableGrowth("admission", 4, 6), features=("categories",), epochs=3, items_per_batch=64, staleness=1, sync_steps=3)
        self.objective, _ = objective_of(with_features(ring), config, World.single())
        self.calls, self.stop_at = 0, stop_at
        sampler = Sampler(ring.train_histories(), config, 0, ring.train_times())
        self.trainer = Trainer(config, self.objective, sampler, None, Listener(lambda: 0.0, check_cancelled=self.check), folder, seed=0)

    def check(self) -> None:
        self.calls += 1
        if self.calls == self.stop_at:
            raise JobCancelled("stop")


def test_a_stopped_run_with_shared_rows_and_features_ends_as_one_left_alone(ring: Dataset, tmp_path: Path) -> None:
    whole = TableRun(ring, tmp_path / "whole")
    state = whole.trainer.run()
    assert state.losses[-1] < state.losses[0]
    with pytest.raises(JobCancelled):
        TableRun(ring, tmp_path / "stopped", 8).trainer.run()
    again = TableRun(ring, tmp_path / "stopped")
    assert again.trainer.run() == state
    for name, table in again.objective.tables.items():
        assert all(torch.equal(tensor, whole.objective.tables[name].state()[key]) for key, tensor in table.state().items())


@pytest.mark.parametrize("broken", ["model.safetensors", "vectors.parquet", "item_rows.parquet", "feature_rows.parquet"])
def test_a_model_that_cannot_be_written_leaves_no_rank_waiting(ring: Dataset, tmp_path: Path, broken: str) -> None:
    """A folder lies where the leading rank is to write a file; all ranks go on together afterwards."""
    ring, config = with_features(ring), configured(features=("categories",), growth=TableGrowth("hash", 7))
    (tmp_path / broken).mkdir()

    def work(world: Any) -> tuple[str, Tensor]:
        objective, tables = objective_of(ring, config, world)
        failed = ""
        try:
            write_retriever(tmp_path if world.leads else None, objective, tables, config, ring.item_ids)
        except (OSError, TransientError) as error:
            failed = str(error)
        return failed, objective.read(torch.arange(60) if world.leads else torch.arange(3))

    (failed, vectors), (other, some) = on_threads(2, work)
    assert broken in failed and not other
    assert torch.equal(vectors[:3], some)
