"""A data set from the log: cleaned histories, pages, items and a split, written in the format of ``shared/dataset.py``.

The same events and items give the same bytes, whatever segments, files or order they came in.
Legend: U users, E events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.ingestion.cleaning import CleaningConfig, clean
from semantide.services.ingestion.pages import pages
from semantide.services.ingestion.splits import SplitConfig, split
from semantide.shared.errors import BadData

_ROW_GROUP = 100_000


@dataclass(frozen=True)
class DatasetConfig:
    """How a data set is made.

    ``keep_cold_items`` keeps items that are described but have too few events: they can be recommended by their content.
    Units: ``valid_time``, ``test_time`` milliseconds since 1970 (0: by fraction); ``session_gap_seconds`` seconds.
    """

    split: Literal["leave-one-out", "temporal"] = "leave-one-out"
    valid_fraction: float = 0.1
    test_fraction: float = 0.1
    valid_time: int = 0
    test_time: int = 0
    positive_intensity: float = 1.0
    deduplicate: Literal["consecutive", "all", "none"] = "consecutive"
    min_user_events: int = 1
    min_item_events: int = 1
    max_history: int = 0
    session_gap_seconds: int = 1800
    keep_cold_items: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], *, session_gap_seconds: int) -> DatasetConfig:
        """Check a job's configuration.

        Raises: ValueError naming what is wrong.
        """
        known = {entry.name for entry in fields(cls)}
        for name, value in config.items():
            if name not in known:
                raise ValueError(f"a data set has no option {name!r}: use some of {', '.join(sorted(known))}")
            default = getattr(cls, name)
            fits = (
                isinstance(value, bool)
                if isinstance(default, bool)
                else isinstance(value, str)
                if isinstance(default, str)
                else isinstance(value, (int, float))
            )
            if not fits or (isinstance(value, bool) and not isinstance(default, bool)):
                raise ValueError(f"{name} is {value!r}: it is a {type(default).__name__}, such as {default!r}")
        made = cls(**{"session_gap_seconds": session_gap_seconds, **config})
        if made.split not in ("leave-one-out", "temporal"):
            raise ValueError(f"split is {made.split!r}: use leave-one-out or temporal")
        if made.deduplicate not in ("consecutive", "all", "none"):
            raise ValueError(f"deduplicate is {made.deduplicate!r}: use consecutive, all or none")
        if not (made.valid_fraction >= 0 and made.test_fraction > 0 and made.valid_fraction + made.test_fraction < 1):
            raise ValueError(
                f"valid_fraction {made.valid_fraction} and test_fraction {made.test_fraction} leave nothing to train on: together they stay below 1"
            )
        for name in ("min_user_events", "min_item_events", "session_gap_seconds"):
            if getattr(made, name) < 1:
                raise ValueError(f"{name} is {getattr(made, name)}: it is at least 1")
        if made.max_history < 0:
            raise ValueError(f"max_history is {made.max_history}: it is the number of events to keep, or 0 for all")
        return made

    @property
    def cleaning(self) -> CleaningConfig:
        """The part that concerns cleaning."""
        return CleaningConfig(self.positive_intensity, self.deduplicate, self.min_user_events, self.min_item_events, self.max_history)

    @property
    def splitting(self) -> SplitConfig:
        """The part that concerns the split."""
        return SplitConfig(self.split, self.valid_fraction, self.test_fraction, self.valid_time, self.test_time)


def write_dataset(events: pl.DataFrame, items: pa.Table, actions: Mapping[str, float], config: DatasetConfig, folder: Path) -> dict[str, Any]:
    """Write the four files and return the header.

    ``events`` has the columns user, item, time, action, page, event; ``items`` those of an ``items`` artifact.
    Raises: BadData where no positive event is left.
    """
    deleted_mask = np.asarray(items["deleted"].to_numpy(), dtype=np.bool_)
    deleted = pl.Series("item", items["item"].filter(pa.array(deleted_mask)).to_pylist(), dtype=pl.String)
    alive = items.filter(pa.array(~deleted_mask)).combine_chunks()
    cleaned = clean(events, deleted, actions, config.cleaning)
    positives = cleaned.positives
    if positives.height == 0:
        reasons = "; ".join(f"{count} events: {reason}" for reason, count in cleaned.dropped.items()) or f"the log holds {events.height} events"
        raise BadData(
            f"no event of intensity {config.positive_intensity} or more is left for a data set ({reasons}): import interactions, or relax the conditions"
        )

    described = pl.Series("item", alive["item"].to_pylist(), dtype=pl.String)
    used = positives["item"].unique()
    names = (pl.concat([used, described]) if config.keep_cold_items else used).unique().sort()
    row_of = pl.DataFrame({"item": names, "row": pl.Series(range(len(names)), dtype=pl.Int32)})
    histories = positives.join(row_of, on="item", how="left", maintain_order="left")
    users = histories.group_by("user", maintain_order=True).agg(pl.col("row").alias("items"), pl.col("time").alias("times"), pl.col("action").alias("actions"))
    lengths = users["items"].list.len().to_numpy().astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    times = histories["time"].to_numpy()
    rows = histories["row"].to_numpy()
    parts = split(times, offsets, config.splitting)

    within = np.arange(len(rows)) - np.repeat(offsets[:-1], lengths)
    counts = np.bincount(rows[within < np.repeat(parts.train_end, lengths)], minlength=len(names))

    def time_at(ends: np.ndarray[Any, np.dtype[np.int32]]) -> pl.Series:
        inside = ends < lengths
        return pl.Series([int(times[offset + end]) if there else None for offset, end, there in zip(offsets[:-1], ends, inside, strict=True)], dtype=pl.Int64)

    user_row = pl.Series(range(users.height), dtype=pl.Int32)
    cuts = pl.DataFrame({"user": users["user"], "user_row": user_row, "valid_time": time_at(parts.train_end), "test_time": time_at(parts.valid_end)})
    seen = cleaned.events.join(row_of, on="item", how="inner", maintain_order="left").join(
        cuts.select("user", "user_row"), on="user", how="inner", maintain_order="left"
    )
    shown = pages(
        seen.select(pl.col("user_row").alias("user"), pl.col("row").alias("item"), "time", "action", "page", "intensity"),
        cuts.select(pl.col("user_row").alias("user"), "valid_time", "test_time"),
        session_gap_ms=config.session_gap_seconds * 1000,
    )

    folder.mkdir(parents=True, exist_ok=True)
    _write(
        pa.table(
            {
                "user": pa.array(users["user"].to_list(), pa.string()),
                "items": pa.array(users["items"].to_arrow()).cast(pa.list_(pa.int32())),
                "times": pa.array(users["times"].to_arrow()).cast(pa.list_(pa.int64())),
                "actions": pa.array(users["actions"].to_arrow()).cast(pa.list_(pa.string())),
                "train_end": pa.array(parts.train_end, pa.int32()),
                "valid_end": pa.array(parts.valid_end, pa.int32()),
            }
        ),
        folder / "users.parquet",
    )
    _write(_item_table(names, counts, alive), folder / "items.parquet")
    _write(
        pa.table(
            {
                "user": shown["user"].to_arrow().cast(pa.int32()),
                "time": shown["time"].to_arrow().cast(pa.int64()),
                "items": shown["items"].to_arrow().cast(pa.list_(pa.int32())),
                "actions": shown["actions"].to_arrow().cast(pa.list_(pa.string())),
            }
        ),
        folder / "pages.parquet",
    )
    header = {
        "config": {**asdict(config), "actions": dict(sorted(actions.items()))},
        "counts": {
            "users": users.height,
            "items": len(names),
            "cold_items": int((counts == 0).sum()),
            "events": len(rows),
            "train_events": int(parts.train_end.sum()),
            "valid_events": int((parts.valid_end - parts.train_end).sum()),
            "test_events": int((lengths - parts.valid_end).sum()),
            "pages": shown.height,
            "log_events": events.height,
            "longest_history": int(lengths.max()),
        },
        "dropped": dict(sorted(cleaned.dropped.items())),
        "valid_time": parts.valid_time,
        "test_time": parts.test_time,
        "pages": "a page is in the training part where its time is before the user's times[train_end]; pages are cut at the ends of the parts",
    }
    (folder / "dataset.json").write_text(json.dumps(header, indent=1, sort_keys=True) + "\n")
    return header


def _item_table(names: pl.Series, counts: np.ndarray[Any, np.dtype[np.int64]], alive: pa.Table) -> pa.Table:
    row_of = {item: row for row, item in enumerate(alive["item"].to_pylist())}
    rows = pa.array([row_of.get(name) for name in names], pa.int64())
    found = alive.take(rows)

    def filled(name: str, default: Any) -> pa.Array:
        column = found[name].combine_chunks()
        missing = rows.is_null()
        if not missing.true_count:
            return column
        if pa.types.is_list(column.type):
            return pa.array([default if value is None else value for value in column.to_pylist()], column.type)
        return column.fill_null(default)

    embedding = found["embedding"].combine_chunks()
    return pa.table(
        {
            "item": pa.array(names.to_list(), pa.string()),
            "count": pa.array(counts, pa.int64()),
            "title": filled("title", ""),
            "text": filled("text", ""),
            "categories": filled("categories", []),
            "attributes": filled("attributes", "{}"),
            "available": filled("available", True),
            "embedding": embedding,
        }
    )


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table.combine_chunks(), path, compression="zstd", row_group_size=_ROW_GROUP)
