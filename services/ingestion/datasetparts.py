"""The steps of making a data set, each a pure function over the Arrow tables of one part: a stretch of users in the order of their names.

Every count, order and cut comes out as if all events were one part. From ``scatter`` on items and actions are numbers in the order of all names; from
``clean_part`` on users are, in the order of their part's names. Legend: U users of the part, E their positive events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.cleaning import CleaningConfig, clean, latest, thinned
from semantide.services.ingestion.eventlog import SEGMENT_SCHEMA
from semantide.services.ingestion.exposures import Exposures, Told, exposures
from semantide.services.ingestion.pages import Shown, group_begins, group_times, page_numbers
from semantide.services.ingestion.schema import completed
from semantide.services.ingestion.signals import Signals
from semantide.services.ingestion.splits import SplitConfig, split
from semantide.shared.executors import Output
from semantide.shared.page_report import PageCounts
from semantide.shared.pages import answers

COLUMNS = ("user", "item", "time", "action", "page", "event", "value", "tab", "position", "propensity", "signals")
SAMPLED_USERS = 20_000
BUCKETS = 1 << 16
FIGURES = ("users", "events", "train_events", "valid_events", "test_events", "pages", "exposures", "longest_history")
LOGGED = pa.schema([SEGMENT_SCHEMA.field(name) for name in COLUMNS])
_NEVER = np.iinfo(np.int64).max


def survey(events: pa.Table) -> dict[str, Output]:
    """How many events users have, of all of them or of a sample where they are many; and which items there are."""
    counts = _frame(events.select(["user"])).group_by("user").len("count")
    if counts.height > SAMPLED_USERS:
        counts = counts.filter(pl.col("user").hash(seed=0) % (counts.height // SAMPLED_USERS + 1) == 0)
    return {"users": _table(counts.sort("user")), "items": pa.table({"item": events["item"].unique()})}


def bounds(surveys: Sequence[pa.Table], num_parts: int) -> list[str]:
    """First users of the second and later parts, so that all have about as many events; fewer where there are few users."""
    counts = _frame(pa.concat_tables(surveys)).group_by("user").agg(pl.col("count").sum()).sort("user")
    before = counts["count"].cum_sum() - counts["count"]
    part = (before * num_parts // max(int(counts["count"].sum()), 1)).alias("part")
    firsts = counts.with_columns(part).group_by("part", maintain_order=True).first()["user"]
    return [str(user) for user in firsts[1:]]


def scatter(events: pa.Table, names: pa.Table, bounds: Sequence[str], signals: Signals) -> dict[str, Output]:
    """The events by part, one record batch for each; ``names`` are all items in order."""
    events = completed(events, LOGGED)
    item = pc.index_in(events["item"], value_set=names["item"].combine_chunks().cast(events["item"].type))
    action = signals.numbers(events["action"])
    numbered = pa.table(
        {
            "user": events["user"],
            "item": item.cast(pa.int32()),
            "time": events["time"],
            "action": action,
            "page": events["page"],
            "event": events["event"],
            "value": _filled(events["value"], np.nan, pa.float32()),
            "tab": events["tab"],
            "position": _filled(events["position"], -1, pa.int32()),
            "propensity": _filled(events["propensity"], np.nan, pa.float32()),
            "signals": signals.sets(action, events["signals"]),
        }
    )
    users = events["user"].combine_chunks().dictionary_encode()
    part_of_user = pl.Series(bounds, dtype=pl.String).search_sorted(pl.Series(users.dictionary), side="right").to_numpy()
    part = part_of_user[users.indices.to_numpy()].astype(np.uint16)
    order = np.argsort(part, kind="stable")
    ends = np.cumsum(np.bincount(part, minlength=len(bounds) + 1))
    by_part = numbered.take(pa.array(order)).combine_chunks()
    return {"events": [_batch(by_part.slice(end - length, length)) for end, length in zip(ends, np.diff(ends, prepend=0), strict=True)]}


def clean_part(events: pa.Table, deleted: pa.Table, signals: Signals, config: CleaningConfig) -> dict[str, Output]:
    """See ``cleaning.clean``; the users' names come out too."""
    users = events["user"].combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(users.dictionary)
    number = np.empty(len(order), np.int32)
    number[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    user = number[users.indices.to_numpy()]
    page = events["page"].combine_chunks().dictionary_encode().indices.fill_null(-1).cast(pa.int32())
    tab = events["tab"].combine_chunks().dictionary_encode()
    tab_order = pc.array_sort_indices(tab.dictionary)
    tab_number = np.full(len(tab_order) + 1, -1, np.int32)
    tab_number[tab_order.to_numpy()] = np.arange(len(tab_order), dtype=np.int32)
    tabs = tab_number[tab.indices.fill_null(-1).to_numpy()]
    frame = _frame(events.drop_columns(["user", "page", "tab"])).with_columns(user=pl.Series(user), page=pl.Series(page.to_numpy()), tab=pl.Series(tabs))
    cleaned = clean(frame, _frame(deleted)["item"], signals, config)
    return {
        "events": _table(cleaned.events),
        "users": pa.table({"user": users.dictionary.take(order).cast(pa.string())}),
        "tabs": pa.table({"tab": tab.dictionary.take(tab_order).cast(pa.string())}),
        **_positives(cleaned.positives, cleaned.dropped),
    }


def thin_part(positives: pa.Table, scarce: pa.Table, config: CleaningConfig) -> dict[str, Output]:
    """See ``cleaning.thinned``."""
    return _positives(*thinned(_frame(positives), _frame(scarce)["item"], config))


def keep_part(positives: pa.Table, thin: pa.Table, gone: pa.Table, config: CleaningConfig) -> dict[str, Output]:
    """The events of the users who are left in ``thin``, without the items that are ``gone``; then see ``cleaning.latest``."""
    users = np.unique(thin["user"].to_numpy())
    frame = _frame(positives).filter(pl.col("user").is_in(pl.Series(users).implode()) & ~pl.col("item").is_in(_frame(gone)["item"].implode()))
    return _positives(*(latest(frame, config) if config.max_history else (frame, {})))


def times_of(positives: pa.Table, low: int, width: int) -> dict[str, Output]:
    """How many events lie in each stretch of ``width`` milliseconds from ``low`` on."""
    place = (positives["time"].to_numpy() - low) // width
    inside = place[(place >= 0) & (place < BUCKETS)]
    return {"counts": pa.table({"count": np.bincount(inside, minlength=BUCKETS).astype(np.int64)})}


def finish(
    events: pa.Table, positives: pa.Table, users: pa.Table, tabs: pa.Table, rows: pa.Table, splitting: SplitConfig, session_gap_seconds: int, signals: Signals
) -> dict[str, Output]:
    """Histories, pages, exposures and counts of a part; users are numbered anew within it. ``rows`` gives items their rows, -1 where they have none.

    An exposure is of one part with all that was done, see ``_parts``: what is held out stands nowhere in training as shown and not taken.
    """
    row_of = rows["row"].to_numpy()
    number, times = positives["user"].to_numpy(), positives["time"].to_numpy()
    item_rows = row_of[positives["item"].to_numpy()]
    present, starts = np.unique(number, return_index=True)
    offsets = np.append(starts, len(number)).astype(np.int64)
    lengths = np.diff(offsets)

    seen_row = row_of[events["item"].to_numpy()]
    known = seen_row >= 0
    shown = Shown(*(seen_row[known] if name == "item" else events[name].to_numpy()[known] for name in ("user", "item", "time", "page", "tab")))
    told = Told(shown.item, shown.time, *(events[name].to_numpy()[known] for name in ("action", "position", "propensity", "value", "signals")))
    found = exposures(told, page_numbers(shown, session_gap_seconds * 1000), signals)

    # When the stretch that each event stands for began: that of its page, where pages are held out.
    begins = group_times(shown, group_begins(shown, found.first, found.page), number, times) if splitting.split == "last-page" else times
    parts = split(times, offsets, splitting, begins)
    within = np.arange(len(item_rows)) - np.repeat(offsets[:-1], lengths)
    counts = np.bincount(item_rows[within < np.repeat(parts.train_end, lengths)], minlength=len(row_of))
    counted = np.flatnonzero(counts)

    def time_at(ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        inside = ends < lengths
        return np.where(inside, begins[np.where(inside, offsets[:-1] + ends, 0)] if len(times) else 0, _NEVER)

    # Those who never liked anything have no row among the users, and what they were shown tells as much as what others were.
    ends = np.full((2, users.num_rows), _NEVER)
    if splitting.split == "temporal":
        # Everybody's parts end at the same two times: a part that began with what its user liked would have other rates, and would tell of later times.
        ends[:] = [[splitting.valid_time], [splitting.test_time]]
    else:
        ends[:, present] = time_at(parts.train_end), time_at(parts.valid_end)
    user = shown.user[found.first]
    part = _parts(shown, found, ends[:, user], splitting)

    row_of_user = np.full(users.num_rows, -1, np.int32)
    row_of_user[present] = np.arange(len(present), dtype=np.int32)
    pages, page_counts = _pages(shown, found, row_of_user[user], part, signals)
    figures = (
        len(present), len(item_rows), int(parts.train_end.sum()), int((parts.valid_end - parts.train_end).sum()), int((lengths - parts.valid_end).sum()),
        pages.num_rows, len(part), int(lengths.max(initial=0)),
    )  # fmt: skip
    return {
        "users": pa.table(
            {
                "user": users["user"].combine_chunks().take(pa.array(present)),
                "items": _lists(offsets, item_rows),
                "times": _lists(offsets, times),
                "actions": _lists(offsets, signals.words(positives["action"].to_numpy())),
                "train_end": pa.array(parts.train_end, pa.int32()),
                "valid_end": pa.array(parts.valid_end, pa.int32()),
            }
        ),
        "pages": pages,
        "feedback": _feedback(shown, found, row_of_user[user], part, tabs, signals),
        "counts": pa.table({"row": pa.array(counted, pa.int32()), "count": pa.array(counts[counted], pa.int64())}),
        "page_counts": pa.table({"count": page_counts.flat()}),
        "figures": pa.table({name: pa.array([value], pa.int64()) for name, value in zip(FIGURES, figures, strict=True)}),
    }


def _parts(shown: Shown, found: Exposures, ends: npt.NDArray[np.int64], splitting: SplitConfig) -> npt.NDArray[np.int8]:
    """The part of each exposure: that of its latest event, of a split by pages that of its page's latest. ``ends`` [2, X] are the times from which on its user validates and tests.

    A temporal split's later parts have what was shown in their time, whenever it was answered: with what was only answered then their rates would be too high. What was shown in
    training's time and has an event after it is of no part, -1.
    """
    first, last = found.first, found.last
    if splitting.split == "last-page" and len(last):
        last = np.maximum.reduceat(last, np.flatnonzero(np.append(True, np.diff(found.page) != 0)))[found.page]
    begun: npt.NDArray[np.int8]
    done: npt.NDArray[np.int8]
    begun, done = ((shown.time[event] >= ends).sum(0).astype(np.int8) for event in (first, last))
    if splitting.split == "temporal":
        begun[(begun == 0) & (done > 0)] = -1
        return begun
    return done


def _pages(shown: Shown, found: Exposures, rows: npt.NDArray[np.int32], part: npt.NDArray[np.int8], signals: Signals) -> tuple[pa.Table, PageCounts]:
    """The pages of those who have a row among the users, and what they are like."""
    mine = rows >= 0
    first, action = found.first[mine], found.action[mine]
    begins = np.flatnonzero(np.append(True, np.diff(found.page[mine]) != 0))[: len(first)]
    offsets = np.append(begins, len(first)).astype(np.int32)
    table = {
        "user": rows[mine][begins],
        "time": shown.time[first[begins]],
        "items": _lists(offsets, shown.item[first]),
        "actions": _lists(offsets, signals.words(action)),
        "parts": _lists(offsets, part[mine]),
    }
    return pa.table(table), PageCounts.of(offsets, answers(signals.intensity(action)), found.position[mine])


def _feedback(shown: Shown, found: Exposures, rows: npt.NDArray[np.int32], part: npt.NDArray[np.int8], tabs: pa.Table, signals: Signals) -> pa.Table:
    """Every exposure of an item that has a row."""
    tab = shown.tab[found.first]
    return pa.table(
        {
            "user": rows,
            "item": shown.item[found.first],
            "time": shown.time[found.first],
            "page": found.page,
            "tab": pa.DictionaryArray.from_arrays(pa.array(tab, mask=tab < 0), tabs["tab"].combine_chunks()).cast(pa.string()),
            "position": pa.array(found.position, mask=found.position < 0),
            "signals": signals.words_of_sets(found.signals),
            "value": pa.array(found.value, from_pandas=True),
            "propensity": pa.array(found.propensity, from_pandas=True),
            "part": part,
        }
    )


def _filled(column: pa.ChunkedArray, nothing: float, kind: pa.DataType) -> pa.ChunkedArray:
    return column.cast(kind, safe=False).fill_null(pa.scalar(nothing, kind))


def _positives(positives: pl.DataFrame, dropped: Mapping[str, int]) -> dict[str, Output]:
    """Histories, how many events each item has in them, and what went."""
    counts = np.bincount(positives["item"].to_numpy())
    counted = np.flatnonzero(counts)
    return {
        "positives": _table(positives),
        "items": pa.table({"item": pa.array(counted, pa.int32()), "count": pa.array(counts[counted], pa.int64())}),
        "dropped": pa.table({"reason": pa.array(list(dropped), pa.string()), "count": pa.array(list(dropped.values()), pa.int64())}),
    }


def _lists(offsets: npt.NDArray[Any], values: Any) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _table(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow()


def _batch(table: pa.Table) -> pa.RecordBatch:
    batches: list[Any] = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
