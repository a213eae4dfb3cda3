"""Tells serving of the newest table while a run goes on: a stored model first, and then links that hold what has changed.

    step 1000   models/...      the whole retriever
    step 1500   snapshots/...   items whose vectors changed since, and the dense weights
    step 2000   snapshots/...

A run that goes on from a stored retriever begins with a link to that one, which also says which of its items are gone. A link is a function of the run's state at its step
and of the one before it, so a run that is resumed writes the same links again, and they are the same artifacts. Rows are written by the rank that reads
them, some at a time; no rank has the table.
Legend: N items, K some of them, D vector size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semantide.services.training.retrieval_objective import ITEMS, NextItemSampled
from semantide.services.training.world import World
from semantide.shared.errors import SemantideError, StoreUnavailable
from semantide.shared.table_snapshots import RowsFile, Words, row_digests, told, total, write_card

LINKS = 64
"""Links after which a whole model is stored again, so that a reader who comes late has not all of a run to read."""
_CHAINS = 2
"""Bases whose links are kept, so that a reader who is late finds what it looks for."""
_ROWS = 1 << 16


@dataclass(frozen=True)
class Link:
    """Where serving's table stands: an artifact, and how many links it is from its base. Nothing before the first."""

    ref: str = ""
    number: int = 0


@dataclass(frozen=True)
class Store:
    """What the leading rank does with a publication: store a folder as a link, take an artifact away, tell serving of one, and tell of a failure."""

    put: Callable[[Path, int], str]
    drop: Callable[[str], None]
    tell: Callable[[str, int], None]
    failed: Callable[[int, str], None]


class Publication:
    """Makes the links of one run. All ranks call ``publish``, at the same steps, while nobody is at the tables, which are settled."""

    def __init__(
        self,
        world: World,
        objective: NextItemSampled,
        item_ids: Sequence[str],
        folder: Path,
        base: Callable[[int], str],
        store: Store,
        *,
        begun: Link = Link(),
        begun_items: Sequence[str] = (),
    ) -> None:
        """``base`` stores a whole model, on all ranks; ``begun`` is the retriever that the run goes on from, with its items."""
        self._world, self._objective, self._item_ids, self._folder = world.channel(), objective, item_ids, folder
        self._base, self._store, self.begun = base, store, begun
        known = frozenset(begun_items)
        self._fresh_N = torch.tensor([item not in known for item in item_ids], dtype=torch.bool) if begun.ref else None
        self._gone = sorted(known.difference(item_ids)) if begun.ref else []
        shards = getattr(objective.tables[ITEMS], "shards", None)
        self._group = 1 if shards is None else shards.size
        self._writes = world.rank < self._group  # the other groups' copies are alike
        self._mine = torch.arange(world.rank, len(item_ids), self._group) if self._writes else torch.zeros(0, dtype=torch.int64)
        self._digests: Words | None = None
        self._told: list[list[str]] = [[]]

    def publish(self, step: int, link: Link, changed: Mapping[str, Tensor]) -> Link | None:
        """Store and tell what is new since ``link``: ``changed`` are this rank's logs. None where that failed; what changed is then still to be told.

        Raises: RankLost.
        """
        new = self._whole(step) if not link.ref or link.number >= LINKS else self._link(step, link, changed)
        if new is not None and self._world.leads:
            self._store.tell(new.ref, step)
            self._keep(new)
        return new

    def _keep(self, new: Link) -> None:
        """Note what was told, and take away the links that serving has long left behind. Whole models stay, as any that was stored: somebody may have promoted one."""
        if not new.number:
            self._told.append([])
        else:
            self._told[-1].append(new.ref)
        for ref in (ref for chain in self._told[:-_CHAINS] for ref in chain):
            with suppress(OSError, StoreUnavailable):
                self._store.drop(ref)
        del self._told[:-_CHAINS]

    def _whole(self, step: int) -> Link | None:
        self._digests = None
        ref, failed = "", None
        try:
            ref = self._base(step)
        except (OSError, SemantideError) as error:
            failed = f"{type(error).__name__}: {error}"
        return self._together(step, failed, lambda: ref, 0)

    def _link(self, step: int, before: Link, changed: Mapping[str, Tensor]) -> Link | None:
        items_N = self._objective.touched({name: torch.cat(self._world.all_gather(rows_K)) for name, rows_K in sorted(changed.items())})
        deleted: list[str] = []
        if before == self.begun and self._fresh_N is not None:
            items_N, deleted = items_N | self._fresh_N, self._gone
        failed = self._begun_folder()
        self._world.barrier()
        whole = self._digests is None
        wanted = self._mine if whole else self._mine[items_N[self._mine]]
        pieces = max(self._world.gather_json(-(-len(wanted) // _ROWS)))
        if self._digests is None:
            self._digests = np.zeros((len(self._mine), 2), dtype=np.uint64)
        if self._writes:
            failed = self._written(wanted, pieces, items_N) or failed
        answers = self._world.gather_json([failed, *total(self._digests)])
        table = told((sum(answer[1] for answer in answers), sum(answer[2] for answer in answers)))
        failed = next((answer[0] for answer in answers if answer[0] is not None), None)

        def stored() -> str:
            self._objective.model.save_dense(self._folder)
            write_card(self._folder, before.ref, before.number + 1, table, deleted, step=step)
            return self._store.put(self._folder, step)

        return self._together(step, failed, stored, before.number + 1)

    def _begun_folder(self) -> str | None:
        if self._world.leads:
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._folder.mkdir(parents=True)
            except OSError as error:
                return str(error)
        return None

    def _written(self, wanted: Tensor, pieces: int, items_N: Tensor) -> str | None:
        """Read and note the digests of these items, and write those that changed; what went wrong. All ranks of the group read as often."""
        assert self._digests is not None
        failed: str | None = None
        file: RowsFile | None = None
        for piece in range(pieces):
            items_K = wanted[piece * _ROWS : (piece + 1) * _ROWS]
            vectors_KD = self._objective.read(items_K)
            self._digests[(items_K // self._group).numpy()] = row_digests(self._names(items_K), vectors_KD)
            changed_K = items_N[items_K]
            try:
                if failed is None and bool(changed_K.any()):
                    file = file or RowsFile(self._folder / f"rows-{self._world.rank:05d}.parquet", vectors_KD.shape[1])
                    file.add(self._names(items_K[changed_K]), vectors_KD[changed_K.to(vectors_KD.device)])
            except OSError as error:
                failed = f"rank {self._world.rank}: {error}"
        try:
            if file is not None:
                file.close()
        except OSError as error:
            failed = f"rank {self._world.rank}: {error}"
        return failed

    def _names(self, items_K: Tensor) -> list[str]:
        return [self._item_ids[item] for item in items_K.tolist()]

    def _together(self, step: int, failed: str | None, stored: Callable[[], str], number: int) -> Link | None:
        """What the leading rank stored, on all ranks; nothing where any of them failed."""
        ref = ""
        if failed is None and self._world.leads:
            try:
                ref = stored()
            except (OSError, SemantideError) as error:
                failed = f"{type(error).__name__}: {error}"
        answers = self._world.gather_json([failed, ref])
        failures = [answer[0] for answer in answers if answer[0] is not None]
        if failures:
            if self._world.leads:
                self._store.failed(step, failures[0])
            return None
        return Link(answers[0][1], number)
