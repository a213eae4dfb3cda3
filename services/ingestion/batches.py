"""Rows of a file, checked a batch at a time in Arrow: the good ones come out in our schema, the bad ones as rejections.

No Python runs per good row; a bad row costs a little. Columns may have any sensible type: ids as numbers, times as text.
Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.schema import CONTROL_PATTERN, INTERACTION_SCHEMA, Rejection, Rules, shown, time_problem

Mask = npt.NDArray[np.bool_]
TIME_UNITS: Mapping[str, float] = {"ms": 1, "s": 1000, "us": 1e-3, "ns": 1e-6}
_INTEGER_PATTERN = r"^\s*[+-]?\d{1,18}\s*$"
_NUMBER_PATTERN = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_MILLISECONDS_REMEDY = "send whole milliseconds since 1970-01-01 UTC"


@dataclass(frozen=True)
class Checked:
    """Good rows in our schema, and why the others were refused."""

    table: pa.Table
    rejections: list[Rejection]


@dataclass
class _Problems:
    """The first problem of every row."""

    rows: npt.NDArray[np.int64]
    bad: Mask
    found: list[Rejection]

    def mark(self, mask: Mask, field: str, value: Callable[[int], object], text: Callable[[int], tuple[str, str]]) -> None:
        fresh = mask & ~self.bad
        for position in np.flatnonzero(fresh).tolist():
            reason, remedy = text(position)
            raw = value(position)
            self.found.append(Rejection(int(self.rows[position]), field, "" if raw is None else shown(raw), reason, remedy))
        self.bad |= mask


def _mask(array: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def texts(column: pa.ChunkedArray | pa.Array) -> tuple[pa.Array, Mask]:
    """The column as strings (empty ones null), and where a value cannot be one.

    Shapes: N in, [N] and [N] out.
    """
    array = _flat(column)
    kind = array.type
    wrong = np.zeros(len(array), dtype=np.bool_)
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.string()), wrong
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        try:
            array = array.cast(pa.string())
        except pa.ArrowInvalid:
            decoded = [None if value is None else value.decode("utf-8", "surrogateescape") for value in array.to_pylist()]
            wrong = np.array([value is not None and any("\udc80" <= letter <= "\udcff" for letter in value) for value in decoded], dtype=np.bool_)
            array = pa.array([None if bad else value for value, bad in zip(decoded, wrong, strict=True)], pa.string())
    elif pa.types.is_floating(kind):
        numbers = np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.float64)
        absent = np.isnan(numbers)
        wrong = ~absent & ((numbers != np.floor(numbers)) | (np.abs(numbers) > 2**53))
        whole = np.where(absent | wrong, 0, numbers).astype(np.int64)
        array = pa.array(whole, mask=absent | wrong).cast(pa.string())
    elif pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        array = array.cast(pa.string())
    else:
        return pa.nulls(len(array), pa.string()), np.ones(len(array), dtype=np.bool_)
    return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array), wrong


def times(column: pa.ChunkedArray | pa.Array, unit: str) -> tuple[pa.Array, Mask]:
    """The column as int64 milliseconds, and where a value is none. Null stays null.

    Units: ``unit`` says what numbers count: ms, s, us or ns; timestamps and ISO dates know it themselves.
    """
    array = _flat(column)
    none = np.zeros(len(array), dtype=np.bool_)
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return array.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()), none
    if pa.types.is_integer(array.type):
        return _scaled(array.cast(pa.int64(), safe=False), unit)
    if pa.types.is_floating(array.type):
        return _from_floats(array, unit, none)
    text, wrong = texts(array)
    integer = _mask(pc.match_substring_regex(text, _INTEGER_PATTERN))
    number = _mask(pc.match_substring_regex(text, _NUMBER_PATTERN)) & ~integer
    result, bad = _scaled(pc.utf8_trim_whitespace(pc.if_else(pa.array(integer), text, pa.scalar(None, pa.string()))).cast(pa.int64()), unit)
    bad |= wrong
    if number.any():
        floats, far = _from_floats(pc.utf8_trim_whitespace(pc.if_else(pa.array(number), text, pa.scalar(None, pa.string()))).cast(pa.float64()), unit, none)
        result, bad = pc.coalesce(result, floats), bad | far
    other = _mask(pc.is_valid(text)) & ~integer & ~number
    if other.any():
        found = _dates(pc.if_else(pa.array(other), text, pa.scalar(None, pa.string())))
        result, bad = pc.coalesce(result, found), bad | (other & ~_mask(pc.is_valid(found)))
    return result, bad


def _dates(text: pa.Array) -> pa.Array:
    """ISO 8601 dates, with or without a time of day and an offset (UTC where there is none), as milliseconds; others null."""
    plain = pl.Series(text.to_pylist(), dtype=pl.String).str.strip_chars().str.replace("[Tt]", " ").str.replace("[Zz]$", "+00:00")
    frame = pl.DataFrame({"text": plain}).select(
        pl.coalesce(
            pl.col("text").str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit="ms", time_zone="UTC", strict=False),
            pl.col("text").str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ms", time_zone="UTC", strict=False),
            pl.col("text").str.to_datetime("%Y-%m-%d %H:%M", time_unit="ms", time_zone="UTC", strict=False),
            pl.col("text").str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("ms", "UTC")),
        ).dt.epoch("ms")
    )
    return frame.to_series().to_arrow().cast(pa.int64())


def _scaled(array: pa.Array, unit: str) -> tuple[pa.Array, Mask]:
    values = np.asarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    absent = ~_mask(pc.is_valid(array))
    if unit == "s":
        far = np.abs(values) > 2**62 // 1000
        values = np.where(far, 0, values) * 1000
    else:
        far = np.zeros(len(values), dtype=np.bool_)
        values = values // {"ms": 1, "us": 1000, "ns": 1_000_000}[unit]
    return pa.array(values, mask=absent | far), far


def _from_floats(array: pa.Array, unit: str, none: Mask) -> tuple[pa.Array, Mask]:
    values = np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.float64)
    absent = np.isnan(values)
    values = values * TIME_UNITS[unit]
    # A fraction of a millisecond is a sign of another unit, except where the sender named a coarser one.
    wrong = ~absent & ((np.abs(values) > 2**53) | ((values != np.floor(values)) & (unit == "ms")))
    return pa.array(np.floor(np.where(absent | wrong, 0, values)).astype(np.int64), mask=absent | wrong), wrong | none


def _floats(column: pa.ChunkedArray | pa.Array) -> tuple[pa.Array, Mask]:
    array = _flat(column)
    if pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
        values = array.cast(pa.float64(), safe=False)
        wrong = np.zeros(len(array), dtype=np.bool_)
    else:
        text, wrong = texts(array)
        number = _mask(pc.match_substring_regex(text, _NUMBER_PATTERN))
        wrong = wrong | (_mask(pc.is_valid(text)) & ~number & ~_mask(pc.is_in(pc.utf8_lower(text), pa.array(["nan", "null", "none"]))))
        values = pc.utf8_trim_whitespace(pc.if_else(pa.array(number), text, pa.scalar(None, pa.string()))).cast(pa.float64())
    numbers = np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    infinite = np.isinf(numbers)
    return pa.array(numbers, mask=np.isnan(numbers) | infinite), wrong | infinite


def _numbers(table: pa.Table, name: str) -> tuple[pa.Array, Mask]:
    """A column of numbers, null where the file has none."""
    if name not in table.column_names:
        return pa.nulls(table.num_rows, pa.float64()), np.zeros(table.num_rows, dtype=np.bool_)
    return _floats(table[name])


def _places(table: pa.Table) -> tuple[pa.Array, Mask]:
    """The column of positions, null where it is empty or wrong."""
    places, wrong = _numbers(table, "position")
    values = np.asarray(places.to_numpy(zero_copy_only=False), dtype=np.float64)
    absent = np.isnan(values)
    wrong = wrong | (~absent & ((values < 0) | (values >= 2**31) | (values != np.floor(values))))
    return pa.array(np.where(absent | wrong, 0, values).astype(np.int32), mask=absent | wrong), wrong


def _signals(table: pa.Table, rules: Rules) -> tuple[pa.Array, Mask]:
    """What else was done, as lists: of lists, or of texts with blanks, commas or bars between the words; and where a word is no known action."""
    count = table.num_rows
    if "signals" not in table.column_names or not count:
        return pa.nulls(count, pa.list_(pa.string())), np.zeros(count, dtype=np.bool_)
    column = _flat(table["signals"])
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        try:
            lists = column.cast(pa.list_(pa.string()))
        except pa.ArrowInvalid:
            return pa.nulls(count, pa.list_(pa.string())), np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False), dtype=np.bool_)
        odd = np.zeros(count, dtype=np.bool_)
    else:
        words, odd = texts(column)
        words = pc.utf8_trim(words, " ,|;[]\"'")
        lists = pc.split_pattern_regex(pc.if_else(pc.equal(words, ""), pa.scalar(None, pa.string()), words), "[\\s,|;\"']+")
    known = pc.is_in(pc.list_flatten(lists), value_set=pa.array(list(rules.actions), pa.string()))
    unknown = pc.list_parent_indices(lists).filter(pc.invert(known)).to_numpy()
    wrong = odd.copy()
    wrong[unknown] = True
    empty = pc.equal(pc.list_value_length(lists), 0)
    return pc.if_else(pc.or_kleene(pa.array(wrong), pc.fill_null(empty, True)), pa.scalar(None, pa.list_(pa.string())), lists), wrong


def check_interaction_table(table: pa.Table, rules: Rules, rows: Sequence[int] | npt.NDArray[np.int64], *, time_unit: str = "ms") -> Checked:
    """Check columns named as ours but of any type; ``rows`` numbers them for the rejections. Absent columns count as empty."""
    count = table.num_rows
    problems = _Problems(np.asarray(rows, dtype=np.int64), np.zeros(count, dtype=np.bool_), [])
    columns: dict[str, pa.Array] = {}

    def raw(name: str) -> Callable[[int], object]:
        column = table[name] if name in table.column_names else None
        return lambda position: None if column is None else column[position].as_py()

    def always(reason: str, remedy: str) -> Callable[[int], tuple[str, str]]:
        return lambda _: (reason, remedy)

    for name in ("user", "item", "page", "event_id", "action", "tab", "request_id", "variant"):
        if name not in table.column_names:
            columns[name] = pa.nulls(count, pa.string())
            wrong = np.zeros(count, dtype=np.bool_)
        else:
            columns[name], wrong = texts(table[name])
        problems.mark(wrong, name, raw(name), always(f"{name} is not valid UTF-8 text or a whole number", "send UTF-8 text"))
        if name in ("user", "item"):
            missing = ~_mask(pc.is_valid(columns[name]))
            problems.mark(missing, name, raw(name), always(f"{name} is missing", f"every interaction names its {name}"))
        long = _mask(pc.greater(pc.utf8_length(columns[name]), rules.identifier_length))
        problems.mark(long, name, raw(name), always(f"{name} is longer than {rules.identifier_length} characters", "send a shorter id"))
        control = _mask(pc.match_substring_regex(columns[name], CONTROL_PATTERN))
        problems.mark(control, name, raw(name), always(f"{name} has control characters", "send an id without line breaks, tabs or other control characters"))

    if "time" in table.column_names:
        moments, wrong = times(table["time"], time_unit)
    else:
        moments, wrong = pa.nulls(count, pa.int64()), np.zeros(count, dtype=np.bool_)
    problems.mark(wrong, "time", raw("time"), always("time is neither a whole number nor a date", _MILLISECONDS_REMEDY))
    problems.mark(~_mask(pc.is_valid(moments)), "time", raw("time"), always("time is missing", _MILLISECONDS_REMEDY))
    moment_values = np.asarray(pc.fill_null(moments, 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    if not rules.ordinal_time:
        outside = (moment_values < rules.earliest_ms) | (moment_values > rules.now + rules.future_ms)
        problems.mark(outside, "time", raw("time"), lambda position: time_problem(int(moment_values[position]), rules) or ("", ""))

    action = pc.fill_null(columns["action"], rules.default_action)
    unknown = ~_mask(pc.is_in(action, pa.array(list(rules.actions), pa.string())))
    known = ", ".join(sorted(rules.actions))
    problems.mark(
        unknown,
        "action",
        lambda position: action[position].as_py(),
        always("unknown action", f"use one of {known}, or add it with its intensity to SEMANTIDE_ACTIONS"),
    )
    if "value" in table.column_names:
        values, wrong = _floats(table["value"])
        problems.mark(wrong, "value", raw("value"), always("value is not a finite number", "send a number, or leave the field empty"))
    else:
        values = pa.nulls(count, pa.float64())

    positions, wrong = _places(table)
    problems.mark(
        wrong, "position", raw("position"), always("position is not a whole number from 0 on", "count the places of a page from 0, or leave it empty")
    )
    chances: dict[str, pa.Array] = {}
    for name in ("propensity", "variant_share"):
        chances[name], wrong = _numbers(table, name)
        shares = np.asarray(chances[name].to_numpy(zero_copy_only=False), dtype=np.float64)
        wrong = wrong | (shares <= 0) | (shares > 1)
        problems.mark(wrong, name, raw(name), always(f"{name} is no probability above 0", "send a number above 0 and at most 1, or leave it empty"))
    signals, wrong = _signals(table, rules)
    problems.mark(
        wrong, "signals", raw("signals"), always("signals are not known actions", f"use some of {known}, separated by blanks where the file has no lists")
    )

    checked = pa.table(
        {
            "user": columns["user"],
            "item": columns["item"],
            "time": moments,
            "action": action,
            "page": pc.coalesce(columns["page"], columns["request_id"]),
            "value": values,
            "event_id": columns["event_id"],
            "tab": columns["tab"],
            "position": positions,
            "propensity": chances["propensity"],
            "signals": signals,
            "request_id": columns["request_id"],
            "variant": columns["variant"],
            "variant_share": chances["variant_share"],
        }
    )
    if problems.bad.any():
        checked = checked.filter(pa.array(~problems.bad))
    problems.found.sort(key=lambda rejection: rejection.row)
    return Checked(checked.cast(INTERACTION_SCHEMA), problems.found)


def from_records(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pa.Table:
    """Loosely typed records as columns: every scalar as text, so that one odd value spoils only its own row."""

    def text(value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, float) and abs(value) < 2**53 and value.is_integer():
            return str(int(value))
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)

    def clean(value: str | None) -> str | None:
        return None if value is None else value.encode("utf-8", "replace").decode()

    return pa.table({name: pa.array([clean(text(record.get(name))) for record in records], pa.string()) for name in names})
