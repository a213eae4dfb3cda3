"""HTTP door: catalogs, their reports, and the way from an item to its id and back."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.services.tokenization.spelling import branch_rows, prefix_rows
from semantide.shared.catalog import Catalog, Lineages
from semantide.shared.errors import NotFound
from semantide.shared.http import APIRouter, Query
from semantide.shared.room import Room

_LOADED = 2
_EXAMPLES = 3


class _Loaded:
    """The catalogs read last; a catalog never changes, so neither does what is kept."""

    def __init__(self, room: Room) -> None:
        self._room, self._lock = room, threading.Lock()
        self._kept: OrderedDict[str, tuple[Catalog, pa.Table]] = OrderedDict()

    def get(self, ref: str) -> tuple[Catalog, pa.Table]:
        with self._lock:
            if ref not in self._kept:
                folder = self._room.store.get(ref)
                self._kept[ref] = Catalog.load(folder), pq.read_table(folder / "item_info.parquet", columns=["title"])
                while len(self._kept) > _LOADED:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(ref)
            return self._kept[ref]


def prefix_of(catalog: Catalog, codes: str) -> list[int]:
    """The numbers of ``12-250-3``.

    Raises: ValueError.
    """
    parts = codes.split("-")
    if len(parts) > len(catalog.level_sizes) or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ValueError(f"codes {codes!r}: give one to {len(catalog.level_sizes)} numbers joined by '-', as in 12-250-3")
    return [int(part) for part in parts]


def build(room: Room) -> APIRouter:
    """The routes of this room."""
    router = APIRouter(prefix="/v1/catalogs", tags=["catalogs"])
    lineages = Lineages(room.broker)
    loaded = _Loaded(room)

    def resolve(ref: str) -> str:
        if ref == "current":
            current = lineages.current()
            if current is None:
                raise NotFound("there is no catalog yet: run a tokenize job on a data set")
            return current
        return ref if ref.startswith("catalogs/") else f"catalogs/{ref}"

    @router.get("", summary="All catalogs; the current one is that of the newest tokenizer")
    def catalogs() -> dict[str, Any]:
        current = lineages.current()
        rows = []
        for ref in room.store.list("catalogs"):
            config = room.store.manifest(ref)["config"]
            figures = {name: config.get(name) for name in ("num_items", "level_sizes", "tokenizer_digest", "extends", "dataset")}
            rows.append({"catalog": ref, "current": ref == current, **figures})
        return {"current": current, "catalogs": rows}

    @router.get("/current/items/{item:path}", summary="The semantic id of an item")
    def item_codes(item: str) -> dict[str, Any]:
        ref = resolve("current")
        catalog, info = loaded.get(ref)
        row = catalog.row_of.get(item)
        if row is None:
            raise NotFound(f"item {item!r} is not in the current catalog {ref}: it gets an id when it is sent to POST /v1/items")
        return {
            "catalog": ref,
            "item": item,
            "title": info["title"][row].as_py(),
            "codes": catalog.codes[row].tolist(),
            "level_sizes": list(catalog.level_sizes),
        }

    @router.get("/current/codes/{codes}", summary="The items whose semantic id begins with these codes, as in 12-250-3")
    def items_below(codes: str, limit: int = Query(100, ge=1, le=1000), offset: int = Query(0, ge=0)) -> dict[str, Any]:
        ref = resolve("current")
        catalog, info = loaded.get(ref)
        prefix = prefix_of(catalog, codes)
        rows = prefix_rows(catalog, prefix)
        page = rows[offset : offset + limit].tolist()
        items = [{"item": catalog.item_ids[row], "title": info["title"][row].as_py(), "codes": catalog.codes[row].tolist()} for row in page]
        return {"catalog": ref, "prefix": prefix, "total": len(rows), "items": items}

    @router.get("/current/tree", summary="The codes that may follow a prefix of semantic ids, with how many items each has; without a prefix the first ones")
    def tree(prefix: str = Query("", max_length=200)) -> dict[str, Any]:
        ref = resolve("current")
        catalog, info = loaded.get(ref)
        begin = prefix_of(catalog, prefix) if prefix else []
        branches = [
            {"code": code, "items": len(rows), "examples": [info["title"][int(row)].as_py() or catalog.item_ids[row] for row in rows[:_EXAMPLES]]}
            for code, rows in branch_rows(catalog, begin)
        ]
        return {"catalog": ref, "prefix": begin, "level_sizes": list(catalog.level_sizes), "branches": branches}

    @router.get("/current/search", summary="Items whose id or title has these letters, whichever case they are in")
    def search(text: str = Query(min_length=1, max_length=256), limit: int = Query(20, ge=1, le=1000)) -> dict[str, Any]:
        ref = resolve("current")
        catalog, info = loaded.get(ref)
        wanted = text.lower()
        found = pc.or_(
            *(pc.match_substring(pc.utf8_lower(pc.fill_null(column, "")), wanted) for column in (pa.chunked_array([pa.array(catalog.item_ids)]), info["title"]))
        )
        rows = np.flatnonzero(found.to_numpy())
        page = [{"item": catalog.item_ids[row], "title": info["title"][int(row)].as_py(), "codes": catalog.codes[row].tolist()} for row in rows[:limit]]
        return {"catalog": ref, "total": len(rows), "items": page}

    @router.get("/{ref:path}/report", summary="Collisions, utilisation, entropy and verdict; the reference may be 'current'")
    def report(ref: str) -> dict[str, Any]:
        name = resolve(ref)
        figures: dict[str, Any] = json.loads(room.store.text(name, "report.json"))
        return {"catalog": name, **figures}

    return router
