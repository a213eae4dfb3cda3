"""Small data sets in the format of ``datasets`` artifacts, written and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.shared.dataset import Dataset

GENRES = ["drama", "comedy", "horror", "sport", "music", "travel", "cooking", "history"]
WORDS = [f"word{i}" for i in range(120)]


def item_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Items of eight genres with words of their own."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        genre = number % len(GENRES)
        own = [WORDS[(genre * 15 + int(i)) % 120] for i in random.integers(0, 25, 6)]
        rows.append(
            {
                "item": f"i{number}", "title": " ".join(own[:4]), "text": " ".join(own[4:]), "categories": [GENRES[genre]],
                "attributes": json.dumps({"maker": f"m{int(random.integers(0, 12))}"}), "available": True, "embedding": None,
            }
        )  # fmt: skip
    return rows


ITEM_SCHEMA = pa.schema(
    [
        ("item", pa.string()), ("title", pa.string()), ("text", pa.string()), ("categories", pa.list_(pa.string())), ("attributes", pa.string()),
        ("available", pa.bool_()), ("embedding", pa.list_(pa.float32())),
    ]
)  # fmt: skip


def write_dataset(folder: Path, rows: list[dict[str, Any]], num_users: int = 120, seed: int = 0) -> Path:
    """Users who mostly stay within one genre; the last two events validate and test."""
    random = np.random.default_rng(seed)
    count = len(rows)
    folder.mkdir(parents=True, exist_ok=True)
    histories = []
    for _ in range(num_users if count else 0):
        genre = int(random.integers(0, len(GENRES)))
        length = int(random.integers(4, 14))
        own = np.arange(genre, count, len(GENRES)) if count > len(GENRES) else np.arange(count)
        events = np.where(random.random(length) < 0.85, random.choice(own, length), random.integers(0, count, length))
        histories.append(events.astype(np.int32))
    lengths = [len(events) for events in histories]
    training = np.bincount(np.concatenate([events[:-2] for events in histories]) if histories else np.zeros(0, np.int64), minlength=count)
    table = pa.Table.from_pylist(rows, schema=ITEM_SCHEMA).append_column("count", pa.array(training[:count], pa.int64()))
    pq.write_table(table, folder / "items.parquet")
    users = {
        "user": [f"u{user}" for user in range(len(histories))],
        "items": pa.array([events.tolist() for events in histories], pa.list_(pa.int32())),
        "times": pa.array([list(range(length)) for length in lengths], pa.list_(pa.int64())),
        "actions": pa.array([["click"] * length for length in lengths], pa.list_(pa.string())),
        "train_end": pa.array([length - 2 for length in lengths], pa.int32()),
        "valid_end": pa.array([length - 1 for length in lengths], pa.int32()),
    }
    pq.write_table(pa.table(users), folder / "users.parquet")
    (folder / "dataset.json").write_text("{}")
    return folder


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    return item_rows


@pytest.fixture
def dataset_folder(tmp_path: Path) -> Callable[..., Path]:
    def make(rows: list[dict[str, Any]], **options: Any) -> Path:
        return write_dataset(tmp_path / f"dataset{len(list(tmp_path.glob('dataset*')))}", rows, **options)

    return make


@pytest.fixture
def make_dataset(dataset_folder: Callable[..., Path]) -> Callable[..., Dataset]:
    def make(rows: list[dict[str, Any]], **options: Any) -> Dataset:
        return Dataset.load(dataset_folder(rows, **options))

    return make


@pytest.fixture
def items_table() -> Callable[..., pa.Table]:
    """Items as ``items`` artifacts hold them."""

    def make(rows: list[dict[str, Any]]) -> pa.Table:
        full = [{**row, "deleted": row.get("deleted", False)} for row in rows]
        return pa.Table.from_pylist(full, schema=ITEM_SCHEMA.append(pa.field("deleted", pa.bool_())))

    return make
