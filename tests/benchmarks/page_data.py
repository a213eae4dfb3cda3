"""Logs with pages for benchmarks, made into data sets by the product's own steps: the last page of a user is the test, the last but one the validation.

MovieLens 100K (the original ``u.data`` and ``u.item``, or the same in RecBole's package): what was rated within one second was one page of the site.
KuaiRand-Pure (the processed Parquet files): a page is what a user saw on one day in one tab. The repository's sample of it needs no folder.
The simulator: pages of 5 to 10 slots by a logging policy, with a truth that A/B tests can be measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.services.ingestion.readers import kuairand as kuairand_reader
from semantide.services.ingestion.readers import movielens
from semantide.services.ingestion.schema import INTERACTION_SCHEMA
from semantide.shared.config import Settings
from semantide.shared.simulator.log import Simulation

Log = tuple[pa.Table, pa.Table]
"""Interactions with our columns, and items with those of an items artifact."""


def written(log: Log, folder: Path, actions: Mapping[str, float] | None = None, **config: Any) -> Path:
    """The data set of a log."""
    interactions, items = log
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: interactions[name] if name in interactions.column_names else pa.nulls(len(interactions), field.type)
                      for name, field in zip(INTERACTION_SCHEMA.names, INTERACTION_SCHEMA, strict=True)}).cast(INTERACTION_SCHEMA)  # fmt: skip
    source = folder / "events.parquet"
    pq.write_table(table.append_column("event", pa.array(event_hashes(table), pa.binary())), source)
    made = DatasetConfig.parse({"split": "last-page", **config}, session_gap_seconds=1800)
    strengths = actions or Settings.model_fields["actions"].default
    write_dataset([[source]], len(table), items, strengths, made, folder / "dataset", workdir=folder / "steps")
    return folder / "dataset"


def item_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Items by name, with defaults for what is not said."""
    empty = {"title": "", "text": "", "categories": [], "attributes": "{}", "available": True, "deleted": False, "embedding": None}
    return pa.Table.from_pylist([{**empty, **row} for row in rows], schema=ARTIFACT_SCHEMA)


def movielens_100k(folder: Path) -> Log:
    """Ratings and films."""
    original = folder / "u.data"
    if original.exists():
        ratings, right = movielens.ratings_100k(pa.table({"line": original.read_text().splitlines()}))
        films = [movielens.movie_100k(line) for line in (folder / "u.item").read_text(encoding="latin-1").splitlines()]
        items = [{"id": film["id"], "title": film["title"], "categories": film["categories"]} for film in films if film]
        ratings = ratings.filter(right)
    else:
        lines = (folder / "ml-100k.inter").read_text().splitlines()[1:]
        ratings, _ = movielens.ratings_100k(pa.table({"line": lines}))
        columns = [line.split("\t") for line in (folder / "ml-100k.item").read_text().splitlines()[1:]]
        items = [{"id": id_, "title": f"{title} ({year})", "categories": genres.split()} for id_, title, year, genres in columns]
    times = pa.array(np.asarray(ratings["time"].to_pylist(), dtype=np.int64) * 1000)
    ratings = ratings.set_column(ratings.column_names.index("time"), "time", times)
    return ratings.set_column(ratings.column_names.index("value"), "value", ratings["value"].cast(pa.float64())), _named(items)


def kuairand(folder: Path) -> Log:
    """Two weeks of exposures with their strongest answer, and the videos."""
    table = pa.concat_tables([pq.read_table(folder / f"processed_splits_{part}.parquet") for part in ("val", "test")], promote_options="default")
    log = kuairand_reader.log(table)
    text = [log[name].cast(pa.string()) for name in ("user", "item", "page")]
    log = pa.table({"user": text[0], "item": text[1], "page": text[2], "time": log["time"].cast(pa.int64()), "action": log["action"].cast(pa.string())})
    seen = set(log["item"].to_pylist())
    videos = [kuairand_reader.video(row) for row in pq.read_table(folder / "processed_item_features.parquet").to_pylist()]
    rows = [{name: video[name] for name in ("id", "title", "text", "categories")} for video in videos if video["id"] in seen]
    return log, _named(rows)


def sample(folder: Path) -> Log:
    """The KuaiRand sample of the repository."""
    log = pq.read_table(folder / "interactions.parquet")
    signals = pc.split_pattern(log["signals"].cast(pa.string()), " ")  # as an import takes them
    log = log.set_column(log.column_names.index("signals"), "signals", signals)
    items = pq.read_table(folder / "items.parquet").select(["id", "title", "text", "categories"]).to_pylist()
    return log, _named([{**row, "categories": list(row["categories"])} for row in items])


def simulated(simulation: Simulation) -> Log:
    """What the people of a simulated world have done."""
    return simulation.log(), _named(simulation.items().to_pylist())


def _named(rows: list[dict[str, Any]]) -> pa.Table:
    key = "item" if "item" in ARTIFACT_SCHEMA.names else "id"
    return item_table([{key: row.pop("id"), **row} for row in rows])


SOURCES: dict[str, Callable[[Path], Log]] = {"movielens": movielens_100k, "kuairand": kuairand, "sample": sample}
SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "kuairand"
