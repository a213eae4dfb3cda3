"""Stages on threads give what one thread gives, in the order of the fence, and end with the error of whichever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.fence import Staleness
from semantide.services.training.load_balancing import Share
from semantide.services.training.objective import LossSum, TableRows
from semantide.services.training.occupancy import Occupancy
from semantide.services.training.pipeline import Pipeline
from semantide.shared.jagged import Jagged
from semantide.shared.models.item_table import LocalTable, Route

NUM_ROWS = 12


@dataclass
class CountingTable:
    """Its vectors say how many updates they have seen, and it notes what was done to it, by whom."""

    table: LocalTable = field(default_factory=lambda: LocalTable(NUM_ROWS, 2))
    updates: int = 0
    log: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def route(self, ids_T: Tensor) -> Route:
        self.threads.add(threading.current_thread().name)
        return self.table.route(ids_T)

    def fetch(self, route: Route) -> Tensor:
        self.threads.add(threading.current_thread().name)
        self.log.append("fetch")
        self.seen.append(self.updates)
        return self.table.fetch(route)

    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.append("update")
        self.updates += 1
        self.table.update(route, gradients_UD, rate)

    def state(self) -> dict[str, Tensor]:
        return self.table.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.table.load(state)


class Asking:
    """Asks for the rows of the batch and some drawn ones."""

    def __init__(self, table: Any | None) -> None:
        self.model, self.tokens_per_item = nn.Linear(2, 2), 1
        self.tables: dict[str, Any] = {} if table is None else {"items": table}

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        return {"items": torch.cat([batch.items.values, torch.randint(NUM_ROWS, (3,), generator=generator)])}

    def counts(self, batch: HistoryBatch) -> Tensor:
        return batch.items.offsets_B1[-1:]

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows]) -> LossSum:
        """Its gradients are the rows themselves and the batch, so that everything depends on everything before it."""
        asked, counts_K = rows["items"], self.counts(batch)
        sums = asked.vectors_UD.square().sum() * (1 + batch.items.values.sum() % 3) + asked.vectors_UD[asked.inverse_R].sum()
        return LossSum(sums.view(1) * counts_K, counts_K, torch.ones(1))


def share_of(step: int) -> Share:
    rng = np.random.default_rng(step)
    items = Jagged.from_sequences([rng.integers(0, NUM_ROWS, 3).tolist() for _ in range(2)])
    return Share(HistoryBatch.of(items), len(items.values), None, 0.0)


def run(pipeline: Pipeline, length: int, stop_at: int | None = None) -> dict[str, Tensor]:
    with pipeline:
        for place in range(length):
            if place == stop_at:
                pipeline.settle()
                return {name: tensor.clone() for name, tensor in pipeline.on_the_way().items()}
            flight = pipeline.take()
            if flight.rows:
                pipeline._objective.loss(flight.batch, flight.rows).total().backward()
            pipeline.give_back(flight, 0.1)
    return {}


def made(table: Any | None, length: int, **options: Any) -> Pipeline:
    first = options.pop("first", 0)
    return Pipeline(Asking(table), share_of, torch.device("cpu"), start=0, first=first, end=length, seed=3, **options)


@pytest.mark.parametrize("staleness", [Staleness(), Staleness(1), Staleness(2), Staleness(1, 4), Staleness(2, 3)])
def test_threads_and_one_thread_give_the_same_tables(staleness: Staleness) -> None:
    results, length = [], 9
    for in_flight in (1, 2, 6, 20):
        torch.manual_seed(0)
        table = CountingTable()
        run(made(table, length, in_flight=in_flight, staleness=staleness), length)
        assert table.seen == [staleness.seen(step, 0) for step in range(length)]
        assert table.updates == length
        assert ("MainThread" in table.threads) == (in_flight == 1)
        results.append((table.log, table.table.weight_ND))
    for log, weight_ND in results[1:]:
        assert log == results[0][0]
        assert torch.equal(weight_ND, results[0][1])


def test_staleness_changes_what_is_computed_only_where_rows_collide() -> None:
    weights = []
    for batches in (0, 1):
        torch.manual_seed(0)
        table = CountingTable()
        run(made(table, 9, staleness=Staleness(batches)), 9)
        weights.append(table.table.weight_ND)
    assert not torch.equal(*weights)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 9), st.integers(0, 2), st.integers(0, 4), st.sampled_from([1, 3, 6]))
def test_a_run_that_goes_on_from_table_and_rows_on_the_way_ends_as_one_left_alone(stop_at: int, batches: int, warmup: int, in_flight: int) -> None:
    staleness, length = Staleness(batches, warmup), 9
    torch.manual_seed(0)
    whole = CountingTable()
    run(made(whole, length, staleness=staleness), length)
    torch.manual_seed(0)
    stopped = CountingTable()
    kept = run(made(stopped, length, staleness=staleness, in_flight=in_flight), length, stop_at)
    again = CountingTable()
    again.load({name: tensor.clone() for name, tensor in stopped.state().items()})
    run(made(again, length, staleness=staleness, first=min(stop_at, length), kept=kept, in_flight=in_flight), length - stop_at)
    for name, tensor in whole.state().items():
        assert torch.equal(again.state()[name], tensor)


def test_rows_kept_by_other_ranks_are_looked_up_anew() -> None:
    torch.manual_seed(0)
    table = CountingTable()
    kept = {"0.items.ids": torch.arange(3), "0.items.vectors": torch.full((3, 2), 99.0)}
    with made(table, 1, kept=kept) as pipeline:
        flight = pipeline.take()
        assert torch.equal(flight.vectors["items"], table.table.fetch(flight.routes["items"]))
        pipeline.give_back(flight, 0.1)


def test_without_tables_batches_come_in_order() -> None:
    steps = []
    with made(None, 7) as pipeline:
        for _ in range(7):
            flight = pipeline.take()
            steps.append((flight.step, flight.batch.items.values.tolist()))
            pipeline.give_back(flight, 0.0)
        assert pipeline.on_the_way() == {}
    assert steps == [(step, share_of(step).batch.items.values.tolist()) for step in range(7)]


class Broken(Exception):
    pass


def _fails(after: int) -> Callable[..., Any]:
    calls = iter(range(1000))

    def fail(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise Broken("here")
        return None

    return fail


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("stage", ["load", "route", "fetch", "copy", "update"])
def test_an_error_of_a_stage_ends_the_run_with_its_cause(stage: str, staleness: int, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, before = CountingTable(), threading.active_count()
    pipeline, check = made(table, 9, in_flight=in_flight, staleness=Staleness(staleness)), _fails(3)
    owner, name = {
        "load": (pipeline, "_share"),
        "copy": (pipeline._ferry, "bring"),
        **{door: (table, door) for door in ("route", "fetch", "update")},
    }[stage]
    original = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        check()
        return original(*arguments)

    if stage == "copy":
        pipeline._before[-1] = ("copy", failing)
    else:
        monkeypatch.setattr(owner, name, failing)
    with pytest.raises(Broken, match="here"):
        run(pipeline, 9)
    assert threading.active_count() == before


def test_an_error_of_the_computing_thread_ends_the_stages() -> None:
    before = threading.active_count()
    for num_ranks in (1, 2):
        with pytest.raises(Broken), made(CountingTable(), 9, num_ranks=num_ranks, staleness=Staleness(2)) as pipeline:
            pipeline.give_back(pipeline.take(), 0.1)
            pipeline.take()
            raise Broken
        assert threading.active_count() == before


def test_with_other_ranks_all_end_after_the_same_talks() -> None:
    """Whatever the threads' speeds: a rank that ended in the middle of an exchange would leave the others waiting."""
    for taken in (1, 3, 8):
        table = CountingTable()
        pipeline = made(table, 9, num_ranks=2, in_flight=3, staleness=Staleness(1))
        with pytest.raises(Broken), pipeline:
            for _ in range(taken):
                pipeline.give_back(pipeline.take(), 0.1)
            raise Broken
        assert pipeline._prepared == min(taken + 3, 9)
        assert table.log.count("fetch") == min(taken + 2, 9)
        assert table.updates == taken


def test_the_collision_rate_is_that_of_a_count() -> None:
    for batches in (0, 1, 2):
        occupancy = Occupancy()
        pipeline = made(CountingTable(), 9, staleness=Staleness(batches), occupancy=occupancy)
        ids = [set(pipeline._load(step).ids["items"].tolist()) for step in range(9)]
        run(pipeline, 9)
        span = max(1, batches)
        collided = sum(len(ids[step] & set().union(*ids[max(0, step - span) : step])) for step in range(9))
        assert occupancy.report(1.0)["collision_rate"] == pytest.approx(collided / sum(map(len, ids)))


def test_shares_of_time_add_up() -> None:
    occupancy = Occupancy()
    occupancy.worked("dense", 4.0)
    occupancy.exchanged(1.0)
    occupancy.worked("fetch", 3.0)
    # A wait from 2 to 5: half a second of it for the fence, one for the look-up, the rest for nobody.
    occupancy.waited(2.0, 5.0, {"load": (0.0, 1.5), "fence": (1.5, 2.5), "fetch": (2.5, 3.5), "copy": (6.0, 7.0)})
    values = occupancy.report(10.0)
    assert values == pytest.approx({
        "compute_share": 0.3, "exposed_dense": 0.1, "exposed_sparse": 0.15, "exposed_load": 0.0, "exposed_copy": 0.0, "idle_share": 0.45, "busy_dense": 0.4,
        "busy_fetch": 0.3,
    })  # fmt: skip
    assert occupancy.report(1.0)["idle_share"] == 1.0
