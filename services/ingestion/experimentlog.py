"""What the event log holds of an experiment: the rows of requests that a variant answered, and what the same people did before they met one."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow.compute as pc

from semantide.services.ingestion.eventlog import Segment, read_segment
from semantide.services.ingestion.experiments import COLUMNS

_SCHEMA = pl.Schema(
    {
        "user": pl.String(),
        "item": pl.String(),
        "time": pl.Int64(),
        "action": pl.String(),
        "signals": pl.List(pl.String()),
        "request_id": pl.String(),
        "propensity": pl.Float64(),
        "variant": pl.String(),
        "variant_share": pl.Float64(),
    }
)


def read_experiment(segments: Sequence[Segment], since: int, until: int, before_ms: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of variants from ``since`` to before ``until``, and (user, action) of these people's events in the ``before_ms`` before the first request of each.

    Units: milliseconds since 1970.
    """
    rows = []
    for segment in segments:
        if segment.last_time >= since and segment.first_time < until:
            table = read_segment(segment.path, COLUMNS)
            within = pc.and_(pc.greater_equal(table["time"], since), pc.less(table["time"], until))
            rows.append(table.filter(pc.and_(within, pc.and_(table["variant"].is_valid(), table["request_id"].is_valid()))))
    events = pl.concat([_frame(table) for table in rows]) if rows else pl.DataFrame(schema=_SCHEMA)
    firsts = events.group_by("user").agg(pl.col("time").min().alias("first"))
    earlier = [pl.DataFrame(schema={"user": pl.String(), "action": pl.String})]
    if firsts.height:
        begin, end = int(firsts["first"].min()) - before_ms, int(firsts["first"].max())  # type: ignore[arg-type]
        for segment in segments:
            if segment.last_time >= begin and segment.first_time < end:
                found = _frame(read_segment(segment.path, ("user", "time", "action"))).join(firsts, on="user")
                earlier.append(found.filter((pl.col("time") < pl.col("first")) & (pl.col("time") >= pl.col("first") - before_ms)).select("user", "action"))
    return events, pl.concat(earlier)


def _frame(table: object) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
