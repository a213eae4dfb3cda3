"""The steps of making a data set, each a pure function over the Arrow tables of one part: a stretch of users in the order of their names.

Every count, order and cut comes out as if all events were one part. Legend: U users of the part, E their positive events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from semantide.services.ingestion.cleaning import CleaningConfig, clean, latest, thinned
from semantide.services.ingestion.pages import pages
from semantide.services.ingestion.splits import SplitConfig, split
from semantide.shared.executors import Output

COLUMNS = ("user", "item", "time", "action", "page", "event")
SAMPLED_USERS = 20_000
BUCKETS = 1 << 16
FIGURES = ("users", "events", "train_events", "valid_events", "test_events", "pages", "longest_history")


def survey(events: pa.Table) -> dict[str, Output]:
    """How many events users have: of all of them, or of a sample where they are many."""
    counts = _frame(events.select(["user"])).group_by("user").len("count")
    if counts.height > SAMPLED_USERS:
        counts = counts.filter(pl.col("user").hash(seed=0) % (counts.height // SAMPLED_USERS + 1) == 0)
    return {"users": _table(counts.sort("user"))}


def bounds(surveys: Sequence[pa.Table], num_parts: int) -> list[str]:
    """First users of the second and later parts, so that all have about as many events; fewer where there are few users."""
    counts = _frame(pa.concat_tables(surveys)).group_by("user").agg(pl.col("count").sum()).sort("user")
    before = counts["count"].cum_sum() - counts["count"]
    part = (before * num_parts // max(int(counts["count"].sum()), 1)).alias("part")
    firsts = counts.with_columns(part).group_by("part", maintain_order=True).first()["user"]
    return [str(user) for user in firsts[1:]]


def scatter(events: pa.Table, bounds: Sequence[str]) -> dict[str, Output]:
    """The events by part, one record batch for each."""
    frame = _frame(events.select(list(COLUMNS)))
    part = pl.Series("part", np.zeros(frame.height, np.int64))
    for bound in bounds:
        part += (frame["user"] >= bound).cast(pl.Int64)
    by_part = frame.with_columns(part)
    return {"events": [_batch(by_part.filter(pl.col("part") == number).drop("part")) for number in range(len(bounds) + 1)]}


def clean_part(events: pa.Table, deleted: pa.Table, actions: Mapping[str, float], config: CleaningConfig) -> dict[str, Output]:
    """See ``cleaning.clean``."""
    cleaned = clean(_frame(events), _series(deleted, "item"), actions, config)
    return {"events": _table(cleaned.events), **_positives(cleaned.positives, cleaned.dropped)}


def thin_part(positives: pa.Table, scarce: pa.Table, config: CleaningConfig) -> dict[str, Output]:
    """See ``cleaning.thinned``."""
    return _positives(*thinned(_frame(positives), _series(scarce, "item"), config))


def latest_part(positives: pa.Table, config: CleaningConfig) -> dict[str, Output]:
    """See ``cleaning.latest``."""
    return _positives(*latest(_frame(positives), config))


def times_of(positives: pa.Table, low: int, width: int) -> dict[str, Output]:
    """How many events lie in each stretch of ``width`` milliseconds from ``low`` on."""
    place = (positives["time"].to_numpy() - low) // width
    inside = place[(place >= 0) & (place < BUCKETS)]
    return {"counts": pa.table({"count": np.bincount(inside, minlength=BUCKETS).astype(np.int64)})}


def finish(events: pa.Table, positives: pa.Table, rows: pa.Table, splitting: SplitConfig, session_gap_seconds: int) -> dict[str, Output]:
    """Histories, pages and counts of a part; users are numbered within it. ``rows`` gives items their rows."""
    row_of = _frame(rows)
    histories = _frame(positives).join(row_of, on="item", how="left", maintain_order="left")
    users = histories.group_by("user", maintain_order=True).agg(pl.col("row").alias("items"), pl.col("time").alias("times"), pl.col("action").alias("actions"))
    lengths = users["items"].list.len().to_numpy().astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    times, item_rows = histories["time"].to_numpy(), histories["row"].to_numpy()
    parts = split(times, offsets, splitting)
    within = np.arange(len(item_rows)) - np.repeat(offsets[:-1], lengths)
    trained = item_rows[within < np.repeat(parts.train_end, lengths)]
    counted, counts = np.unique(trained, return_counts=True)

    def time_at(ends: npt.NDArray[np.int32]) -> pl.Series:
        inside = ends < lengths
        return pl.Series([int(times[offset + end]) if there else None for offset, end, there in zip(offsets[:-1], ends, inside, strict=True)], dtype=pl.Int64)

    user_row = pl.Series(range(users.height), dtype=pl.Int32)
    cuts = pl.DataFrame({"user": users["user"], "row": user_row, "valid_time": time_at(parts.train_end), "test_time": time_at(parts.valid_end)})
    named = cuts.select("user", pl.col("row").alias("user_row"))
    seen = _frame(events).join(row_of, on="item", how="inner", maintain_order="left").join(named, on="user", how="inner", maintain_order="left")
    shown = pages(
        seen.select(pl.col("user_row").alias("user"), pl.col("row").alias("item"), "time", "action", "page", "intensity"),
        cuts.select(pl.col("row").alias("user"), "valid_time", "test_time"),
        session_gap_ms=session_gap_seconds * 1000,
    )
    figures = (
        users.height, len(item_rows), int(parts.train_end.sum()), int((parts.valid_end - parts.train_end).sum()), int((lengths - parts.valid_end).sum()),
        shown.height, int(lengths.max(initial=0)),
    )  # fmt: skip
    return {
        "users": pa.table(
            {
                "user": pa.array(users["user"].to_list(), pa.string()),
                "items": users["items"].to_arrow().cast(pa.list_(pa.int32())),
                "times": users["times"].to_arrow().cast(pa.list_(pa.int64())),
                "actions": users["actions"].to_arrow().cast(pa.list_(pa.string())),
                "train_end": pa.array(parts.train_end, pa.int32()),
                "valid_end": pa.array(parts.valid_end, pa.int32()),
            }
        ),
        "pages": pa.table(
            {
                "user": shown["user"].to_arrow().cast(pa.int32()),
                "time": shown["time"].to_arrow().cast(pa.int64()),
                "items": shown["items"].to_arrow().cast(pa.list_(pa.int32())),
                "actions": shown["actions"].to_arrow().cast(pa.list_(pa.string())),
            }
        ),
        "counts": pa.table({"row": pa.array(counted, pa.int32()), "count": pa.array(counts, pa.int64())}),
        "figures": pa.table({name: pa.array([value], pa.int64()) for name, value in zip(FIGURES, figures, strict=True)}),
    }


def _positives(positives: pl.DataFrame, dropped: Mapping[str, int]) -> dict[str, Output]:
    """Histories, how many events each item has in them, and what went."""
    return {
        "positives": _table(positives),
        "items": _table(positives.group_by("item").len("count").sort("item").cast({"count": pl.Int64})),
        "dropped": pa.table({"reason": pa.array(list(dropped), pa.string()), "count": pa.array(list(dropped.values()), pa.int64())}),
    }


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _series(table: pa.Table, name: str) -> pl.Series:
    return _frame(table)[name].cast(pl.String)


def _table(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow()


def _batch(frame: pl.DataFrame) -> pa.RecordBatch:
    table = frame.to_arrow().combine_chunks()
    batches: list[Any] = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
