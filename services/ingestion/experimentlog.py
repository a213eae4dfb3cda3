"""What the event log holds of an experiment: the rows of requests that a variant answered, and what the same people did before they met one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """Rows of the requests that variants answered from ``since`` to before ``until``, and (user, action) of these people's events in the ``before_ms`` before the first request of each.

    A request's moment is that of its first row. What comes back so late that nobody kept its list any more names no variant: it has that of the other rows of its request. Of requests from before
    ``since`` (by up to ``before_ms``) no row counts, for those that nothing came back of since then are not seen.

    Units: milliseconds since 1970.
    """
    answered = _answered(segments, since, until)
    for table in _within(segments, ("request_id", "time"), since - before_ms, since):
        answered = answered.join(table, on="request_id", how="anti")
    tables = [pl.DataFrame(schema=_SCHEMA), *_within(segments, COLUMNS, since, until)]
    events = pl.concat([table.join(answered, on="request_id", maintain_order="left") for table in tables])
    unsaid = pl.col("variant").is_null()
    share = pl.when(unsaid).then(pl.coalesce("variant_share", "list_share")).otherwise("variant_share")
    events = events.with_columns(variant=pl.coalesce("variant", "list_variant"), variant_share=share).select(COLUMNS)
    firsts = events.group_by("user").agg(pl.col("time").min().alias("first"))
    earlier = [pl.DataFrame(schema={"user": pl.String(), "action": pl.String})]
    if firsts.height:
        begin, end = int(firsts["first"].min()) - before_ms, int(firsts["first"].max())  # type: ignore[arg-type]
        for segment in segments:
            if segment.last_time >= begin and segment.first_time < end:
                found = _frame(read_segment(segment.path, ("user", "time", "action"))).join(firsts, on="user")
                earlier.append(found.filter((pl.col("time") < pl.col("first")) & (pl.col("time") >= pl.col("first") - before_ms)).select("user", "action"))
    return events, pl.concat(earlier)


def _answered(segments: Sequence[Segment], since: int, until: int) -> pl.DataFrame:
    """The requests of a stretch of time that a variant answered, with what their rows say of it (``list_variant``, ``list_share``)."""
    said = [
        table.filter(pl.col("variant").is_not_null()).select("request_id", list_variant="variant", list_share="variant_share").unique()
        for table in _within(segments, ("request_id", "time", "variant", "variant_share"), since, until)
    ]
    empty = pl.DataFrame(schema={"request_id": pl.String(), "list_variant": pl.String(), "list_share": pl.Float64()})
    return pl.concat([empty, *said]).sort("list_variant", "list_share", nulls_last=True).unique("request_id", keep="first", maintain_order=True)


def _within(segments: Sequence[Segment], columns: Sequence[str], since: int, until: int) -> Iterator[pl.DataFrame]:
    """Rows from ``since`` to before ``until`` that name a request, segment by segment."""
    for segment in segments:
        if segment.last_time >= since and segment.first_time < until:
            table = read_segment(segment.path, columns)
            within = pc.and_(pc.greater_equal(table["time"], since), pc.less(table["time"], until))
            yield _frame(table.filter(pc.and_(within, table["request_id"].is_valid())))


def _frame(table: object) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
