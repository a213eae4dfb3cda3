"""Sessions and pages: what a user saw together.

A page is what the sender called one (page id), else a session: events of one user with no longer silence between them than the gap.
A page never reaches over the ends of the user's training or validation part: it is cut there, so its time tells its part.
"""

from __future__ import annotations

import polars as pl


def pages(events: pl.DataFrame, cuts: pl.DataFrame, *, session_gap_ms: int) -> pl.DataFrame:
    """Pages with the columns user, time, items, actions, in order of user and time; ``events`` in order of user, time, event.

    ``cuts`` has for each user the time of its first validation and first test event (``valid_time``, ``test_time``; null: none).
    An item shown several times on a page counts once, at its first place, with its strongest signal; dislike outweighs all.
    """
    silence = pl.col("time") - pl.col("time").shift(1).over("user")
    session = (silence > session_gap_ms).fill_null(False).cum_sum().over("user")
    strength = pl.when(pl.col("intensity") < 0).then(1000 - pl.col("intensity")).otherwise(pl.col("intensity"))
    marked = (
        events.with_columns(
            pl.coalesce(pl.lit("p") + pl.col("page"), pl.lit("s") + session.cast(pl.String)).alias("key"),
            strength.alias("strength"),
            pl.int_range(pl.len()).alias("place"),
        )
        .join(cuts, on="user", how="inner", maintain_order="left")
        .with_columns(
            (
                (pl.col("time") >= pl.col("valid_time")).fill_null(False).cast(pl.Int8) + (pl.col("time") >= pl.col("test_time")).fill_null(False).cast(pl.Int8)
            ).alias("part")
        )
    )
    shown = marked.group_by("user", "key", "part", "item", maintain_order=True).agg(
        pl.col("time").first(), pl.col("place").first(), pl.col("action").sort_by("strength", "action").last()
    )
    return (
        shown.sort("place")
        .group_by("user", "key", "part", maintain_order=True)
        .agg(pl.col("time").first(), pl.col("place").first(), pl.col("item").alias("items"), pl.col("action").alias("actions"))
        .sort("user", "time", "place")
        .select("user", "time", "items", "actions")
    )
