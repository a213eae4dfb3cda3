"""What an interaction and an item look like as Arrow columns, what is allowed in them, and what a refused row says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa

Kind = Literal["interactions", "items"]

# Identifiers carry no control characters, so this one separates them where several are joined.
SEPARATOR = "\x1f"
CONTROL_PATTERN = r"[\x00-\x1f\x7f]"

INTERACTION_SCHEMA = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("time", pa.int64(), nullable=False),
        pa.field("action", pa.string(), nullable=False),
        pa.field("page", pa.string()),
        pa.field("value", pa.float64()),
        pa.field("event_id", pa.string()),
        pa.field("tab", pa.string()),
        pa.field("position", pa.int32()),
        pa.field("propensity", pa.float64()),
        pa.field("signals", pa.list_(pa.string())),
        pa.field("request_id", pa.string()),
        pa.field("variant", pa.string()),
        pa.field("variant_share", pa.float64()),
    ]
)

# Null means "not said": the item keeps what it has. An empty value clears it.
ITEM_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("title", pa.string()),
        pa.field("text", pa.string()),
        pa.field("categories", pa.list_(pa.string())),
        pa.field("attributes", pa.string()),
        pa.field("available", pa.bool_()),
        pa.field("deleted", pa.bool_()),
        pa.field("embedding", pa.list_(pa.float32())),
    ]
)

SCHEMAS: dict[Kind, pa.Schema] = {"interactions": INTERACTION_SCHEMA, "items": ITEM_SCHEMA}


def completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in a schema of ours; what an earlier version did not know is null.

    Raises: ValueError for a column that is of another type, or needed and absent.
    """
    columns = [table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(table.num_rows, field.type) for field in schema]
    absent = [field.name for field in schema if not field.nullable and field.name not in table.column_names]
    if absent:
        raise ValueError(f"columns {', '.join(absent)} are missing")
    return pa.table(columns, schema=schema)


@dataclass(frozen=True)
class Rules:
    """What a row must keep to.

    Units: ``now`` milliseconds since 1970; lengths in characters.
    """

    actions: Mapping[str, float]
    now: int
    default_action: str = "click"
    future_ms: int = 600_000
    earliest_ms: int = 100_000_000_000
    identifier_length: int = 256
    title_length: int = 10_000
    text_length: int = 200_000
    attributes_length: int = 200_000
    category_count: int = 1000
    embedding_length: int = 16_384
    embedding_dimension: int | None = None
    ordinal_time: bool = False


@dataclass(frozen=True)
class Rejection:
    """Why one row was refused: which row (from 0), which field, what was in it, what to do."""

    row: int
    field: str
    value: str
    reason: str
    remedy: str
    file: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields that say something, for JSON."""
        return {key: value for key, value in asdict(self).items() if value != "" or key == "value"}


def shown(value: object, limit: int = 80) -> str:
    """A value for an error message, cut to a readable length."""
    if isinstance(value, bytes):
        value = value[: 4 * limit].decode("utf-8", "backslashreplace")
    try:
        text = value if isinstance(value, str) else repr(value)[: 4 * limit]
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def time_problem(time: int, rules: Rules) -> tuple[str, str] | None:
    """Reason and remedy where a time cannot be milliseconds since 1970 up to now; None where it can."""
    if rules.ordinal_time:
        return None
    if time < 0:
        return "time is before 1970", "send milliseconds since 1970-01-01 UTC"
    if time < rules.earliest_ms:
        seconds = rules.earliest_ms // 1000 <= time * 10
        return (
            "time looks like seconds: read as milliseconds it is in the year 1970 to 1973",
            "send milliseconds: multiply by 1000" + (", or import with time_unit=s" if seconds else ""),
        )
    if time > rules.now + rules.future_ms:
        if time > rules.now * 500:
            unit = "nanoseconds" if time > rules.now * 500_000 else "microseconds"
            return f"time looks like {unit}", "send milliseconds since 1970-01-01 UTC, or import with time_unit=" + ("ns" if unit == "nanoseconds" else "us")
        return f"time is {(time - rules.now) / 1000:.0f} seconds in the future", "send milliseconds since 1970-01-01 UTC and check the sender's clock"
    return None
