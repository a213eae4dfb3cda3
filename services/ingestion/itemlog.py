"""The current state of every item: the latest version of each field wins, deletions stay known.

A version is the moment of acceptance: ``milliseconds << 20 | sequence`` of the stream entry, or of the import's start.
An older version that arrives late changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.schema import ITEM_SCHEMA

# What other rooms read: the same columns, the id under the name that every artifact gives it.
ARTIFACT_SCHEMA = pa.schema([pa.field("item", pa.string()), *list(ITEM_SCHEMA)[1:]])

_COLUMNS = "id, title, text, categories, attributes, available, deleted, embedding"
_UPSERT = """
INSERT INTO items (id, version, title, text, categories, attributes, available, deleted, embedding, changed)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1)
ON CONFLICT (id) DO UPDATE SET
    version = excluded.version,
    title = coalesce(excluded.title, title), text = coalesce(excluded.text, text),
    categories = coalesce(excluded.categories, categories), attributes = coalesce(excluded.attributes, attributes),
    available = coalesce(excluded.available, available), deleted = coalesce(excluded.deleted, deleted),
    embedding = coalesce(excluded.embedding, embedding), changed = items.changed + 1
WHERE excluded.version > items.version
"""


@dataclass(frozen=True)
class Change:
    """An item that was changed, and the state of its change counter when it was read."""

    id: str
    changed: int


def version_of_entry(entry: str) -> int:
    """The version that a stream entry's id (``milliseconds-sequence``) stands for."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds) << 20 | min(int(sequence or 0), (1 << 20) - 1)


class ItemLog:
    """Writes and reads the items of one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def append(self, table: pa.Table, version: int) -> list[int]:
        """Take the rows over, inside the manifest's open transaction; the positions of rows whose id this version already had.

        A row that comes back with the version of an earlier run (a replay) changes nothing.
        """
        connection = self.manifest.connection
        assert connection.in_transaction, "append belongs into Manifest.writing()"
        repeated = []
        for row, record in enumerate(_records(table, version)):
            stored = connection.execute("SELECT version FROM items WHERE id = ?", (record[0],)).fetchone()
            if stored is not None and stored[0] == version:
                repeated.append(row)
            else:
                connection.execute(_UPSERT, record)
        return repeated

    def changes(self, limit: int = 1_000_000) -> list[Change]:
        """Items whose change was not yet announced."""
        return [
            Change(*row) for row in self.manifest.connection.execute("SELECT id, changed FROM items WHERE changed > 0 ORDER BY id LIMIT ?", (limit,)).fetchall()
        ]

    def announced(self, changes: Sequence[Change]) -> None:
        """Remember that these changes were announced; an item that changed again meanwhile stays due."""
        with self.manifest.writing() as connection:
            connection.executemany("UPDATE items SET changed = 0 WHERE id = ? AND changed = ?", [(change.id, change.changed) for change in changes])

    def state(self, ids: Sequence[str]) -> pa.Table:
        """The current state of some items, in the given order; unknown ids are left out."""
        rows: list[tuple[object, ...]] = []
        for begin in range(0, len(ids), 500):
            part = list(ids[begin : begin + 500])
            found = {row[0]: row for row in self.manifest.connection.execute(f"SELECT {_COLUMNS} FROM items WHERE id IN ({','.join('?' * len(part))})", part)}
            rows.extend(found[item] for item in part if item in found)
        return _table(rows)

    def tables(self, rows_per_table: int = 50_000) -> Iterator[pa.Table]:
        """All items in order of their id, deleted ones too."""
        last = ""
        while rows := self.manifest.connection.execute(f"SELECT {_COLUMNS} FROM items WHERE id > ? ORDER BY id LIMIT ?", (last, rows_per_table)).fetchall():
            last = rows[-1][0]
            yield _table(rows)

    def embedding_dimension(self) -> int | None:
        """How many numbers the stored embeddings have, None where no item has one."""
        row = self.manifest.connection.execute("SELECT length(embedding) FROM items WHERE deleted = 0 AND length(embedding) > 0 LIMIT 1").fetchone()
        return int(row[0]) // 4 if row else None

    def unavailable(self) -> list[str]:
        """Ids of all items that must not be recommended."""
        return [row[0] for row in self.manifest.connection.execute("SELECT id FROM items WHERE deleted = 1 OR available = 0 ORDER BY id")]

    def counts(self) -> dict[str, int]:
        """How many items there are, in their states."""
        total, deleted, unavailable = self.manifest.connection.execute(
            "SELECT count(*), coalesce(sum(deleted), 0), coalesce(sum(deleted = 0 AND coalesce(available, 1) = 0), 0) FROM items"
        ).fetchone()
        return {"items": total - deleted, "unavailable": unavailable, "deleted": deleted}

    def write(self, changes: Sequence[Change], folder: Path) -> pa.Table:
        """Write ``items.parquet`` with the changed items' state and return it."""
        table = self.state([change.id for change in changes])
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / "items.parquet", compression="zstd")
        return table


def _records(table: pa.Table, version: int) -> Iterator[tuple[object, ...]]:
    columns = {name: table[name].to_pylist() for name in ("id", "title", "text", "categories", "attributes", "available", "deleted")}
    vectors = table["embedding"].combine_chunks()
    for row, item in enumerate(columns["id"]):
        vector = vectors[row]
        categories = columns["categories"][row]
        yield (
            item,
            version,
            columns["title"][row],
            columns["text"][row],
            None if categories is None else json.dumps(categories, ensure_ascii=False),
            columns["attributes"][row],
            columns["available"][row],
            bool(columns["deleted"][row]),
            np.asarray(vector.values.to_numpy(zero_copy_only=False), dtype="<f4").tobytes() if vector.is_valid else None,
        )


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    columns: list[tuple[object, ...]] = list(zip(*rows, strict=True)) if rows else [()] * len(ARTIFACT_SCHEMA)
    ids, titles, texts, categories, attributes, available, deleted, vectors = columns
    return pa.table(
        {
            "item": ids,
            "title": [value or "" for value in titles],
            "text": [value or "" for value in texts],
            "categories": [json.loads(str(value)) if value else [] for value in categories],
            "attributes": [value or "{}" for value in attributes],
            "available": [value is None or bool(value) for value in available],
            "deleted": [bool(value) for value in deleted],
            "embedding": [np.frombuffer(value, dtype="<f4") if isinstance(value, bytes) and value else None for value in vectors],
        },
        schema=ARTIFACT_SCHEMA,
    )
