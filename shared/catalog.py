"""The catalog: which semantic id spells which item.

Artifact ``catalogs/...``: ``items.parquet`` (item, c0 .. cL-1), ``catalog.json`` (level sizes, tokenizer digest, dataset),
``report.json``, and the tokenizer's own files. Row order is catalog order; new items are appended, so rows never move.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from semantide.shared.errors import Conflict
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
        """Read what ``save`` wrote."""
        header = json.loads((folder / "catalog.json").read_text())
        table = pq.read_table(folder / "items.parquet")
        levels = len(header["level_sizes"])
        codes = np.stack([table[f"c{level}"].to_numpy() for level in range(levels)], axis=1).astype(np.int64)
        return cls(tuple(table["item"].to_pylist()), codes, tuple(header["level_sizes"]), header["tokenizer_digest"])
