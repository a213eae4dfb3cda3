"""Make this sample from the processed files of KuaiRand-Pure: ``python make_sample.py FOLDER``.

FOLDER holds processed_splits_val.parquet, processed_splits_test.parquet, processed_user_sequences.parquet and
KuaiRand-Pure_data_video_features_basic_pure.csv. Needs the installed package. What was changed is in README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl

from semantide.services.ingestion.readers import kuairand

USERS = 2000
EARLIER_STEP_MS = 60_000


def log_events(folder: Path) -> pl.DataFrame:
    """All exposures of the two weeks with their strongest signal."""
    raw = pl.concat([pl.read_parquet(folder / f"processed_splits_{part}.parquet", columns=list(kuairand.LOG_COLUMNS)) for part in ("val", "test")])
    events = pl.from_arrow(kuairand.log(raw.to_arrow()))
    assert isinstance(events, pl.DataFrame)
    return (
        events.with_columns(pl.col("user", "item").cast(pl.String), pl.col("time").cast(pl.Int64)).unique(["user", "item", "time"]).sort("user", "time", "item")
    )


def earlier_events(folder: Path, users: pl.Series) -> pl.DataFrame:
    """The long watches before the two weeks: their order is real, their times count back from the real last moment in steps of a minute."""
    rows = []
    sequences = pl.read_parquet(folder / "processed_user_sequences.parquet").with_columns(pl.col("user_id").cast(pl.String))
    for row in sequences.filter(pl.col("user_id").is_in(users.implode())).sort("user_id").iter_rows(named=True):
        liked = set(row["like_seq"])
        watched = row["long_watch_seq"]
        for place, item in enumerate(watched):
            time = row["last_time_ms"] - (len(watched) - 1 - place) * EARLIER_STEP_MS
            rows.append((row["user_id"], str(item), time, "like" if item in liked else "long_view"))
    return pl.DataFrame(rows, schema={"user": pl.String, "item": pl.String, "time": pl.Int64, "action": pl.String}, orient="row")


def main(folder: Path, target: Path) -> None:
    """Write interactions.parquet and items.parquet."""
    events = log_events(folder)
    liked = events.filter(~pl.col("action").is_in(["exposure", "hate"]))
    users = liked.group_by("user").len().sort(["len", "user"], descending=[True, False]).head(USERS)["user"]
    events = events.filter(pl.col("user").is_in(users.implode()))
    first = events.group_by("user").agg(pl.col("time").min().alias("first"))
    earlier = earlier_events(folder, users).join(first, on="user").filter(pl.col("time") < pl.col("first")).drop("first")
    interactions = pl.concat([events, earlier], how="diagonal").unique(["user", "item", "time"], keep="first", maintain_order=True).sort("user", "time", "item")
    told = ("user", "item", "time", "action", "page", "tab", "signals")
    interactions.select(*told, pl.col("value").cast(pl.Float64)).write_parquet(target / "interactions.parquet", compression="zstd", compression_level=19)
    used = interactions["item"].unique()
    videos = pl.read_csv(folder / "KuaiRand-Pure_data_video_features_basic_pure.csv", infer_schema_length=None)
    items = [kuairand.video(row) for row in videos.iter_rows(named=True) if str(row["video_id"]) in set(used)]
    items.sort(key=lambda item: int(item["id"]))
    pl.DataFrame([{**item, "attributes": json.dumps(item["attributes"], sort_keys=True)} for item in items]).write_parquet(
        target / "items.parquet", compression="zstd", compression_level=19
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).resolve().parent)
