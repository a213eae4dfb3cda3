"""Whether answers come with what was shown or long after it, a data set has the same pages, exposures and figures."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.services.ingestion.schema import INTERACTION_SCHEMA, completed
from semantide.shared.config import Settings
from semantide.shared.dataset import Dataset
from semantide.shared.feedback import Feedback
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.users import SimulatorConfig

WORLD = SimulatorConfig(users=120, items=80, topics=4, sessions=3, position_bias=0.0, fatigue=0.0)


def stored(log: pa.Table, folder: Path, split: str) -> Path:
    table = completed(log, INTERACTION_SCHEMA)
    folder.mkdir(parents=True)
    pq.write_table(table.append_column("event", pa.array(event_hashes(table), pa.binary())), folder / "events.parquet")
    config = DatasetConfig.parse({"split": split}, session_gap_seconds=1800)
    actions = Settings.model_fields["actions"].default
    described = {"title": "", "text": "", "categories": [], "attributes": "{}", "available": True, "deleted": False, "embedding": None}
    items = pa.Table.from_pylist([{**described, "item": f"v{item}"} for item in range(WORLD.items)], schema=ARTIFACT_SCHEMA)
    write_dataset([[folder / "events.parquet"]], len(table), items, actions, config, folder / "dataset", workdir=folder / "steps")
    return folder / "dataset"


@pytest.fixture(scope="module")
def logs() -> tuple[pa.Table, pa.Table]:
    """Answers at once, and the same ones half a minute later on average."""
    simulation = Simulation(WORLD)
    late = copy(simulation)
    late.config = replace(WORLD, answer_seconds=30.0)
    return simulation.log(), late.log()


@pytest.mark.parametrize("split", ["leave-one-out", "last-page", "temporal"])
def test_late_answers_make_the_same_exposures(tmp_path: Path, logs: tuple[pa.Table, pa.Table], split: str) -> None:
    at_once, late = (stored(log, tmp_path / name, split) for name, log in zip(("at_once", "late"), logs, strict=True))
    columns = ["item", "time", "page", "tab", "position", "signals", "value", "propensity"]
    assert pq.read_table(at_once / "feedback.parquet", columns=columns).equals(pq.read_table(late / "feedback.parquet", columns=columns))
    assert pq.read_table(at_once / "pages.parquet", columns=["time", "items", "actions"]).equals(
        pq.read_table(late / "pages.parquet", columns=["time", "items", "actions"])
    )
    data, feedback = Dataset.load(late), Feedback.load(late)
    assert data.header["page_report"] == Dataset.load(at_once).header["page_report"]
    # Nobody looks less at lower places here, and nobody tires.
    assert all(abs(entry["lift"] - 1) < 0.12 for entry in data.header["page_report"]["positions"][:5])

    answered = set(zip(feedback.users[feedback.signals_XS.any(1)].tolist(), feedback.items[feedback.signals_XS.any(1)].tolist(), strict=True))
    passed = feedback.take((feedback.parts == 0) & ~feedback.signals_XS.any(1))
    refused = set(zip(passed.users.tolist(), passed.items.tolist(), strict=True))
    held_out = {(user, item) for user in range(len(data.user_ids)) for item in data.history(user)[data.train_end[user] :].tolist()}
    assert held_out <= answered
    # Who took an item may have passed it over before, but seldom.
    assert len(held_out & refused) < 0.15 * len(held_out) and len(held_out) > 150
