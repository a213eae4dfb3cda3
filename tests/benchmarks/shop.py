"""What a served shop has: a catalog, generators with random weights, users with histories; real where the data is at hand.

Legend: N items.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from public_data import beauty, read_sequences

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate
from semantide.services.tokenization.spelling import build
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect
from semantide.shared.catalog import Catalog
from semantide.shared.config import Settings
from semantide.shared.contracts import Interaction
from semantide.shared.history import Histories
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.tokenizer import TokenizerConfig

LEVEL_SIZES = (256, 256, 256)
MAX_ITEMS = 666  # of a history: prompts of up to 1,999 tokens
_HYBRID = {"layer_types": ("linear_attention",) * 3 + ("full_attention",), "num_kv_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "64x2": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 128},
    "128x2": {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 256},
    "256x4": {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 768},
    "512x8": {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 1536},
    # Three layers of the gated delta rule to one of softmax, whose states are of 64 x 64 and of 128 x 128 numbers.
    "hybrid-128x4": {
        **_HYBRID,
        "num_layers": 4,
        "hidden_size": 128,
        "num_heads": 2,
        "head_dim": 64,
        "intermediate_size": 384,
        "linear": LinearConfig(2, 2, 64, 64),
    },
    "hybrid-256x4": {
        **_HYBRID,
        "num_layers": 4,
        "hidden_size": 256,
        "num_heads": 2,
        "head_dim": 128,
        "intermediate_size": 768,
        "linear": LinearConfig(2, 2, 128, 128),
    },
}
# Lengths of long histories where MovieLens is not at hand: the deciles of its users, the last one cut.
_LONG_QUANTILES = (18, 27, 37, 51, 70, 96, 126, 173, 253, 400, 666)


@dataclass(frozen=True)
class Shop:
    """Item ids, histories of short and of long visitors, and what was stored of it. ``real`` says whether the histories are."""

    folder: Path
    redis_url: str
    items: tuple[str, ...]
    models: tuple[str, ...]
    short: tuple[tuple[str, ...], ...]
    long: tuple[tuple[str, ...], ...]
    real: bool

    def remember(self, histories: dict[str, tuple[str, ...]], start_ms: int = 1_000) -> None:
        """Store histories of users as ingestion would."""
        broker = connect(self.redis_url)
        store = Histories(broker, MAX_ITEMS + 200, 86_400)
        for user, items in histories.items():
            store.append([Interaction(user=user, item=item, time=start_ms + place, action="click") for place, item in enumerate(items)])
        broker.close()

    def prompt_items(self, tokens: int, seed: int) -> tuple[str, ...]:
        """A history that makes a prompt of about so many tokens: real ones, one after the other."""
        return _chained(self.short, [tokens // len(LEVEL_SIZES)], np.random.default_rng(seed))[0]


def _chained(histories: tuple[tuple[str, ...], ...], lengths: list[int], rng: np.random.Generator) -> tuple[tuple[str, ...], ...]:
    """Histories of the given lengths, put together of whole ones."""
    made = []
    for length in lengths:
        items: list[str] = []
        while len(items) < length:
            items.extend(histories[int(rng.integers(len(histories)))])
        made.append(tuple(items[:length]))
    return tuple(made)


def _long_lengths(data: Path | None, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths of histories with a long tail: MovieLens users'."""
    for path in (data / "ml-1m.seq", data.parent / "movielens" / "ml-1m.seq") if data else ():
        if path.exists():
            real = [len(sequence) for sequence in read_sequences(path)]
            return [min(MAX_ITEMS, length) for length in rng.choice(real, count).tolist()]
    return [int(length) for length in np.interp(rng.random(count), np.linspace(0, 1, len(_LONG_QUANTILES)), _LONG_QUANTILES)]


def _catalog(folder: Path, data: Path | None, iterations: int) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Write the catalog's folder; item ids and histories."""
    folder.mkdir(parents=True)
    if data is not None:
        dataset = beauty(data)
        spelled = build(dataset, TokenizerConfig(level_sizes=LEVEL_SIZES, iterations=iterations), seed=0)
        spelled.save(folder)
        bounds = dataset.offsets.tolist()
        rows = dataset.items.tolist()
        histories = [tuple(dataset.item_ids[row] for row in rows[begin:end]) for begin, end in pairwise(bounds)]
        return spelled.catalog.item_ids, tuple(histories)
    rng = np.random.default_rng(0)
    count = 12_101
    numbers = rng.choice(int(np.prod(LEVEL_SIZES)), count, replace=False)
    catalog = Catalog(tuple(str(row + 1) for row in range(count)), np.stack(np.unravel_index(numbers, LEVEL_SIZES), 1).astype(np.int64), LEVEL_SIZES, "random")
    catalog.save(folder)
    pq.write_table(
        pa.table({"item": list(catalog.item_ids), "title": [""] * count, "categories": [[("red", "blue")[row % 2]] for row in range(count)]}),
        folder / "item_info.parquet",
    )
    lengths = np.clip(rng.lognormal(np.log(6), 0.65, 5_000).astype(int), 3, 200)
    shares = 1.0 / np.arange(30, count + 30) ** 0.8  # the first item has a few thousandths, as in Beauty
    popular = rng.choice(count, int(lengths.sum()), p=shares / shares.sum()) + 1
    pieces = np.split(popular, np.cumsum(lengths)[:-1])
    return catalog.item_ids, tuple(tuple(map(str, piece)) for piece in pieces)


def _model(folder: Path, seed: int, catalog: str, digest: str, shape: dict[str, Any]) -> Generator:
    """A generator with random weights that tell items apart, and the header that training writes."""
    torch.manual_seed(seed)
    generator = Generator(GeneratorConfig(LEVEL_SIZES, initializer_range=0.08, **shape))
    generator.save_pretrained(folder)
    header: dict[str, Any] = {"catalog": catalog, "tokenizer_digest": digest, "level_sizes": list(LEVEL_SIZES), "recipe": "random", "metrics": {}}
    (folder / "semantide.json").write_text(json.dumps({**header, "max_items": MAX_ITEMS}))
    return generator


@contextmanager
def open_shop(folder: Path, shape: str, *, data: Path | None = None, num_models: int = 2, iterations: int = 10) -> Iterator[Shop]:
    """A broker, a store with the catalog and the models, the first of them live."""
    if data is not None and not (data / "beauty.seq").is_file():
        raise SystemExit(f"{data} holds no beauty.seq: give the folder of Amazon Beauty with --data, or leave it out for a synthetic shop")
    with OwnBroker(folder / "broker") as own:
        settings = Settings(data_dir=folder / "data", redis_url=own.url)
        store = ArtifactStore(settings.artifacts_root)
        if data is not None:
            sys.stderr.write("spelling the catalog\n")
        items, short = _catalog(folder / "catalog", data, iterations)
        catalog = store.put("catalogs", folder / "catalog")
        digest = Catalog.load(folder / "catalog").tokenizer_digest
        broker = connect(own.url)
        registry = Registry(broker)
        models = []
        for seed in range(num_models):
            _model(folder / f"model-{seed}", seed, catalog, digest, SHAPES[shape])
            models.append(store.put("models", folder / f"model-{seed}"))
            registry.register(Candidate(model=models[-1], catalog=catalog))
        registry.promote(registry.resolve(models[0], None))
        broker.close()
        rng = np.random.default_rng(1)
        long = _chained(short, _long_lengths(data, 2_000, rng), rng)
        yield Shop(folder, own.url, items, tuple(models), short, long, data is not None)
