"""From the raw log to the events that say what a user likes: deleted items out, thin users and items out, repeats in a row folded.

Everything is decided by the events' content, never by the order in which they arrived. Of events in one millisecond the id decides.
All of a user's events are cleaned together; other users matter only through how many events an item has. Users and items are numbers in the
order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from semantide.services.ingestion.signals import Signals

IntArray = npt.NDArray[np.int64]


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
    """``events``: everything shown and done; ``positives``: the histories. Both in order of user, time, event."""

    events: pl.DataFrame
    positives: pl.DataFrame
    dropped: dict[str, int]


def clean(events: pl.DataFrame, deleted: pl.Series, signals: Signals, config: CleaningConfig) -> Cleaned:
    """Clean a log with the columns user, item, time, action, event and perhaps others, but for what is too thin and what is too old.

    ``action`` is a number of ``signals``, -1 for one that is not configured; ``event`` is not needed any more in what comes out.
    """
    dropped: dict[str, int] = {}

    def kept(frame: pl.DataFrame, reason: str, condition: pl.Expr) -> pl.DataFrame:
        result, lost = _kept(frame, reason, condition)
        dropped.update(lost)
        return result

    frame = kept(events, "item was deleted", ~pl.col("item").is_in(deleted.implode())) if len(deleted) else events
    frame = kept(frame, "action is no longer configured", pl.col("action") >= 0)
    frame = frame.drop("event")[_order(frame)]
    likes = signals.intensity(frame["action"].to_numpy()) >= config.positive_intensity
    positives = frame.select("user", "item", "time", "action", "page", "tab").filter(pl.Series(likes))
    before = positives.height
    if config.deduplicate == "consecutive":
        positives = _folded(positives, signals)
    elif config.deduplicate == "all":
        positives = positives.unique(["user", "item"], keep="first", maintain_order=True)
    if positives.height < before:
        dropped["same item again" + (" in a row" if config.deduplicate == "consecutive" else "")] = before - positives.height
    return Cleaned(frame, positives, dropped)


def thinned(positives: pl.DataFrame, scarce: pl.Series, config: CleaningConfig) -> tuple[pl.DataFrame, dict[str, int]]:
    """Without the ``scarce`` items, and then without users who have too few events; to be repeated until nothing goes."""
    left, items = _kept(positives, f"item has fewer than {config.min_item_events} events", ~pl.col("item").is_in(scarce.implode()))
    num_events = np.bincount(left["user"].to_numpy())
    enough = (num_events >= config.min_user_events)[left["user"].to_numpy()] if left.height else np.zeros(0, bool)
    left, users = _kept(left, f"user has fewer than {config.min_user_events} events", pl.lit(pl.Series(enough)))
    return left, {**items, **users}


def latest(positives: pl.DataFrame, config: CleaningConfig) -> tuple[pl.DataFrame, dict[str, int]]:
    """The last ``max_history`` events of each user."""
    reason = f"older than the last {config.max_history} of the user"
    return _kept(positives, reason, pl.int_range(pl.len()).reverse().over("user") < config.max_history)


def _kept(frame: pl.DataFrame, reason: str, condition: pl.Expr) -> tuple[pl.DataFrame, dict[str, int]]:
    result = frame.filter(condition)
    lost = frame.height - result.height
    return result, {reason: lost} if lost else {}


def _order(frame: pl.DataFrame) -> IntArray:
    """The rows by user, time and event."""
    user, time = frame["user"].to_numpy().astype(np.int64), frame["time"].to_numpy()
    if not len(user):
        return np.zeros(0, np.int64)
    first, span = int(time.min()), int(time.max()) - int(time.min()) + 1
    if (int(user.max()) + 1) * span < 1 << 63:
        key = user * span + (time - first)
        order = np.argsort(key)
    else:
        _, key = np.unique(time, return_inverse=True)
        key = user * len(user) + key
        order = np.argsort(key)
    # Few events share a user and a millisecond: only among them is the id, a text of bytes, looked at.
    same = key[order[1:]] == key[order[:-1]]
    if same.any():
        places = np.flatnonzero(np.append(same, False) | np.append(False, same))
        rows = order[places]
        tied = pl.DataFrame({"key": key[rows], "event": frame["event"][rows], "row": rows}).sort("key", "event")
        order[places] = tied["row"].to_numpy()
    return order


def _folded(positives: pl.DataFrame, signals: Signals) -> pl.DataFrame:
    """One event for the same item several times in a row: its first moment, its strongest action."""
    user, item = positives["user"].to_numpy(), positives["item"].to_numpy()
    starts = np.flatnonzero(np.append(True, (user[1:] != user[:-1]) | (item[1:] != item[:-1]))[: len(user)])
    strongest = signals.strongest(positives["action"].to_numpy(), starts)
    return positives[starts].with_columns(pl.Series("action", strongest))
