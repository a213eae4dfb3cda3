"""The catalog: which semantic id spells which item.

Artifact ``catalogs/...``: ``items.parquet`` (item, c0 .. cL-1), ``catalog.json`` (level sizes, tokenizer digest, dataset),
``report.json``, and the tokenizer's own files. Row order is catalog order; new items are appended, so rows never move.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.shared.errors import Conflict
from semantide.shared.stored_files import CATALOG_AGAIN, whole
from semantide.shared.trie import IntArray, Trie


@dataclass(frozen=True)
class Catalog:
    """Items and their ids.

    Shapes: ``codes`` [N, L], ``0 <= codes[:, l] < level_sizes[l]``.
    """

    item_ids: tuple[str, ...]
    codes: IntArray
    level_sizes: tuple[int, ...]
    tokenizer_digest: str

    @cached_property
    def trie(self) -> Trie:
        """All ids as one trie."""
        return Trie.build(self.codes)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Item id to row."""
        return {item: row for row, item in enumerate(self.item_ids)}

    def __len__(self) -> int:
        return len(self.item_ids)

    def check_model(self, tokenizer_digest: str, level_sizes: tuple[int, ...]) -> None:
        """Refuse a model that was trained for other ids.

        Raises: Conflict.
        """
        if tokenizer_digest != self.tokenizer_digest or tuple(level_sizes) != self.level_sizes:
            raise Conflict(
                f"the model was trained for tokenizer {tokenizer_digest[:12]} with levels {tuple(level_sizes)}, this catalog comes from tokenizer "
                f"{self.tokenizer_digest[:12]} with levels {self.level_sizes}: use the catalog the model was trained for, or train on this one"
            )

    def save(self, folder: Path, **extra: object) -> None:
        """Write ``items.parquet`` and ``catalog.json``; ``extra`` goes into the latter."""
        folder.mkdir(parents=True, exist_ok=True)
        columns: dict[str, object] = {"item": pa.array(self.item_ids, pa.string())}
        for level in range(self.codes.shape[1]):
            columns[f"c{level}"] = pa.array(self.codes[:, level].astype(np.int32))
        pq.write_table(pa.table(columns), folder / "items.parquet")
        header = {"level_sizes": list(self.level_sizes), "tokenizer_digest": self.tokenizer_digest, **extra}
        (folder / "catalog.json").write_text(json.dumps(header, indent=1, sort_keys=True))

    @classmethod
    def load(cls, folder: Path) -> Catalog:
        """Read what ``save`` wrote.

        Raises: Corrupt.
        """
        with whole(folder, "catalog", CATALOG_AGAIN):
            header = json.loads((folder / "catalog.json").read_text())
            table = pq.read_table(folder / "items.parquet")
            levels = len(header["level_sizes"])
            codes = np.stack([table[f"c{level}"].to_numpy() for level in range(levels)], axis=1).astype(np.int64)
            return cls(tuple(table["item"].to_pylist()), codes, tuple(header["level_sizes"]), header["tokenizer_digest"])


_LINEAGES = "semantide:tokenization:lineages"
_CURRENT = "semantide:tokenization:current"
_WAITING = "semantide:tokenization:waiting"
_LINEAGES_KEPT = 4


@dataclass(frozen=True)
class Lineage:
    """A catalog as it was made (``base``) and as it is now, with all items that came later (``catalog``)."""

    tokenizer: str
    base: str
    catalog: str


class Lineages:
    """The catalogs that new items are spelled into, newest tokenizer first, kept in Redis.

    More than the newest: a model trained for an older tokenizer may still serve, and must learn of new items too.
    """

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def all(self) -> list[Lineage]:
        """Newest first."""
        return _lineages(self._broker.get(_LINEAGES))

    def current(self) -> str | None:
        """The newest tokenizer's catalog as it is now."""
        value = self._broker.get(_CURRENT)
        return value.decode() if value else None

    def begin(self, tokenizer: str, base: str) -> None:
        """A catalog was made; the same one made again keeps the items that came later."""

        def change(lineages: list[Lineage]) -> list[Lineage]:
            same = next((entry for entry in lineages if (entry.tokenizer, entry.base) == (tokenizer, base)), Lineage(tokenizer, base, base))
            return [same, *(entry for entry in lineages if entry.tokenizer != tokenizer)][:_LINEAGES_KEPT]

        self._change(change)

    def extend(self, old: str, new: str) -> bool:
        """Put a larger catalog in the place of an older one; False when somebody else was faster."""
        found = False

        def change(lineages: list[Lineage]) -> list[Lineage]:
            nonlocal found
            found = any(entry.catalog == old for entry in lineages)
            return [Lineage(entry.tokenizer, entry.base, new) if entry.catalog == old else entry for entry in lineages]

        self._change(change)
        return found

    def _change(self, change: Callable[[list[Lineage]], list[Lineage]]) -> None:
        def transaction(pipe: Any) -> None:
            lineages = change(_lineages(pipe.get(_LINEAGES)))
            pipe.multi()
            pipe.set(_LINEAGES, json.dumps([[entry.tokenizer, entry.base, entry.catalog] for entry in lineages]))
            if lineages:
                pipe.set(_CURRENT, lineages[0].catalog)

        self._broker.transaction(transaction, _LINEAGES)

    def wait(self, items: Iterable[str]) -> None:
        """Note item artifacts whose items are to be spelled."""
        for ref in items:
            self._broker.zadd(_WAITING, {ref: 0}, nx=True)

    def waiting(self) -> list[str]:
        """Item artifacts noted and not done yet."""
        return [ref.decode() for ref in self._broker.zrange(_WAITING, 0, -1)]

    def done(self, items: Iterable[str]) -> None:
        """Forget item artifacts that have been spelled."""
        for ref in items:
            self._broker.zrem(_WAITING, ref)


def _lineages(value: bytes | None) -> list[Lineage]:
    return [Lineage(*entry) for entry in json.loads(value)] if value else []
