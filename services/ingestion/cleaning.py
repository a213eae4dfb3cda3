"""From the raw log to the events that say what a user likes: deleted items out, thin users and items out, repeats in a row folded.

Everything is decided by the events' content, never by the order in which they arrived. Of events in one millisecond the id decides.
All of a user's events are cleaned together; other users matter only through how many events an item has.
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

    @property
    def thins(self) -> bool:
        """Whether users or items with few events go."""
        return self.min_user_events > 1 or self.min_item_events > 1


@dataclass(frozen=True)
class Cleaned:
    """``events``: everything shown and done, with intensities; ``positives``: the histories. Both in order of user, time, event."""

    events: pl.DataFrame
    positives: pl.DataFrame
    dropped: dict[str, int]


def clean(events: pl.DataFrame, deleted: pl.Series, actions: Mapping[str, float], config: CleaningConfig) -> Cleaned:
    """Clean a log with the columns user, item, time, action, page, event, but for what is too thin and what is too old."""
    dropped: dict[str, int] = {}

    def kept(frame: pl.DataFrame, reason: str, condition: pl.Expr) -> pl.DataFrame:
        result, lost = _kept(frame, reason, condition)
        dropped.update(lost)
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
    return Cleaned(frame, positives, dropped)


def thinned(positives: pl.DataFrame, scarce: pl.Series, config: CleaningConfig) -> tuple[pl.DataFrame, dict[str, int]]:
    """Without the ``scarce`` items, and then without users who have too few events; to be repeated until nothing goes."""
    left, items = _kept(positives, f"item has fewer than {config.min_item_events} events", ~pl.col("item").is_in(scarce.implode()))
    left, users = _kept(left, f"user has fewer than {config.min_user_events} events", pl.len().over("user") >= config.min_user_events)
    return left, {**items, **users}


def latest(positives: pl.DataFrame, config: CleaningConfig) -> tuple[pl.DataFrame, dict[str, int]]:
    """The last ``max_history`` events of each user."""
    reason = f"older than the last {config.max_history} of the user"
    return _kept(positives, reason, pl.int_range(pl.len()).reverse().over("user") < config.max_history)


def _kept(frame: pl.DataFrame, reason: str, condition: pl.Expr) -> tuple[pl.DataFrame, dict[str, int]]:
    result = frame.filter(condition)
    lost = frame.height - result.height
    return result, {reason: lost} if lost else {}


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
