"""KuaiRand-Pure as a data set with exposures: what users watched before the log as their histories, then the log itself, split by time.

Gao et al., KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos, CIKM 2022 (CC BY-SA 4.0). The files are read where they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from semantide.services.ingestion.readers import kuairand
from semantide.shared.dataset import Dataset
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback

SIGNALS = tuple(name for _, name in kuairand.SIGNALS)
TEST_DAYS, HELD_OUT_DAYS = 3, 1


def load(folder: Path, max_users: int | None = None) -> tuple[Dataset, Feedback, EventActions]:
    """The log of both processed splits; the last days test, the one before is held out."""
    log = pl.concat([pl.read_parquet(folder / f"processed_splits_{part}.parquet") for part in ("val", "test")], how="vertical_relaxed")
    before = pl.read_parquet(folder / "processed_user_sequences.parquet")
    if max_users is not None:
        chosen = np.random.default_rng(0).permutation(np.array(sorted(log["user_id"].unique())))[:max_users]
        log, before = log.filter(pl.col("user_id").is_in(pl.Series(chosen).implode())), before.filter(pl.col("user_id").is_in(pl.Series(chosen).implode()))
    videos = pl.read_parquet(folder / "processed_item_features.parquet")
    items = [
        kuairand.video(row)
        for row in videos.select("video_id", "author_id", "video_type", "upload_dt", "upload_type", "video_duration", "music_id", "tag").to_dicts()
    ]
    row_of = {item["id"]: row for row, item in enumerate(items)}
    item_row = np.full(int(videos["video_id"].max()) + 1, -1, np.int64)  # type: ignore[arg-type]
    for name, row in row_of.items():
        item_row[int(name)] = row
    log = log.with_columns(row=pl.Series(item_row[log["video_id"].to_numpy()])).filter(pl.col("row") >= 0).sort("user_id", "time_ms", "row")

    users = sorted(set(log["user_id"].to_list()) | set(before["user_id"].to_list()))
    signals_XS = np.stack([log[column].to_numpy() > 0 for column, _ in kuairand.SIGNALS], axis=1)
    strongest = np.full(len(log), "exposure", dtype=object)
    for column, name in enumerate(SIGNALS):
        strongest[signals_XS[:, column]] = name
    events = _events(log, strongest, before, item_row)
    number = pl.DataFrame({"user_id": users, "user": range(len(users))})
    events = events.join(number, on="user_id", maintain_order="left").sort("user", "time", maintain_order=True)
    log_user = log.join(number, on="user_id", maintain_order="left")["user"].to_numpy().astype(np.int32)

    lengths = np.bincount(events["user"].to_numpy(), minlength=len(users))
    days = log["date"].unique().sort().to_list()
    valid_day, test_day = days[-TEST_DAYS - HELD_OUT_DAYS], days[-TEST_DAYS]
    parts = ((log["date"] >= valid_day).to_numpy().astype(np.int8) + (log["date"] >= test_day).to_numpy()).astype(np.int8)
    times = log["time_ms"].to_numpy()
    valid_time, test_time = int(times[parts >= 1].min()), int(times[parts >= 2].min())
    moments = events["time"].to_numpy()
    train_end, valid_end = (
        np.bincount(events["user"].to_numpy()[moments < moment], minlength=len(users)).astype(np.int32) for moment in (valid_time, test_time)
    )
    rows = events["row"].to_numpy()
    counts = np.bincount(rows[moments < valid_time], minlength=len(items))
    table = pa.table(
        {
            "item": [item["id"] for item in items], "count": counts, "title": [item["title"] for item in items], "text": [item["text"] for item in items],
            "categories": pa.array([item["categories"] for item in items], pa.list_(pa.string())),
        }
    )  # fmt: skip
    dataset = Dataset(
        tuple(map(str, users)), tuple(table["item"].to_pylist()), rows.astype(np.int32), moments, np.concatenate([[0], np.cumsum(lengths)]), train_end, valid_end, table,
        {"valid_time": valid_time, "test_time": test_time},
    )  # fmt: skip
    pages = log.select(pl.struct("user_id", "date", "tab").rank("dense"))[:, 0].to_numpy().astype(np.int64)
    tab_names = tuple(map(str, sorted(log["tab"].unique())))
    unknown = np.full(len(log), np.nan, np.float32)
    random = (log["is_rand"] > 0).to_numpy()
    feedback = Feedback(
        log_user, log["row"].to_numpy().astype(np.int32), times, pages, np.searchsorted(np.array(sorted(log["tab"].unique())), log["tab"].to_numpy()).astype(np.int16),
        np.full(len(log), -1, np.int32), signals_XS, unknown, np.where(random, np.float32(1 / kuairand.RANDOM_POOL), unknown), parts, SIGNALS, tab_names,
    )  # fmt: skip
    names = tuple(sorted(set(events["action"].to_list())))
    numbers = np.searchsorted(np.array(names), events["action"].to_numpy().astype(str)).astype(np.int16)
    return dataset, feedback, EventActions(names, numbers)


def _events(log: pl.DataFrame, strongest: np.ndarray, before: pl.DataFrame, item_row: np.ndarray) -> pl.DataFrame:
    """Watches before the log, one after another up to the last one's time, and what was clicked in it."""
    watched = (
        before.select("user_id", "last_time_ms", "like_seq", "long_watch_seq", row="watch_seq")
        .with_columns(place=pl.int_ranges(pl.col("row").list.len()))
        .explode("row", "place")
    )
    watched = watched.drop_nulls("row").with_columns(
        action=pl.when(pl.col("like_seq").list.contains(pl.col("row")))
        .then(pl.lit("like"))
        .when(pl.col("long_watch_seq").list.contains(pl.col("row")))
        .then(pl.lit("long_view"))
        .otherwise(pl.lit("watch")),
        time=pl.col("last_time_ms") - (pl.col("place").max().over("user_id") - pl.col("place")) * 1000,
    )
    video = watched["row"].to_numpy()
    watched = watched.with_columns(row=pl.Series(np.where(video < len(item_row), item_row[np.minimum(video, len(item_row) - 1)], -1)))
    done = (
        log.select("user_id", "row", time="time_ms").with_columns(action=pl.Series(strongest.astype(str))).filter(~pl.col("action").is_in(["exposure", "hate"]))
    )
    return pl.concat([watched.filter(pl.col("row") >= 0).select("user_id", "row", "time", "action"), done.select("user_id", "row", "time", "action")])


if __name__ == "__main__":
    dataset, feedback, events = load(Path(sys.argv[1]))
    print(
        len(dataset.user_ids),
        len(dataset.item_ids),
        len(dataset.items),
        len(feedback),
        np.bincount(feedback.parts[feedback.parts >= 0], minlength=3),
        events.names,
        feedback.signals_XS.mean(0),
    )
