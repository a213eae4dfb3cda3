"""From a log to a data set, a catalog and negatives: the same bytes from parts of any size, on this process and on Ray, also when workers die."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.services.tokenization.spelling import build
from semantide.shared import executors
from semantide.shared.artifacts import digest_bytes, digest_file
from semantide.shared.dataset import StoredDataset
from semantide.shared.errors import TransientError
from semantide.shared.executors import Executor, LocalExecutor, RayExecutor, Steps
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.negative_sampling import NegativeMix
from semantide.shared.negative_source import NegativeSource, codes_of

ACTIONS = {"exposure": 0.0, "click": 1.0, "like": 2.0}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Events of 90 users in three files; every user walks among items of one kind."""
    folder, rng = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
    files = []
    for number in range(3):
        user = rng.integers(0, 90, 1500)
        table = pa.table({
            "user": [f"u{one}" for one in user], "item": [f"i{one % 6 * 20 + step}" for one, step in zip(user, rng.integers(0, 20, 1500), strict=True)],
            "time": np.sort(rng.integers(0, 10**9, 1500)) + 10**9 * number, "action": rng.choice(sorted(ACTIONS), 1500),
            "page": pa.nulls(1500, pa.string()), "event": [rng.bytes(16) for _ in range(1500)],
        })  # fmt: skip
        pq.write_table(table, folder / f"{number}.parquet")
        files.append([folder / f"{number}.parquet"])
    return files


def digests(log: list[list[Path]], folder: Path, executor: Executor, part_rows: int) -> dict[str, str]:
    """Of everything that comes out."""
    items = pa.Table.from_pylist(
        [{"item": f"i{number}", "title": f"kind {number // 20}", "text": "", "categories": [], "attributes": "{}", "available": True, "deleted": False}
         for number in range(120)],
        schema=ARTIFACT_SCHEMA,
    )  # fmt: skip
    config = DatasetConfig.parse({"min_item_events": 3, "split": "temporal"}, session_gap_seconds=1800)
    write_dataset(log, 4500, items, ACTIONS, config, folder / "dataset", workdir=folder / "steps", executor=executor, part_rows=part_rows)
    spelled = build(StoredDataset(folder / "dataset"), TokenizerConfig(), 0, executor=executor, workdir=folder / "vectors", part_rows=part_rows)
    spelled.save(folder / "catalog")
    found = {f"{path.parent.name}/{path.name}": digest_file(path) for name in ("dataset", "catalog") for path in (folder / name).iterdir()}
    counts = pq.read_table(folder / "dataset" / "items.parquet")["count"].to_numpy()
    codes_NL = codes_of(spelled.catalog.item_ids, spelled.catalog)
    source = NegativeSource(folder / "dataset" / "users.parquet", counts, NegativeMix(popularity=5, prefix=2), codes_NL)
    shards = source.epoch(Steps(executor, folder / "negatives"), 3, 1, part_events=part_rows)
    return {**found, "negatives": digest_bytes(b"".join(shard.tobytes() for shard in shards))}


def test_parts_of_any_size_give_the_same_bytes(log: list[list[Path]], tmp_path: Path) -> None:
    found = [digests(log, tmp_path / str(part_rows), LocalExecutor(), part_rows) for part_rows in (10**6, 700)]
    assert found[0] == found[1] and len(found[0]) == 12


def patiently(address: str, start: Callable[[str], Any] = executors._ray) -> Any:
    """Ray waits half a minute for its own processes, which a busy machine may need several times."""
    for _ in range(9):
        with suppress(TransientError):
            return start(address)
    return start(address)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'semantide[ray]' to test the Ray executor")
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_bytes_of_this_process(log: list[list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    monkeypatch.setattr(executors, "_ray", patiently)
    try:
        spread = digests(log, tmp_path / "ray", RayExecutor(), 1500)
    finally:
        ray.shutdown()
    assert spread == digests(log, tmp_path / "local", LocalExecutor(), 700)
