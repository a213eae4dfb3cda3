"""A small world with structure: every user walks along a ring of items, so the next item can be learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import JobSpec, Message
from semantide.shared.dataset import Dataset
from semantide.shared.jobs import JobContext, Jobs

from .forked_ranks import Ranks

NUM_ITEMS, NUM_USERS = 60, 80


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks") / "errors.txt")
    yield started
    started.close()


def write_dataset(folder: Path, num_users: int = NUM_USERS, num_items: int = NUM_ITEMS) -> Path:
    rng = np.random.default_rng(4)
    histories = [(rng.integers(num_items) + np.cumsum(rng.integers(1, 3, rng.integers(3, 12)))) % num_items for _ in range(num_users)]
    actions = [[("click", "like")[int(step) % 2] for step in history] for history in histories]
    folder.mkdir(parents=True)
    items = [f"item-{row}" for row in range(num_items)]
    pq.write_table(pa.table({"item": items, "count": [1] * num_items, "title": items}), folder / "items.parquet")
    pq.write_table(
        pa.table({
            "user": [f"user-{row}" for row in range(num_users)],
            "items": pa.array([history.tolist() for history in histories], pa.list_(pa.int32())),
            "times": pa.array([list(range(len(history))) for history in histories], pa.list_(pa.int64())),
            "actions": pa.array(actions, pa.list_(pa.string())),
            "train_end": pa.array([len(history) - 2 for history in histories], pa.int32()),
            "valid_end": pa.array([len(history) - 1 for history in histories], pa.int32()),
        }),
        folder / "users.parquet",
    )  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps({"name": "ring"}))
    return folder


def ring_catalog(num_items: int = NUM_ITEMS, levels: tuple[int, ...] = (8, 8)) -> Catalog:
    codes = np.stack([np.arange(num_items) // levels[1], np.arange(num_items) % levels[1]], 1).astype(np.int64)
    # Catalog rows are not data set rows: whoever mixes them up gets nothing right.
    order = np.random.default_rng(9).permutation(num_items)
    return Catalog(tuple(f"item-{row}" for row in order), codes[order], levels, "f" * 64)


@pytest.fixture
def ring(tmp_path: Path) -> Dataset:
    return Dataset.load(write_dataset(tmp_path / "ring"))


@pytest.fixture
def store(settings: Any) -> ArtifactStore:
    return ArtifactStore(settings.artifacts_root)


@pytest.fixture
def inputs(store: ArtifactStore, tmp_path: Path) -> dict[str, str]:
    ring_catalog().save(tmp_path / "catalog")
    return {"dataset": store.put("datasets", write_dataset(tmp_path / "dataset")), "catalog": store.put("catalogs", tmp_path / "catalog")}


class RecordingQueues:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.fixture
def queues() -> RecordingQueues:
    return RecordingQueues()


@pytest.fixture
def make_job(broker: Any, settings: Any, store: ArtifactStore, queues: RecordingQueues) -> Callable[..., JobContext]:
    def make(kind: str, **fields: Any) -> JobContext:
        record = Jobs(broker).submit(JobSpec(kind=kind, **fields))
        return JobContext(record, settings, store, broker, queues)  # type: ignore[arg-type]

    return make
