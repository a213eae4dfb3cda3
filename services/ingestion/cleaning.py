"""From the raw log to the events that say what a user likes: deleted items out, thin users and items out, repeats in a row folded.

Everything is decided by the events' content, never by the order in which they arrived. Of events in one millisecond the id decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import polars as pl


@dataclass(frozen=True)
class CleaningConfig:
    """What stays. ``max_history`` 0 keeps all; ``deduplicate`` folds the same item again in a row, or any later one."""

    positive_intensity: float = 1.0
    deduplicate: Literal["consecutive", "all", "none"] = "consecutive"
    min_user_events: int = 1
    min_item_events: int = 1
    max_history: int = 0


@dataclass(frozen=True)
class Cleaned:
    """``events``: everything shown and done, with intensities; ``positives``: the histories. Both in order of user, time, event."""

    events: pl.DataFrame
    positives: pl.DataFrame
    dropped: dict[str, int]


def clean(events: pl.DataFrame, deleted: pl.Series, actions: Mapping[str, float], config: CleaningConfig) -> Cleaned:
    """Clean a log with the columns user, item, time, action, page, event."""
    dropped: dict[str, int] = {}

    def kept(frame: pl.DataFrame, reason: str, condition: pl.Expr) -> pl.DataFrame:
        result = frame.filter(condition)
        if result.height < frame.height:
            dropped[reason] = dropped.get(reason, 0) + frame.height - result.height
        return result

    frame = kept(events, "item was deleted", ~pl.col("item").is_in(deleted.implode()))
    frame = frame.with_columns(pl.col("action").replace_strict(dict(actions), default=None, return_dtype=pl.Float64).alias("intensity"))
    frame = kept(frame, "action is no longer configured", pl.col("intensity").is_not_null())
    frame = frame.sort("user", "time", "event")
    positives = frame.filter(pl.col("intensity") >= config.positive_intensity)
    before = positives.height
    if config.deduplicate == "consecutive":
        positives = _folded(positives)
    elif config.deduplicate == "all":
        positives = positives.unique(["user", "item"], keep="first", maintain_order=True)
    if positives.height < before:
        dropped["same item again" + (" in a row" if config.deduplicate == "consecutive" else "")] = before - positives.height
    while True:
        size = positives.height
        positives = kept(positives, f"item has fewer than {config.min_item_events} events", pl.len().over("item") >= config.min_item_events)
        positives = kept(positives, f"user has fewer than {config.min_user_events} events", pl.len().over("user") >= config.min_user_events)
        if positives.height == size:
            break
    if config.max_history:
        positives = kept(positives, f"older than the last {config.max_history} of the user", pl.int_range(pl.len()).reverse().over("user") < config.max_history)
    return Cleaned(frame, positives, dropped)


def _folded(positives: pl.DataFrame) -> pl.DataFrame:
    """One event for the same item several times in a row: its first moment, its strongest action."""
    changed = (pl.col("user") != pl.col("user").shift(1)) | (pl.col("item") != pl.col("item").shift(1))
    return (
        positives.with_columns(changed.fill_null(True).cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("user", "item", "time", "page", "event").first(),
            pl.col("action").sort_by("intensity", "action").last(),
            pl.col("intensity").max(),
        )
        .drop("run")
    )
