"""Tables for serving as a base and what changed since: a base and its deltas give the full table bit for bit.

    base      all ids of a table and their vectors
    delta 1   ids whose vectors changed or came since the base, and ids that were deleted
    delta 2   the same since delta 1, ...

Each is a folder with ``rows.safetensors`` (``ids_N`` ascending, ``vectors_ND``, ``deleted_M`` ascending) and ``snapshot.json``. A link carries the number in its chain,
the digest of the link before it, and the digest of the table that it leads to: a missing, doubled, torn or foreign delta is refused before anything is
changed, and the table that comes out is the one that was meant. Rows may come from several ranks; they are put in order of ids.
Legend: N rows, M deleted ids, D features.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from semantide.shared.artifacts import digest_file
from semantide.shared.errors import Conflict, Corrupt, NotFound

_ROWS, _CARD = "rows.safetensors", "snapshot.json"


@dataclass(frozen=True)
class TableSnapshot:
    """A whole table at one moment.

    Shapes: ``ids_N`` int64, ascending, each once; ``vectors_ND``. ``number`` counts the deltas since the base, ``link`` is the digest of the last one.
    """

    ids_N: Tensor
    vectors_ND: Tensor
    number: int
    link: str

    @classmethod
    def read(cls, base: Path, deltas: Sequence[Path] = ()) -> TableSnapshot:
        """A base with its deltas, oldest first.

        Raises: Corrupt for bytes that are not what was written, Conflict for a delta that is not the next one.
        """
        card, rows = _opened(base)
        if card["number"] != 0:
            raise Conflict(f"{base} is delta {card['number']} of a table and no base: begin with the base")
        snapshot = cls(rows["ids_N"], rows["vectors_ND"], 0, _link(base))
        snapshot._check(base, card)
        for delta in deltas:
            snapshot = snapshot.followed_by(delta)
        return snapshot

    def followed_by(self, delta: Path) -> TableSnapshot:
        """The table after one more delta; this one stays as it is.

        Raises: Corrupt for bytes that are not what was written, Conflict for a delta that is not the next one.
        """
        card, rows = _opened(delta)
        if card["number"] != self.number + 1:
            what = "is there already" if 0 < card["number"] <= self.number else "does not follow"
            raise Conflict(f"{delta} is delta {card['number']} and the table stands at {self.number}, so it {what}: give delta {self.number + 1} next")
        if card["before"] != self.link:
            raise Conflict(f"{delta} follows another table than this one ({card['before'][:12]}... against {self.link[:12]}...): begin with its own base")
        snapshot = _replaced(self, rows["ids_N"], rows["vectors_ND"], rows["deleted_M"], _link(delta))
        snapshot._check(delta, card)
        return snapshot

    def _check(self, folder: Path, card: dict[str, Any]) -> None:
        if table_digest(self.ids_N, self.vectors_ND) != card["table"]:
            raise Corrupt(f"{folder} does not lead to the table that it was written for: fetch it and what it follows again, or begin with a new base")


class TableChain:
    """A base and its deltas in one folder, ``000000`` and on: training appends, serving reads what came since it last looked.

    Each is written aside and renamed, so that a reader on another machine sees whole ones only and a kill leaves none half there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, ids_N: Tensor, vectors_ND: Tensor) -> TableSnapshot:
        """Write the base.

        Raises: Conflict where there is one already.
        """
        if self._links():
            raise Conflict(f"{self.folder} has a base already: append to it, or give another folder")
        return self._put(0, lambda aside: write_base(aside, ids_N, vectors_ND))

    def append(self, before: TableSnapshot, ids_N: Tensor, vectors_ND: Tensor, deleted_M: Tensor) -> TableSnapshot:
        """Write the next delta, see ``write_delta``.

        Raises: Conflict when ``before`` is not the newest.
        """
        if before.number + 1 != len(self._links()):
            raise Conflict(f"{self.folder} stands at {len(self._links()) - 1} and this delta follows {before.number}: read the chain first, then append")
        return self._put(before.number + 1, lambda aside: write_delta(aside, before, ids_N, vectors_ND, deleted_M))

    def read(self, known: TableSnapshot | None = None) -> TableSnapshot:
        """The newest table; ``known`` is what was read before, and only what came since is read then.

        Raises: Corrupt, Conflict as ``TableSnapshot``; NotFound for a folder without a base.
        """
        links = self._links()
        if not links:
            raise NotFound(f"{self.folder} has no table snapshot: train one, or give the folder of one")
        snapshot = TableSnapshot.read(links[0]) if known is None else known
        for delta in links[1:] if known is None else [link for link in links if int(link.name) > known.number]:
            snapshot = snapshot.followed_by(delta)
        return snapshot

    def _links(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("[0-9]*") if path.name.isdigit())

    def _put(self, number: int, write: Callable[[Path], TableSnapshot]) -> TableSnapshot:
        aside = self.folder / f".incoming-{number:06d}"
        shutil.rmtree(aside, ignore_errors=True)
        snapshot = write(aside)
        aside.rename(self.folder / f"{number:06d}")
        return snapshot


def write_base(folder: Path, ids_N: Tensor, vectors_ND: Tensor) -> TableSnapshot:
    """Write a whole table.

    Raises: ValueError for ids that come twice or do not match the vectors.
    """
    ids_N, vectors_ND = _sorted(ids_N, vectors_ND)
    card = {"number": 0, "before": "", "table": table_digest(ids_N, vectors_ND)}
    return TableSnapshot(ids_N, vectors_ND, 0, _written(folder, card, ids_N, vectors_ND, ids_N.new_empty(0)))


def write_delta(folder: Path, before: TableSnapshot, ids_N: Tensor, vectors_ND: Tensor, deleted_M: Tensor) -> TableSnapshot:
    """Write what changed since ``before``: rows that were touched or are new, and ids that are gone. What did not really change is left out.

    Raises: ValueError for ids that come twice, do not match the vectors, or are both changed and deleted.
    """
    ids_N, vectors_ND = _sorted(ids_N, vectors_ND)
    deleted_M = deleted_M.cpu().long().unique()
    if both := sorted(set(ids_N.tolist()) & set(deleted_M.tolist())):
        raise ValueError(f"id {both[0]} is changed and deleted in one delta: give only what it is in the end")
    if len(ids_N) and (vectors_ND.shape[1:] != before.vectors_ND.shape[1:] or vectors_ND.dtype != before.vectors_ND.dtype):
        raise ValueError(f"vectors {tuple(vectors_ND.shape)} {vectors_ND.dtype} for a table {tuple(before.vectors_ND.shape)} {before.vectors_ND.dtype}")
    place_N = torch.searchsorted(before.ids_N, ids_N).clamp_max(max(len(before.ids_N) - 1, 0))
    if len(before.ids_N):
        known_N = before.ids_N[place_N] == ids_N
        # Compared as bytes: -0.0 is not 0.0 here.
        same_N = known_N & (_bytes(before.vectors_ND[place_N]) == _bytes(vectors_ND)).all(1)
        ids_N, vectors_ND = ids_N[~same_N], vectors_ND[~same_N]
    deleted_M = deleted_M[torch.isin(deleted_M, before.ids_N)]
    after = _replaced(before, ids_N, vectors_ND, deleted_M, "")
    card = {"number": after.number, "before": before.link, "table": table_digest(after.ids_N, after.vectors_ND)}
    return TableSnapshot(after.ids_N, after.vectors_ND, after.number, _written(folder, card, ids_N, vectors_ND, deleted_M))


def table_digest(ids_N: Tensor, vectors_ND: Tensor) -> str:
    """Hex sha256 of a table's ids, types and vectors, in order of ids."""
    sha = hashlib.sha256(f"{vectors_ND.dtype} {list(vectors_ND.shape)}".encode())
    sha.update(ids_N.numpy().tobytes())
    for part in _bytes(vectors_ND).split(1 << 16):
        sha.update(part.numpy().tobytes())
    return sha.hexdigest()


def joined(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ids and vectors of several ranks as those of one table."""
    ids, vectors = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(vectors)


def _replaced(before: TableSnapshot, ids_N: Tensor, vectors_ND: Tensor, deleted_M: Tensor, link: str) -> TableSnapshot:
    stays_N = ~torch.isin(before.ids_N, torch.cat([ids_N, deleted_M]))
    changed = vectors_ND if len(ids_N) else before.vectors_ND[:0]
    ids, vectors = _sorted(torch.cat([before.ids_N[stays_N], ids_N]), torch.cat([before.vectors_ND[stays_N], changed]))
    return TableSnapshot(ids, vectors, before.number + 1, link)


def _sorted(ids_N: Tensor, vectors_ND: Tensor) -> tuple[Tensor, Tensor]:
    if ids_N.ndim != 1 or vectors_ND.ndim != 2 or len(ids_N) != len(vectors_ND):
        raise ValueError(f"ids {tuple(ids_N.shape)} for vectors {tuple(vectors_ND.shape)}: give [N] and [N, D]")
    ids_N, order_N = ids_N.detach().cpu().long().sort()
    twice_N = ids_N[1:] == ids_N[:-1]
    if bool(twice_N.any()):
        raise ValueError(f"id {int(ids_N[1:][twice_N][0])} comes twice: give each id once")
    return ids_N.contiguous(), vectors_ND.detach().cpu()[order_N].contiguous()


def _bytes(vectors_ND: Tensor) -> Tensor:
    return vectors_ND.contiguous().view(torch.uint8)


def _written(folder: Path, card: dict[str, Any], ids_N: Tensor, vectors_ND: Tensor, deleted_M: Tensor) -> str:
    folder.mkdir(parents=True)
    save_file({"ids_N": ids_N, "vectors_ND": vectors_ND.clone(), "deleted_M": deleted_M}, str(folder / _ROWS))
    # Last: without it the folder is no snapshot.
    (folder / _CARD).write_text(json.dumps({**card, "rows": digest_file(folder / _ROWS)}, sort_keys=True))
    return _link(folder)


def _opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        card = json.loads((folder / _CARD).read_text())
        if digest_file(folder / _ROWS) == card["rows"]:
            return card, load_file(str(folder / _ROWS))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Corrupt(f"{folder} is no table snapshot ({error}): fetch it again, or begin with a new base") from error
    raise Corrupt(f"{folder / _ROWS} does not have the digest of its {_CARD}: fetch it again, or begin with a new base")


def _link(folder: Path) -> str:
    return digest_file(folder / _CARD)
