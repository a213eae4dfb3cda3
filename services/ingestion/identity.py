"""Event ids: what makes two rows one event.

A given ``event_id`` decides alone. Without one, the content does: user, item, time, action, page and value.
Legend: N rows.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.schema import SEPARATOR

HASH_BYTES = 16
# The day comes first, so that the index grows at its end as logs do. A given id must not depend on the time.
_PREFIX_BYTES = 2
_GIVEN = 0xFFFF
_DAY_MS = 86_400_000


def _value_bits(values: pa.Array) -> pa.Array:
    """Floats as the digits of their bits: the same text on every machine. NaN counts as absent, -0.0 as 0.0."""
    present = np.asarray(pc.fill_null(values, float("nan")).to_numpy(zero_copy_only=False), dtype=np.float64) + 0.0
    return pa.array(present.view(np.int64), mask=np.isnan(present)).cast(pa.string())


def event_hashes(table: pa.Table) -> list[bytes]:
    """16 bytes per row that are equal exactly where two rows are the same event.

    Shapes: N rows in, N hashes out.
    """
    columns = {name: table[name].combine_chunks() for name in ("user", "item", "time", "action", "page", "value", "event_id")}
    content = pc.binary_join_element_wise(
        pa.scalar("content"),
        columns["user"],
        columns["item"],
        columns["time"].cast(pa.string()),
        columns["action"],
        pc.fill_null(columns["page"], ""),
        pc.fill_null(_value_bits(columns["value"]), ""),
        pa.scalar(SEPARATOR),
    )
    given = pc.binary_join_element_wise(pa.scalar("given"), columns["event_id"], pa.scalar(SEPARATOR))
    keys = pc.coalesce(given, content).cast(pa.binary())
    days = np.clip(np.asarray(columns["time"].to_numpy(zero_copy_only=False), dtype=np.int64) // _DAY_MS, 0, _GIVEN - 1)
    days = np.where(np.asarray(pc.is_valid(columns["event_id"]).to_numpy(zero_copy_only=False), dtype=np.bool_), _GIVEN, days)
    prefixes = [int(day).to_bytes(_PREFIX_BYTES, "big") for day in np.unique(days)]
    positions = np.searchsorted(np.unique(days), days).tolist()
    return [
        prefixes[position] + blake2b(key, digest_size=HASH_BYTES - _PREFIX_BYTES).digest() for position, key in zip(positions, keys.to_pylist(), strict=True)
    ]
