"""Item records of files: loosely shaped values (text lists, JSON text, numbers) brought into the shape of an item."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from semantide.services.ingestion.rows import check_items
from semantide.services.ingestion.schema import Rejection, Rules, shown
from semantide.shared.contracts import Item

_TRUE, _FALSE = {"true", "1", "yes", "y", "t"}, {"false", "0", "no", "n", "f"}


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return "\n".join(str(part) for part in value if part is not None)
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _identifier(value: Any) -> Any:
    if isinstance(value, float) and value == math.floor(value):
        return str(int(value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _flag(value: Any) -> Any:
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    return value


def _leaves(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [] if value is None or value == "" else [str(value)]


def _categories(value: Any) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = text.strip("[]").split(",")
        else:
            value = text.split("|")
        value = [part.strip() if isinstance(part, str) else part for part in value]
    # The same category on two paths counts once.
    return list(dict.fromkeys(_leaves(value)))


def _attributes(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {"attributes": value}
    if isinstance(value, Mapping):
        return {
            str(key): entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False, sort_keys=True)
            for key, entry in value.items()
            if not _is_absent(entry)
        }
    if isinstance(value, (list, tuple)):
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            return {str(key): str(entry) for key, entry in value if not _is_absent(entry)}
        return {"attributes": ", ".join(_leaves(value))}
    return value


def _embedding(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return [float(part) for part in value.strip().strip("[]").replace(",", " ").split()]
        except ValueError:
            return value
    return value


_SHAPES = {
    "id": _identifier,
    "title": _text,
    "text": _text,
    "categories": _categories,
    "attributes": _attributes,
    "available": _flag,
    "deleted": _flag,
    "embedding": _embedding,
}


def shaped(record: Mapping[str, Any]) -> dict[str, Any]:
    """One record with each value in its field's shape; absent ones left out."""
    return {name: shape(record[name]) for name, shape in _SHAPES.items() if not _is_absent(record.get(name))}


def check_item_records(
    records: Sequence[Mapping[str, Any]], rules: Rules, rows: Sequence[int] | npt.NDArray[np.int64]
) -> tuple[list[Item], list[int], list[Rejection]]:
    """The good items, their row numbers, and why the others are refused. Duplicates are the item log's to find: it sees the whole import."""
    good: list[Item] = []
    bad: list[Rejection] = []
    numbers: list[int] = []
    dimension = rules.embedding_dimension
    for position, record in enumerate(records):
        try:
            item, rejections = check_items([shaped(record)], replace(rules, embedding_dimension=dimension))
        except RecursionError:
            item, rejections = [], [Rejection(0, "row", shown(record), "lists in lists too deep to read", "send categories and attributes as plain lists")]
        if item:
            if dimension is None and item[0].embedding:
                dimension = len(item[0].embedding)
            good.append(item[0])
            numbers.append(int(rows[position]))
        bad.extend(replace(rejection, row=int(rows[position])) for rejection in rejections)
    return good, numbers, bad
