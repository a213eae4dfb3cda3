"""Rows of a REST batch: each is checked by itself, the good ones become Arrow rows, the bad ones rejections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from semantide.services.ingestion.schema import INTERACTION_SCHEMA, ITEM_SCHEMA, Rejection, Rules, shown, time_problem
from semantide.shared.contracts import Interaction, Item

_INTERACTIONS = TypeAdapter(list[Interaction])

_REMEDIES = {
    "missing": "send the field",
    "extra_forbidden": "leave the field out, or check its spelling",
    "string_type": "send a text; numbers as ids go in quotes",
    "string_unicode": "send UTF-8",
    "string_too_short": "send at least one character",
    "string_too_long": "send at most 256 characters",
    "string_pattern_mismatch": "send an id without control characters",
    "int_type": "send whole milliseconds since 1970-01-01 UTC",
    "int_parsing": "send whole milliseconds since 1970-01-01 UTC",
    "int_from_float": "send whole milliseconds since 1970-01-01 UTC",
    "int_parsing_size": "send whole milliseconds since 1970-01-01 UTC",
    "model_type": "send an object for each row",
    "greater_than": "send a number above 0",
    "greater_than_equal": "send a number from 0 on",
    "less_than": "send a smaller number",
    "less_than_equal": "send a number of at most 1",
    "too_long": "send fewer entries",
    "tuple_type": "send a list",
    "float_parsing": "send a number, or leave the field out",
    "float_type": "send a number, or leave the field out",
    "finite_number": "send a finite number, or leave the field out",
}


def _from_error(row: int, raw: Any, error: ValidationError) -> Rejection:
    first = error.errors(include_url=False)[0]
    location = ".".join(str(part) for part in first["loc"]) or "row"
    value = raw if not first["loc"] else first["input"]
    return Rejection(
        row,
        location,
        "" if first["type"] == "missing" else shown(value),
        first["msg"],
        _REMEDIES.get(first["type"], "correct the value and send the row again"),
    )


def _stringified(raw: Any, names: Sequence[str]) -> Any:
    """Integer ids are taken as their digits: most logs keep ids as numbers."""
    if not isinstance(raw, dict) or not any(type(raw.get(name)) is int for name in names):
        return raw
    return {key: str(value) if key in names and type(value) is int else value for key, value in raw.items()}


def _interaction_problem(row: int, event: Interaction, rules: Rules) -> Rejection | None:
    if event.action not in rules.actions:
        known = ", ".join(sorted(rules.actions))
        return Rejection(row, "action", shown(event.action), "unknown action", f"send one of {known}, or add it with its intensity to SEMANTIDE_ACTIONS")
    unknown = next((signal for signal in event.signals if signal not in rules.actions), None)
    if unknown is not None:
        known = ", ".join(sorted(rules.actions))
        return Rejection(row, "signals", shown(unknown), "unknown action", f"send some of {known}, or add it with its intensity to SEMANTIDE_ACTIONS")
    problem = time_problem(event.time, rules)
    if problem is not None:
        return Rejection(row, "time", str(event.time), *problem)
    if event.value is not None and not -1e308 < event.value < 1e308:
        return Rejection(row, "value", str(event.value), "value is not a finite number", "send a finite number, or leave the field out")
    return None


def check_interactions(raws: Sequence[Any], rules: Rules) -> tuple[list[Interaction], list[Rejection]]:
    """The good rows in their order, and why the others are refused."""
    numbers = ("user", "item", "page", "event_id", "tab", "request_id")
    raws = [_stringified(raw, numbers) for raw in raws]
    good: list[Interaction] = []
    bad: list[Rejection] = []
    try:
        events: list[Interaction | None] = list(_INTERACTIONS.validate_python(raws))
    except ValidationError:
        events = []
        for row, raw in enumerate(raws):
            try:
                events.append(Interaction.model_validate(raw))
            except ValidationError as error:
                events.append(None)
                bad.append(_from_error(row, raw, error))
    for row, event in enumerate(events):
        if event is None:
            continue
        problem = _interaction_problem(row, event, rules)
        if problem is None:
            good.append(event)
        else:
            bad.append(problem)
    bad.sort(key=lambda rejection: rejection.row)
    return good, bad


def interaction_table(events: Sequence[Interaction]) -> pa.Table:
    """Interactions as Arrow columns."""
    columns = {name: [getattr(event, name) for event in events] for name in INTERACTION_SCHEMA.names}
    # What one answer showed is a page, unless the sender says otherwise.
    columns["page"] = [event.page or event.request_id for event in events]
    return pa.table({**columns, "signals": [list(event.signals) or None for event in events]}, schema=INTERACTION_SCHEMA)


def _item_problem(row: int, item: Item, rules: Rules) -> Rejection | None:
    for name, limit in (("title", rules.title_length), ("text", rules.text_length)):
        value = getattr(item, name)
        if len(value) > limit:
            return Rejection(row, name, shown(value), f"{len(value)} characters are more than the {limit} allowed", f"shorten the {name}")
    if len(item.categories) > rules.category_count:
        return Rejection(row, "categories", f"{len(item.categories)} categories", f"more than the {rules.category_count} allowed", "send fewer categories")
    if sum(len(key) + len(value) for key, value in item.attributes.items()) > rules.attributes_length:
        return Rejection(row, "attributes", f"{len(item.attributes)} attributes", f"more than {rules.attributes_length} characters", "shorten the attributes")
    if item.embedding:
        if len(item.embedding) > rules.embedding_length:
            return Rejection(row, "embedding", f"{len(item.embedding)} numbers", f"more than the {rules.embedding_length} allowed", "send a shorter vector")
        if rules.embedding_dimension is not None and len(item.embedding) != rules.embedding_dimension:
            reason = f"the embeddings of this catalogue have {rules.embedding_dimension} numbers"
            return Rejection(
                row,
                "embedding",
                f"{len(item.embedding)} numbers",
                reason,
                f"send {rules.embedding_dimension} numbers, or clear the embeddings of all items first",
            )
    return None


def check_items(raws: Sequence[Any], rules: Rules) -> tuple[list[Item], list[Rejection]]:
    """The good items in their order, and why the others are refused; of two with one id the first is taken."""
    good: list[Item] = []
    bad: list[Rejection] = []
    first_rows: dict[str, int] = {}
    dimension = rules.embedding_dimension
    for row, raw in enumerate(raws):
        raw = _stringified(raw, ("id",))
        try:
            item = Item.model_validate(raw)
        except ValidationError as error:
            bad.append(_from_error(row, raw, error))
            continue
        if dimension is None and item.embedding:
            # The first vector of the batch decides for the rest of it.
            dimension = len(item.embedding)
        problem = _item_problem(row, item, rules if rules.embedding_dimension == dimension else _with_dimension(rules, dimension))
        if problem is None and item.id in first_rows:
            problem = Rejection(
                row, "id", item.id, f"duplicate item id: row {first_rows[item.id]} of this batch has it already", "send each item once in a batch"
            )
        if problem is None:
            first_rows[item.id] = row
            good.append(item)
        else:
            bad.append(problem)
    return good, bad


def _with_dimension(rules: Rules, dimension: int | None) -> Rules:
    return replace(rules, embedding_dimension=dimension)


def item_table(items: Sequence[Item]) -> pa.Table:
    """Items as Arrow columns; a field that the sender left out is null."""

    def column(name: str) -> list[Any]:
        return [getattr(item, name) if name in item.model_fields_set else None for item in items]

    return pa.table(
        {
            "id": [item.id for item in items],
            "title": column("title"),
            "text": column("text"),
            "categories": [None if value is None else list(value) for value in column("categories")],
            "attributes": [None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False) for value in column("attributes")],
            "available": column("available"),
            # Sending an item again brings a deleted one back.
            "deleted": [item.deleted for item in items],
            "embedding": [([] if "embedding" in item.model_fields_set and item.embedding is None else item.embedding) for item in items],
        },
        schema=ITEM_SCHEMA,
    )
