"""A small shop: users walk along rings of items, and a generator that has learned nothing yet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.retriever import Retriever, RetrieverConfig

NUM_ITEMS, NUM_USERS = 40, 30


def write_dataset(folder: Path, num_users: int = NUM_USERS, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, NUM_ITEMS, rng.integers(1, 12)).tolist() for _ in range(num_users)]
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"item": [f"item-{row}" for row in range(NUM_ITEMS)], "count": [1] * NUM_ITEMS}), folder / "items.parquet")
    pq.write_table(
        pa.table({
            "user": [f"user-{row}" for row in range(num_users)],
            "items": pa.array(histories, pa.list_(pa.int32())),
            "times": pa.array([list(range(len(history))) for history in histories], pa.list_(pa.int64())),
            "train_end": pa.array([max(len(history) - 2, 0) for history in histories], pa.int32()),
            "valid_end": pa.array([max(len(history) - 1, 0) for history in histories], pa.int32()),
        }),
        folder / "users.parquet",
    )  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps({"name": "ring"}))
    return folder


def shop_catalog() -> Catalog:
    # In another order than the data set's, and without its last item.
    order = np.random.default_rng(9).permutation(NUM_ITEMS - 1)
    codes = np.stack([order // 8, order % 8], 1).astype(np.int64)
    return Catalog(tuple(f"item-{row}" for row in order), codes, (5, 8), "f" * 64)


@pytest.fixture
def store(settings) -> ArtifactStore:  # type: ignore[no-untyped-def]
    return ArtifactStore(settings.artifacts_root)


@pytest.fixture
def dataset(store: ArtifactStore, tmp_path: Path) -> str:
    return store.put("datasets", write_dataset(tmp_path / "dataset"))


@pytest.fixture
def catalog(store: ArtifactStore, tmp_path: Path) -> str:
    shop_catalog().save(tmp_path / "catalog")
    return store.put("catalogs", tmp_path / "catalog")


@pytest.fixture
def model(store: ArtifactStore, tmp_path: Path, catalog: str) -> str:
    torch.manual_seed(3)
    shape = GeneratorConfig(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32, level_sizes=(5, 8))
    folder = tmp_path / "model"
    Generator(shape).save_pretrained(folder)
    card = {"model_type": "generator", "catalog": catalog, "tokenizer_digest": "f" * 64, "level_sizes": [5, 8], "max_items": 20}
    (folder / "semantide.json").write_text(json.dumps(card))
    return store.put("models", folder)


@pytest.fixture
def retriever(store: ArtifactStore, tmp_path: Path) -> str:
    torch.manual_seed(4)
    model = Retriever(RetrieverConfig(hidden_size=16, num_layers=1, num_heads=2, max_items=5, time_buckets=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # In another order than the data set's, without its last item, and with one that the data set lacks.
    items = [f"item-{row}" for row in range(NUM_ITEMS - 2, -1, -1)] + ["gone"]
    model.save_pretrained(tmp_path / "retriever", torch.randn(len(items), 16), items)
    (tmp_path / "retriever" / "semantide.json").write_text(json.dumps({"model_type": "retriever", "max_items": 5}))
    return store.put("models", tmp_path / "retriever")
