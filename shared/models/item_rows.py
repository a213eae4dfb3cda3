"""Which row of a table each item has, and so how the table grows when items come that it has not seen.

    own         a row an item. An unseen item gets a row of its own, which begins at its first values; the table is as long as the data set
    hash        ``shared_rows`` rows for ever. An item has the row that the hash of its name says, seen before or not, and shares it with whoever else has it
    admission   an item with ``admit_events`` training events is admitted: it gets a row of its own and keeps it in later runs, however rare it becomes. Before that it
                has one of ``shared_rows`` rows by its hash, and its own begins with what that row has learned. The table grows by one row an admitted item

Nothing but names, counts and who was admitted before decides, so every rank, every resumed run and every number of ranks has the same rows. Items that share a row
have one vector and cannot be told apart; how many do is counted.
Legend: N items.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableGrowth:
    """How many rows there are, and whose they are."""

    rows: Literal["own", "hash", "admission"] = "own"
    """A row an item; a fixed number of rows shared by hash; or a row for items with enough events, and shared ones for the rest."""
    shared_rows: int = 0
    """Rows that items share by the hash of their name, for ``hash`` and ``admission``."""
    admit_events: int = 5
    """For ``admission``: training events that give an item a row of its own."""

    def __post_init__(self) -> None:
        if self.rows not in ("own", "hash", "admission"):
            raise ValueError(f"growth.rows is {self.rows!r}: give one of own, hash, admission")
        if self.admit_events < 1 or not 0 <= self.shared_rows <= 1 << 40:
            raise ValueError(f"growth.admit_events is {self.admit_events} and shared_rows {self.shared_rows}: give at least 1, and 0 to {1 << 40}")
        if (self.rows == "own") != (self.shared_rows == 0):
            raise ValueError(f"growth.shared_rows is {self.shared_rows} with rows {self.rows!r}: give 0 with own, and at least 1 with hash and admission")


@dataclass(frozen=True)
class ItemRows:
    """The row of each item of a data set.

    Shapes: ``rows_N``; ``own_N`` bool, whether the row is the item's own.
    """

    rows_N: IntArray
    own_N: npt.NDArray[np.bool_]
    num_rows: int

    @classmethod
    def of(cls, growth: TableGrowth, item_ids: Sequence[str], counts_N: npt.NDArray[np.integer], admitted: Iterable[str] = ()) -> ItemRows:
        """Rows for items with so many training events each; ``admitted`` had rows of their own before."""
        num_items = len(item_ids)
        if growth.rows == "own":
            return cls(np.arange(num_items), np.ones(num_items, dtype=np.bool_), num_items)
        before = frozenset(admitted) if growth.rows == "admission" else frozenset()
        own_N = np.zeros(num_items, dtype=np.bool_)
        if growth.rows == "admission":
            own_N = np.asarray(counts_N) >= growth.admit_events
            if before:
                own_N |= np.fromiter((item in before for item in item_ids), np.bool_, num_items)
        hashes_N = np.fromiter((name_hash(item) for item in item_ids), np.uint64, num_items)
        rows_N = (hashes_N % np.uint64(growth.shared_rows)).astype(np.int64)
        rows_N[own_N] = growth.shared_rows + np.arange(own_N.sum())
        return cls(rows_N, own_N, growth.shared_rows + int(own_N.sum()))

    @property
    def plain(self) -> bool:
        """Whether no row is shared, and item i has row i."""
        return self.num_rows == len(self.rows_N) and bool(self.own_N.all())

    def figures(self, counts_N: npt.NDArray[np.integer]) -> dict[str, float]:
        """How large the table is, and how many items, and what share of the training events, have a row that is another item's too."""
        together_N = np.bincount(self.rows_N, minlength=self.num_rows)[self.rows_N] > 1
        events = int(np.sum(counts_N))
        return {
            "rows": self.num_rows,
            "items": len(self.rows_N),
            "own_rows": int(self.own_N.sum()),
            "colliding_items": int(together_N.sum()),
            "colliding_events_share": float(np.sum(np.asarray(counts_N)[together_N]) / events) if events else 0.0,
        }


def name_hash(name: str) -> int:
    """64 bits of a name, the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
