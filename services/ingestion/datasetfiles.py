"""A data set from the log: cleaned histories, pages, items and a split, written in the format of ``shared/dataset.py``.

The same events and items give the same bytes, whatever segments, files, parts or order they came in, and whichever executor did the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.ingestion.cleaning import CleaningConfig
from semantide.services.ingestion.datasetparts import BUCKETS, bounds, clean_part, finish, latest_part, scatter, survey, thin_part, times_of
from semantide.services.ingestion.splits import SplitConfig, dated
from semantide.shared.errors import BadData
from semantide.shared.executors import Executor, LocalExecutor, Outcome, Piece, Step, Tick

PART_ROWS = 1_000_000
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
    """Write the four files and return the header.

    ``sources`` are files with the columns user, item, time, action, page, event, in groups that are read together; ``items`` has the columns of an
    ``items`` artifact. What is under way is kept below ``workdir``, so that a second call goes on where the first was broken off; a part has about
    ``part_rows`` events, and never less than one user.
    Raises: BadData where no positive event is left.
    """
    run = _Steps(executor or LocalExecutor(), workdir, tick)
    deleted_mask = np.asarray(items["deleted"].to_numpy(), dtype=np.bool_)
    alive = items.filter(pa.array(~deleted_mask)).combine_chunks()
    events = _by_user(run, sources, -(-num_events // part_rows))
    deleted = run.share("deleted", items.select(["item"]).filter(pa.array(deleted_mask)))
    arguments = {"actions": dict(actions), "config": config.cleaning}
    cleaned = run("clean", clean_part, [{"events": pieces, "deleted": deleted} for pieces in events], **arguments)
    dropped: dict[str, int] = {}
    positives = _thinned(run, cleaned, config, dropped)
    counts = _summed(positives.tables("items"), "item")
    num_positives = int(counts["count"].sum())
    if not num_positives:
        reasons = "; ".join(f"{count} events: {reason}" for reason, count in dropped.items()) or f"the log holds {num_events} events"
        raise BadData(
            f"no event of intensity {config.positive_intensity} or more is left for a data set ({reasons}): import interactions, or relax the conditions"
        )

    described = pl.Series("item", alive["item"].to_pylist(), dtype=pl.String)
    names = (pl.concat([counts["item"], described]) if config.keep_cold_items else counts["item"]).unique().sort()
    rows = run.share("rows", pa.table({"item": names.to_arrow(), "row": pa.array(range(len(names)), pa.int32())}))
    splitting = dated(config.splitting, num_positives, lambda rank: _time_of_rank(run, positives, rank))
    finished = run(
        "finish",
        finish,
        [{**cleaned.pieces(part, "events"), **positives.pieces(part, "positives"), "rows": rows} for part in range(cleaned.num_parts)],
        splitting=splitting,
        session_gap_seconds=config.session_gap_seconds,
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
    totals = {name: max(values) if name == "longest_history" else sum(values) for name, values in figures.items()}
    header = {
        "config": {**asdict(config), "actions": dict(sorted(actions.items()))},
        "counts": {**totals, "items": len(names), "cold_items": int((trained == 0).sum()), "log_events": num_events},
        "dropped": dict(sorted(dropped.items())),
        "valid_time": splitting.valid_time if splitting.split == "temporal" else 0,
        "test_time": splitting.test_time if splitting.split == "temporal" else 0,
        "pages": "a page is in the training part where its time is before the user's times[train_end]; pages are cut at the ends of the parts",
    }
    (folder / "dataset.json").write_text(json.dumps(header, indent=1, sort_keys=True) + "\n")
    return header


class _Steps:
    """Runs steps below one folder, and shares small tables between their parts."""

    def __init__(self, executor: Executor, folder: Path, tick: Tick) -> None:
        self._executor, self._folder, self._tick = executor, folder, tick

    def __call__(self, name: str, function: Any, parts: Sequence[Mapping[str, Sequence[Piece]]], **arguments: Any) -> Outcome:
        return self._executor.run(Step(name, function, parts, arguments), self._folder, self._tick)

    def share(self, name: str, table: pa.Table) -> Sequence[Piece]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.parquet"
        pq.write_table(table, path)
        return (Piece(path),)


def _by_user(run: _Steps, sources: Sequence[Sequence[Path]], num_parts: int) -> list[Sequence[Piece]]:
    """The events of each part: stretches of users in order."""
    groups: list[Mapping[str, Sequence[Piece]]] = [{"events": [Piece(path) for path in group]} for group in sources]
    firsts = bounds(list(run("survey", survey, groups).tables("users")), num_parts) if num_parts > 1 else []
    scattered = run("scatter", scatter, groups, bounds=firsts)
    return [[Piece(scattered.path(group, "events"), part) for group in range(len(groups))] for part in range(len(firsts) + 1)]


def _thinned(run: _Steps, cleaned: Outcome, config: DatasetConfig, dropped: dict[str, int]) -> Outcome:
    """The histories once nothing more goes; what went is added to ``dropped``."""

    def lose(outcome: Outcome) -> int:
        lost = _summed(outcome.tables("dropped"), "reason")
        for reason, count in lost.rows():
            dropped[reason] = dropped.get(reason, 0) + count
        return int(lost["count"].sum())

    lose(cleaned)
    positives, turn = cleaned, 0
    while config.cleaning.thins:
        counts = _summed(positives.tables("items"), "item")
        scarce = run.share(f"scarce-{turn}", counts.filter(pl.col("count") < config.min_item_events).select("item").to_arrow())
        parts = [{**positives.pieces(part, "positives"), "scarce": scarce} for part in range(cleaned.num_parts)]
        positives = run(f"thin-{turn}", thin_part, parts, config=config.cleaning)
        if not lose(positives):
            break
        turn += 1
    if config.max_history:
        positives = run("latest", latest_part, [positives.pieces(part, "positives") for part in range(cleaned.num_parts)], config=config.cleaning)
        lose(positives)
    return positives


def _time_of_rank(run: _Steps, positives: Outcome, rank: int) -> int:
    """The exact ``rank``-th earliest time of all events: the stretch that holds it is divided until it is a millisecond."""
    low, width, before = -(1 << 47), 1 << 32, 0
    while True:
        parts = [positives.pieces(part, "positives") for part in range(positives.num_parts)]
        name = f"times-{low}-{width}".replace("--", "-m")
        counts = np.sum([table["count"].to_numpy() for table in run(name, times_of, parts, low=low, width=width).tables("counts")], axis=0)
        reached = before + np.cumsum(counts)
        place = int(np.searchsorted(reached, rank, side="right"))
        before = int(reached[place - 1]) if place else before
        low += place * width
        if width == 1:
            return low
        width //= BUCKETS


def _summed(tables: Iterable[pa.Table], key: str) -> pl.DataFrame:
    """Sums of ``count`` by key, in the order of the key; one table after another, so that only the sums are in memory."""
    total = pl.DataFrame(schema={key: pl.String, "count": pl.Int64})
    for table in tables:
        total = pl.concat([total, pl.DataFrame(pl.from_arrow(table)).cast({key: pl.String, "count": pl.Int64})]).group_by(key).agg(pl.col("count").sum())
    return total.sort(key)


def _numbered(pages: pa.Table, first: int) -> pa.Table:
    return pages.set_column(0, "user", pa.array(pages["user"].to_numpy() + first, pa.int32()))


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
