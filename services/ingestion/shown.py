"""Joins exposures and feedback with the lists that serving showed: a row that names its request id gets its place, its propensity, and the variant that answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.schema import INTERACTION_SCHEMA
from semantide.services.ingestion.stream import Entry
from semantide.shared.shown_lists import ShownList

_FILLED = ("position", "propensity", "variant", "variant_share")


def joined(entries: Sequence[Entry], look_up: Callable[[Iterable[str]], Mapping[str, ShownList]]) -> list[Entry]:
    """The entries with all that is known of their rows' requests; what a sender said stays. Without request ids nothing is looked up."""
    named = [entry.table["request_id"].drop_null().unique().to_pylist() if entry.kind == "interactions" else [] for entry in entries]
    wanted = sorted({request_id for ids in named for request_id in ids})
    if not wanted:
        return list(entries)
    shown = look_up(wanted)
    return [replace(entry, table=_filled(entry.table, shown)) if ids else entry for entry, ids in zip(entries, named, strict=True)]


def _filled(table: pa.Table, shown: Mapping[str, ShownList]) -> pa.Table:
    said: dict[str, list[object]] = {name: [] for name in _FILLED}
    places: dict[str, dict[str, int]] = {name: {item: place for place, item in enumerate(each.items)} for name, each in shown.items()}
    for request_id, item in zip(table["request_id"].to_pylist(), table["item"].to_pylist(), strict=True):
        known = shown.get(request_id)
        place = None if known is None else places[request_id].get(item)
        said["position"].append(place)
        said["propensity"].append(None if known is None or place is None else known.propensities[place])
        said["variant"].append(None if known is None else known.variant)
        said["variant_share"].append(None if known is None else known.share)
    for name in _FILLED:
        field = INTERACTION_SCHEMA.field(name)
        column = pc.coalesce(table[name], pa.array(said[name], field.type))
        table = table.set_column(table.schema.get_field_index(name), field, column)
    return table
