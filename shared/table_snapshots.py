"""Item tables that grow older under serving's eyes: a stored model and what changed since give the newest table bit for bit.

    models/sha256-A        a whole retriever: the base
    snapshots/sha256-B     rows that changed or came since A, items that are gone, and the dense weights of that moment
    snapshots/sha256-C     the same since B, ...

A link is an artifact: ``rows-*.parquet`` (item, vector) from one or several ranks, ``snapshot.json``, and the rest of a model but for its vectors. ``snapshot.json`` names
the artifact before it, the number of links since the base, and the digest of the table that it leads to: a missing, doubled, torn or foreign link is refused
before anything is changed, and the table that comes out is the one that was meant. The digest of a table is the sum of its rows' digests, so that a
writer who has some of the rows and a reader who got some of them need no others; it finds damage and mistakes, and is no defence against forgery.
Legend: N rows, M deleted items, D features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.first_rows import hashed
from semantide.shared.models.item_rows import name_hash
from semantide.shared.models.retriever import ItemVectors

SNAPSHOTS = "snapshots"
"""Kind of the artifacts that are links."""
CARD = "snapshot.json"
_LONGEST_CHAIN = 10_000
_ROWS = 1 << 16

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TableSnapshot:
    """A whole table at one moment: the items, their vectors, which artifact it stands at, and how many links that is from the base.

    Shapes: ``vectors_ND``.
    """

    item_ids: tuple[str, ...]
    vectors_ND: Tensor
    ref: str
    number: int = 0

    @classmethod
    def load(cls, get: Callable[[str], Path], ref: str, known: TableSnapshot | None = None) -> TableSnapshot:
        """The table at an artifact, a model or a link; of the links from ``known``, where that is on the way, only what came since is read.

        Raises: NotFound for an artifact that is not there, Corrupt for one that is damaged, Conflict for links that do not follow each other.
        """
        links: list[tuple[str, Path]] = []
        at = ref
        while known is None or at != known.ref:
            folder = get(at)
            if not at.startswith(f"{SNAPSHOTS}/"):
                known = cls.of_model(folder, at)
                break
            links.append((at, folder))
            if len(links) > _LONGEST_CHAIN:
                raise Corrupt(f"{ref} is more than {_LONGEST_CHAIN} links from a whole model: publish a new base")
            at = str(_card(folder)["before"])
        snapshot = known
        for at, folder in reversed(links):
            snapshot = snapshot.followed_by(folder, at)
        return snapshot

    @classmethod
    def of_model(cls, folder: Path, ref: str) -> TableSnapshot:
        """The table of a stored retriever.

        Raises: NotFound, Corrupt.
        """
        table = ItemVectors.load(folder)
        return cls(table.item_ids, table.vectors_ND, ref)

    def followed_by(self, folder: Path, ref: str) -> TableSnapshot:
        """The table after one more link; this one stays as it is.

        Raises: Corrupt for bytes that are not what was written, Conflict for a link that is not the next one.
        """
        card = _card(folder)
        if card["before"] != self.ref:
            raise Conflict(
                f"{ref} follows {str(card['before'])[:24]}... and the table stands at {self.ref[:24]}...: give the links in order, each once, from their own base"
            )
        if card["number"] != self.number + 1:
            raise Conflict(f"{ref} is link {card['number']} from its base and the table is at {self.number}: begin with its own base")
        names, vectors_KD = _rows(folder, self.vectors_ND.shape[1])
        after = self._replaced(names, vectors_KD, [str(name) for name in card["deleted"]], ref)
        if after.digest != card["table"]:
            raise Corrupt(f"{folder} does not lead to the table that it was written for: fetch it and what it follows again, or promote a whole model")
        return after

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        """Row of each item."""
        return {item: row for row, item in enumerate(self.item_ids)}

    @cached_property
    def digests_N2(self) -> Words:
        """Digest of each row."""
        return row_digests(self.item_ids, self.vectors_ND)

    @cached_property
    def digest(self) -> str:
        """Of the whole table, in whatever order its rows are."""
        return told(total(self.digests_N2))

    def _replaced(self, names: Sequence[str], vectors_KD: Tensor, deleted: Sequence[str], ref: str) -> TableSnapshot:
        twice = len(names) + len(deleted) - len({*names, *deleted})
        gone = [name for name in deleted if name not in self.row_of]
        if twice or gone:
            raise Corrupt(f"{ref} names {f'{twice} items twice' if twice else f'{gone[0]!r} as deleted, which is not there'}: publish a new base")
        digests_K2 = row_digests(names, vectors_KD)
        places = np.fromiter((self.row_of.get(name, -1) for name in names), np.int64, len(names))
        known, fresh = places >= 0, places < 0
        ids, row_of = self.item_ids, self.row_of
        vectors_ND, digests_N2 = self.vectors_ND.clone(), self.digests_N2.copy()
        at = torch.from_numpy(places[known])
        vectors_ND[at], digests_N2[places[known]] = vectors_KD[torch.from_numpy(known)], digests_K2[known]
        if fresh.any():
            ids = (*ids, *(name for name, new in zip(names, fresh.tolist(), strict=True) if new))
            vectors_ND = torch.cat([vectors_ND, vectors_KD[torch.from_numpy(fresh)]])
            digests_N2 = np.concatenate([digests_N2, digests_K2[fresh]])
        if deleted:
            stays = np.ones(len(ids), dtype=np.bool_)
            stays[[row_of[name] for name in deleted]] = False
            ids = tuple(name for name, here in zip(ids, stays.tolist(), strict=True) if here)
            vectors_ND, digests_N2 = vectors_ND[torch.from_numpy(stays)], digests_N2[stays]
        after = TableSnapshot(ids, vectors_ND, ref, self.number + 1)
        after.__dict__["digests_N2"] = digests_N2
        if ids is self.item_ids:
            after.__dict__["row_of"] = row_of
        return after


class RowsFile:
    """A file of rows, written some at a time; ``close`` it."""

    def __init__(self, path: Path, size: int) -> None:
        self._writer = pq.ParquetWriter(path, pa.schema([("item", pa.string()), ("vector", pa.list_(pa.float32(), size))]))

    def add(self, names: Sequence[str], vectors_KD: Tensor) -> None:
        """Some rows more."""
        flat = pa.array(vectors_KD.detach().float().cpu().numpy().ravel())
        vectors = pa.FixedSizeListArray.from_arrays(flat, vectors_KD.shape[1])
        self._writer.write_table(pa.table({"item": pa.array(list(names), pa.string()), "vector": vectors}), row_group_size=_ROWS)

    def close(self) -> None:
        """Write what makes the file whole."""
        self._writer.close()


def write_card(folder: Path, before: str, number: int, table: str, deleted: Iterable[str], **more: Any) -> None:
    """Finish a link in a folder with its ``rows-*.parquet``: it follows ``before`` as number ``number`` from the base, and leads to the table of that digest."""
    card = {**more, "before": before, "number": number, "table": table, "deleted": sorted(deleted)}
    (folder / CARD).write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")


def row_digests(names: Sequence[str], vectors_ND: Tensor) -> Words:
    """Two words for each row, of its item's name and its vector's bits: [N, 2]."""
    bits_ND = vectors_ND.detach().float().cpu().contiguous().numpy().view(np.uint32)
    digests_N2 = np.empty((len(names), 2), dtype=np.uint64)
    keys_D = hashed(np.arange(1, bits_ND.shape[1] + 1, dtype=np.uint64))
    for begin in range(0, len(names), _ROWS):
        some = slice(begin, begin + _ROWS)
        own = np.fromiter((name_hash(name) for name in names[some]), np.uint64)
        mixed = hashed((bits_ND[some].astype(np.uint64) << np.uint64(32)) ^ keys_D).sum(1, dtype=np.uint64)
        digests_N2[some, 0] = hashed(mixed ^ own)
        digests_N2[some, 1] = hashed(mixed + hashed(own))
    return digests_N2


def total(digests_N2: Words) -> tuple[int, int]:
    """The sum of rows' digests, which is that of their table."""
    first, second = digests_N2.sum(0, dtype=np.uint64).tolist()
    return first, second


def told(sums: tuple[int, int]) -> str:
    """A table's digest in hex; sums of several ranks' rows are added up before."""
    return "".join(f"{number % (1 << 64):016x}" for number in sums)


def _card(folder: Path) -> dict[str, Any]:
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text())
        if all(name in card for name in ("before", "number", "table", "deleted")):
            return card
    except (OSError, ValueError) as error:
        raise Corrupt(f"{folder} is no table snapshot ({error}): fetch it again, or promote a whole model") from error
    raise Corrupt(f"{folder / CARD} lacks fields: fetch it again, or promote a whole model")


def _rows(folder: Path, size: int) -> tuple[list[str], Tensor]:
    names: list[str] = []
    vectors: list[Tensor] = [torch.zeros(0, size)]
    try:
        for path in sorted(folder.glob("rows-*.parquet")):
            table = pq.read_table(path, columns=["item", "vector"]).combine_chunks()
            names += table["item"].to_pylist()
            if table.num_rows:
                flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                vectors.append(torch.from_numpy(flat.astype(np.float32).reshape(table.num_rows, -1)))
        return names, torch.cat(vectors)
    except (pa.ArrowException, OSError, KeyError, ValueError, RuntimeError) as error:
        raise Corrupt(f"{folder} has rows that cannot be read ({error}): fetch it again, or promote a whole model") from error
