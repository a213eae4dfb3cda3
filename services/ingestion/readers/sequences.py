"""``user item item ...`` lines: each user's items in order, without times.

The order is the time: the n-th item of a line happens n days after 1970-01-01, so that no two of a user share a session.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DAY_MS = 86_400_000


def events(table: pa.Table) -> tuple[pa.Table, pa.Array, pa.Array]:
    """Lines as interactions; the line of each, and which lines have a user and at least one item."""
    parts = pc.split_pattern_regex(pc.utf8_trim_whitespace(table["line"].combine_chunks()), r"\s+")
    if isinstance(parts, pa.ChunkedArray):
        parts = parts.combine_chunks()
    lengths = np.asarray(pc.list_value_length(parts).to_numpy(zero_copy_only=False), dtype=np.int64)
    good = lengths >= 2
    flat = pc.list_flatten(parts)
    lines = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else np.zeros(0, dtype=np.int64)
    order = np.arange(len(flat)) - starts[lines]
    wanted = (order > 0) & good[lines]
    user = flat.take(pa.array(starts[lines][wanted]))
    return (
        pa.table({"user": user, "item": flat.filter(pa.array(wanted)), "time": pa.array(order[wanted] * DAY_MS)}),
        pa.array(lines[wanted]),
        pa.array(good),
    )
