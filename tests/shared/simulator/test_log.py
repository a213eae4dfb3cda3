"""The simulated log: fitted to a real one, with propensities that are true, a function of its seed alone."""

from collections import Counter
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from semantide.shared.simulator.chance import uniform
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.policy import Shelf
from semantide.shared.simulator.users import SimulatorConfig

SMALL = SimulatorConfig(users=200, items=300, sessions=4, topics=10)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(SMALL)


@pytest.fixture(scope="module")
def log(simulation: Simulation) -> pl.DataFrame:
    frame = pl.from_arrow(simulation.log())
    assert isinstance(frame, pl.DataFrame)
    return frame


def test_draws_by_address_are_uniform_and_independent() -> None:
    numbers = uniform(3, "any", np.arange(1000)[:, None], np.arange(100))
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02
    assert uniform(3, "any", 17, 4) == numbers[17, 4] != uniform(4, "any", 17, 4)


def test_the_log_has_the_marginals_of_the_real_one(simulation: Simulation, log: pl.DataFrame) -> None:
    signals = Counter(name for names in log["signals"].to_list() for name in names)
    rates = simulation.marginals.rates
    for name, tolerance in (("click", 0.03), ("long_view", 0.03), ("like", 0.004), ("comment", 0.002), ("follow", 0.001)):
        assert signals[name] / log.height == pytest.approx(rates[name], abs=tolerance), name
    assert signals["order"] / signals["click"] == pytest.approx(SMALL.order_share, abs=0.02)
    hours = np.bincount((log["time"].to_numpy() - SMALL.start_ms) % 86_400_000 // 3_600_000, minlength=24) / log.height
    assert np.corrcoef(hours, simulation.marginals.hour_share)[0, 1] > 0.7
    quarter, half = (float(np.interp(share, *simulation.marginals.watch_ratio)) for share in (0.25, 0.5))
    assert log["value"].quantile(0.25) == pytest.approx(quarter, abs=0.03) and log["value"].quantile(0.5) == pytest.approx(half, abs=0.05)


def test_pages_have_5_to_10_places_and_show_nothing_twice(log: pl.DataFrame) -> None:
    pages = log.group_by("page", maintain_order=True).agg("item", "position", pl.col("user").n_unique())
    assert pages["user"].max() == 1
    for items, places in zip(pages["item"].to_list(), pages["position"].to_list(), strict=True):
        assert 5 <= len(items) <= 10 and len(set(items)) == len(items) and places == list(range(len(items)))
    assert log["event_id"].n_unique() == log.height


def test_signals_go_together(log: pl.DataFrame) -> None:
    for signals, action in zip(log["signals"].to_list(), log["action"].to_list(), strict=True):
        if "hate" in signals:
            assert signals == ["hate"] and action == "hate"
        elif signals:
            assert "click" in signals and action in signals
        else:
            assert action == "exposure"


def test_visits_pages_and_places_are_in_the_order_of_time() -> None:
    """Of people who come several times a day, too: what they remember at a visit happened before it."""
    simulation = Simulation(SimulatorConfig(users=400, items=60, topics=4, sessions=5, days=1))
    log = pl.from_arrow(simulation.log())
    assert isinstance(log, pl.DataFrame)
    parts = log["page"].str.split("/")
    visit = log.with_columns(session=parts.list.get(1).cast(pl.Int64), number=parts.list.get(3).cast(pl.Int64)).sort("user", "session", "number", "position")
    later = visit.with_columns(gap=pl.col("time").diff().over("user"), day=pl.col("time") // 86_400_000)
    assert later["gap"].min() > 0
    assert later.group_by("user", "day").agg(pl.col("session").n_unique())["session"].max() >= 4
    hours = np.bincount((log["time"].to_numpy() - simulation.config.start_ms) % 86_400_000 // 3_600_000, minlength=24) / log.height
    assert np.corrcoef(hours, simulation.marginals.hour_share)[0, 1] > 0.7


def test_attention_falls_with_the_place(log: pl.DataFrame) -> None:
    by_place = log.with_columns(opened=pl.col("signals").list.contains("click")).group_by("position").agg(pl.col("opened").mean()).sort("position")
    assert by_place["opened"][0] > by_place["opened"][4] > by_place["opened"][9]


def test_propensities_are_the_shares_in_which_items_are_shown() -> None:
    """One person's first page, lived through in 3000 worlds of other luck."""
    simulation = Simulation(SimulatorConfig(users=1, items=30, topics=4, sessions=1))
    count = 3000
    shelf = Shelf(simulation.policy, np.zeros(count, dtype=np.int64))
    rows = np.arange(count)
    items, chances = shelf.draw(rows, np.full(count, 10), rows, np.zeros(count, dtype=np.int64))  # luck is addressed by the visit
    weight = simulation.policy.weights(np.zeros(1, dtype=np.int64))[0]
    first = np.bincount(items[:, 0], minlength=30) / count
    assert np.abs(first - weight).max() < 4 * np.sqrt(0.25 / count)
    assert np.allclose(chances[:, 0], weight[items[:, 0]])
    # What came before leaves the rest its weight: by the chain, the inverse of a chance has as mean the number of items that are left.
    for place in (1, 9):
        expected = 30 - place
        sample = 1 / chances[:, place]
        assert abs(sample.mean() - expected) < 5 * sample.std() / np.sqrt(count)


def test_everything_may_be_shown_and_the_shelf_is_filled_again() -> None:
    simulation = Simulation(SimulatorConfig(users=5, items=20, topics=2, sessions=6))
    log = simulation.log()
    assert log.num_rows > 5 * 20 and min(log["propensity"].to_pylist()) > 0 and max(log["propensity"].to_pylist()) <= 1


def test_a_log_is_a_function_of_its_seed_and_not_of_the_blocks(monkeypatch: pytest.MonkeyPatch, log: pl.DataFrame) -> None:
    monkeypatch.setattr("semantide.shared.simulator.log._BLOCK_CELLS", 300 * 70)
    again = pl.from_arrow(Simulation(SMALL).log())
    assert isinstance(again, pl.DataFrame) and again.sort("event_id").equals(log.sort("event_id"))


def test_late_answers_are_the_same_ones_as_events_of_their_own(simulation: Simulation, log: pl.DataFrame) -> None:
    patient = copy(simulation)
    patient.config = replace(SMALL, answer_seconds=20.0)
    late = pl.from_arrow(patient.log())
    assert isinstance(late, pl.DataFrame)
    shown, answers = late.filter(pl.col("position").is_not_null()), late.filter(pl.col("position").is_null())
    told = ["user", "item", "time", "page", "event_id", "position", "propensity", "tab"]
    assert shown.select(told).sort("event_id").equals(log.select(told).sort("event_id"))
    assert set(shown["action"]) == {"exposure"} and shown["signals"].list.len().sum() == 0
    answered = log.filter(pl.col("action") != "exposure")
    told = ["user", "item", "page", "action", "signals", "value"]
    assert answers.sort("event_id").select(told).equals(answered.sort("event_id").select(told))
    assert shown["value"].null_count() == answered.height and late["event_id"].is_unique().all()
    waits = answers.sort("event_id")["time"] - answered.sort("event_id")["time"]
    assert waits.min() >= 1 and waits.mean() == pytest.approx(20_000, rel=0.1)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_written_log_makes_its_world_again(tmp_path: Path, form: str) -> None:
    config = SimulatorConfig(users=10, items=40, topics=3, sessions=2, seed=5)
    late = Simulation(replace(config, answer_seconds=5.0)).write(tmp_path, form)
    counts = Simulation(config).write(tmp_path, form)
    assert late == counts
    assert Simulation.of(tmp_path).config == config
    lines = pq.read_table(tmp_path / "interactions.parquet").num_rows if form == "parquet" else len((tmp_path / "interactions.jsonl").read_text().splitlines())
    assert lines == counts["exposures"] > counts["clicks"] > counts["orders"]


def test_what_cannot_be_a_world_is_refused(tmp_path: Path) -> None:
    for wrong in ({"items": 5}, {"slots": (3, 2)}, {"order_share": 0.0}, {"users": 0}, {"sessions": -1.0}, {"answer_seconds": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SimulatorConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="semantide simulate"):
        Simulation.of(tmp_path)
