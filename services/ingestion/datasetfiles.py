"""A data set from the log: cleaned histories, pages, items and a split, written in the format of ``shared/dataset.py``.

The same events and items give the same bytes, whatever segments, files, parts or order they came in, and whichever executor did the work.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.ingestion.cleaning import CleaningConfig
from semantide.services.ingestion.datasetparts import BUCKETS, COLUMNS, bounds, clean_part, finish, keep_part, scatter, survey, thin_part, times_of
from semantide.services.ingestion.signals import Signals
from semantide.services.ingestion.splits import SplitConfig, dated
from semantide.shared.errors import BadData
from semantide.shared.executors import Executor, LocalExecutor, Outcome, Piece, Steps, Tick
from semantide.shared.page_report import PageCounts

PART_ROWS = 1_000_000
_ROW_GROUP = 100_000
_TABLES_AT_ONCE = 8

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DatasetConfig:
    """How a data set is made.

    ``keep_cold_items`` keeps items that are described but have too few events: they can be recommended by their content.
    Units: ``valid_time``, ``test_time`` milliseconds since 1970 (0: by fraction); ``session_gap_seconds`` seconds.
    """

    split: Literal["leave-one-out", "last-page", "temporal"] = "leave-one-out"
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
        if made.split not in ("leave-one-out", "last-page", "temporal"):
            raise ValueError(f"split is {made.split!r}: use leave-one-out, last-page or temporal")
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


def write_dataset(
    sources: Sequence[Sequence[Path]],
    num_events: int,
    items: pa.Table,
    actions: Mapping[str, float],
    config: DatasetConfig,
    folder: Path,
    *,
    workdir: Path,
    executor: Executor | None = None,
    part_rows: int = PART_ROWS,
    tick: Tick = lambda done, total, name: None,
) -> dict[str, Any]:
    """Write the five files and return the header.

    ``sources`` are segments of the log, in groups that are read together; ``items`` has the columns of an
    ``items`` artifact. What is under way is kept below ``workdir``, so that a second call goes on where the first was broken off; a part has about
    ``part_rows`` events, and never less than one user.
    Raises: BadData where no positive event is left.
    """
    run = Steps(executor or LocalExecutor(), workdir, tick)
    signals = Signals.of(actions)
    deleted_mask = np.asarray(items["deleted"].to_numpy(), dtype=np.bool_)
    alive = items.filter(pa.array(~deleted_mask)).combine_chunks()
    names, events = _by_user(run, sources, items["item"], signals, -(-num_events // part_rows))
    deleted = run.share("deleted", pa.table({"item": _numbers(items["item"].filter(pa.array(deleted_mask)), names)}))
    cleaned = run("clean", clean_part, [{"events": pieces, "deleted": deleted} for pieces in events], signals=signals, config=config.cleaning)
    dropped: dict[str, int] = {}
    positives = _thinned(run, cleaned, len(names), config, dropped)
    counts = _counts(positives, len(names))
    num_positives = int(counts.sum())
    if not num_positives:
        reasons = "; ".join(f"{count} events: {reason}" for reason, count in dropped.items()) or f"the log holds {num_events} events"
        raise BadData(
            f"no event of intensity {config.positive_intensity} or more is left for a data set ({reasons}): import interactions, or relax the conditions"
        )

    stays = counts > 0
    if config.keep_cold_items:
        stays[_numbers(alive["item"], names).to_numpy()] = True
    row_of = np.where(stays, np.cumsum(stays, dtype=np.int32) - 1, -1).astype(np.int32)
    names = names.filter(pa.array(stays))
    rows = run.share("rows", pa.table({"row": row_of}))
    splitting = dated(config.splitting, num_positives, lambda rank: _time_of_rank(run, positives, rank))
    finished = run(
        "finish",
        finish,
        [{**cleaned.pieces(part, "events", "users", "tabs"), **positives.pieces(part, "positives"), "rows": rows} for part in range(cleaned.num_parts)],
        splitting=splitting,
        session_gap_seconds=config.session_gap_seconds,
        signals=signals,
    )
    figures = pa.concat_tables(finished.tables("figures")).to_pydict()
    if not sum(figures["train_events"]):
        raise BadData(f"a temporal split at {splitting.valid_time} leaves no event to train on: set valid_time and test_time, or use leave-one-out")
    trained = np.zeros(len(names), np.int64)
    for table in finished.tables("counts"):
        trained[table["row"].to_numpy()] += table["count"].to_numpy()

    folder.mkdir(parents=True, exist_ok=True)
    _write(finished.tables("users"), folder / "users.parquet")
    _write([_item_table(names, trained, alive)], folder / "items.parquet")
    firsts = np.concatenate([[0], np.cumsum(figures["users"])])
    _write((_numbered(table, int(first)) for table, first in zip(finished.tables("pages"), firsts, strict=False)), folder / "pages.parquet")
    pages_before = itertools.accumulate((int(table["page"][-1].as_py()) + 1 if table.num_rows else 0 for table in finished.tables("feedback")), initial=0)
    shown = zip(finished.tables("feedback"), firsts, pages_before, strict=False)
    _write((_numbered(table, int(first), page) for table, first, page in shown), folder / "feedback.parquet")
    totals = {name: max(values) if name == "longest_history" else sum(values) for name, values in figures.items()}
    header = {
        "config": {**asdict(config), "actions": dict(sorted(actions.items()))},
        "counts": {**totals, "items": len(names), "cold_items": int((trained == 0).sum()), "log_events": num_events},
        "dropped": dict(sorted(dropped.items())),
        "valid_time": splitting.valid_time if splitting.split == "temporal" else 0,
        "test_time": splitting.test_time if splitting.split == "temporal" else 0,
        "page_report": sum((PageCounts.from_flat(table["count"].to_numpy()) for table in finished.tables("page_counts")), PageCounts.nothing()).report(),
        "pages": "parts of the items on a page: 0 train, 1 validation, 2 test, -1 none; what has an event after training trains nowhere",
    }
    (folder / "dataset.json").write_text(json.dumps(header, indent=1, sort_keys=True) + "\n")
    return header


def _by_user(
    run: Steps, sources: Sequence[Sequence[Path]], described: pa.ChunkedArray, signals: Signals, num_parts: int
) -> tuple[pa.Array, list[Sequence[Piece]]]:
    """All items' names in order, and the events of each part: stretches of users in order."""

    def groups(*columns: str) -> list[Mapping[str, Sequence[Piece]]]:
        return [{"events": [Piece(path, columns=columns) for path in group]} for group in sources]

    surveyed = run("survey", survey, groups("user", "item"))
    firsts = bounds(list(surveyed.tables("users")), num_parts) if num_parts > 1 else []
    names = _names([pa.table({"item": described}), *surveyed.tables("items")])
    shared = run.share("names", pa.table({"item": names}))
    scattered = run("scatter", scatter, [{**group, "names": shared} for group in groups(*COLUMNS)], bounds=firsts, signals=signals)
    return names, [[Piece(scattered.path(group, "events"), part) for group in range(len(sources))] for part in range(len(firsts) + 1)]


def _names(tables: Iterable[pa.Table]) -> pa.Array:
    """The distinct items of all tables in order; a few tables at a time, so that little but the names is in memory."""
    found = pl.Series("item", [], dtype=pl.String)
    waiting: list[pl.Series] = []
    for table in tables:
        waiting.append(pl.DataFrame(pl.from_arrow(table))["item"].cast(pl.String))
        if len(waiting) == _TABLES_AT_ONCE:
            found, waiting = pl.concat([found, *waiting]).unique(), []
    return pl.concat([found, *waiting]).unique().sort().to_arrow().cast(pa.string())


def _numbers(items: pa.ChunkedArray, names: pa.Array) -> pa.Array:
    return pc.index_in(items.combine_chunks().cast(pa.string()), value_set=names).cast(pa.int32())


def _counts(positives: Outcome, num_items: int) -> IntArray:
    """How often each item stands in the histories."""
    counts = np.zeros(num_items, np.int64)
    for table in positives.tables("items"):
        counts[table["item"].to_numpy()] += table["count"].to_numpy()
    return counts


def _thinned(run: Steps, cleaned: Outcome, num_items: int, config: DatasetConfig, dropped: dict[str, int]) -> Outcome:
    """The histories once nothing more goes; what went is added to ``dropped``."""

    def lose(outcome: Outcome) -> int:
        total = 0
        for table in outcome.tables("dropped"):
            for reason, count in zip(*table.to_pydict().values(), strict=True):
                dropped[reason] = dropped.get(reason, 0) + count
                total += count
        return total

    lose(cleaned)
    gone, left, turn = np.zeros(num_items, bool), cleaned, 0
    while config.cleaning.thins:
        counts = _counts(left, num_items)
        scarce = (counts > 0) & (counts < config.min_item_events)
        gone |= scarce
        shared = run.share(f"scarce-{turn}", pa.table({"item": np.flatnonzero(scarce).astype(np.int32)}))
        # Only who had what: the whole events are thinned once, at the end.
        parts = [{**left.pieces(part, "positives", columns=("user", "item")), "scarce": shared} for part in range(cleaned.num_parts)]
        left = run(f"thin-{turn}", thin_part, parts, config=config.cleaning)
        if not lose(left):
            break
        turn += 1
    if left is cleaned and not config.max_history:
        return cleaned
    shared = run.share("gone", pa.table({"item": np.flatnonzero(gone).astype(np.int32)}))
    parts = [
        {**cleaned.pieces(part, "positives"), "thin": left.pieces(part, "positives", columns=("user",))["positives"], "gone": shared}
        for part in range(cleaned.num_parts)
    ]
    kept = run("keep", keep_part, parts, config=config.cleaning)
    lose(kept)
    return kept


def _time_of_rank(run: Steps, positives: Outcome, rank: int) -> int:
    """The exact ``rank``-th earliest time of all events: the stretch that holds it is divided until it is a millisecond."""
    low, width, before = -(1 << 47), 1 << 32, 0
    while True:
        parts = [positives.pieces(part, "positives", columns=("time",)) for part in range(positives.num_parts)]
        name = f"times-{low}-{width}".replace("--", "-m")
        counts = np.sum([table["count"].to_numpy() for table in run(name, times_of, parts, low=low, width=width).tables("counts")], axis=0)
        reached = before + np.cumsum(counts)
        place = int(np.searchsorted(reached, rank, side="right"))
        before = int(reached[place - 1]) if place else before
        low += place * width
        if width == 1:
            return low
        width //= BUCKETS


def _numbered(table: pa.Table, first_user: int, first_page: int = 0) -> pa.Table:
    """Users counted on from an earlier part, but for those without a row; and pages, where they have numbers."""
    users = table["user"].to_numpy()
    table = table.set_column(0, "user", pa.array(np.where(users >= 0, users + first_user, -1), pa.int32()))
    place = table.schema.get_field_index("page")
    return table if place < 0 else table.set_column(place, "page", pa.array(table["page"].to_numpy() + first_page, pa.int64()))


def _item_table(names: pa.Array, counts: np.ndarray[Any, np.dtype[np.int64]], alive: pa.Table) -> pa.Table:
    row_of = {item: row for row, item in enumerate(alive["item"].to_pylist())}
    rows = pa.array([row_of.get(name) for name in names.to_pylist()], pa.int64())
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
            "item": names,
            "count": pa.array(counts, pa.int64()),
            "title": filled("title", ""),
            "text": filled("text", ""),
            "categories": filled("categories", []),
            "attributes": filled("attributes", "{}"),
            "available": filled("available", True),
            "embedding": embedding,
        }
    )


def _write(tables: Iterable[pa.Table], path: Path) -> None:
    """Row groups of one size, however the rows come."""
    writer, waiting = None, None
    try:
        for table in tables:
            waiting = table if waiting is None else pa.concat_tables([waiting, table])
            writer = writer or pq.ParquetWriter(path, waiting.schema, compression="zstd")
            while waiting.num_rows >= _ROW_GROUP:
                writer.write_table(waiting.slice(0, _ROW_GROUP).combine_chunks(), row_group_size=_ROW_GROUP)
                waiting = waiting.slice(_ROW_GROUP).combine_chunks()
        assert writer is not None and waiting is not None, path
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks(), row_group_size=_ROW_GROUP)
    finally:
        if writer is not None:
            writer.close()
