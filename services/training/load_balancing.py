"""Who trains on what: every global batch is shared out so that all ranks need the same time for their part.

A history of n items costs n + alpha n^2: the layers' matrices see each item once, attention sees each pair. The dearest history goes first, always to
the rank that has least (longest processing time first). Only the histories of one global batch change places, so what a step computes does not
depend on who computes it. The plans, and where no rank holds all histories the one all-to-all that brings each to its rank, are made ahead of the steps.
Legend: P pieces (histories or stretches of them), S measured steps, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor

from semantide.services.training.batches import Epoch, HistoryBatch
from semantide.services.training.world import World
from semantide.shared.jagged import Jagged

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LEAST_STEPS = 8
_AHEAD = 2
_FIT_ROUNDS = 30


@dataclass(frozen=True)
class CostModel:
    """The time that a history of n items takes, n + ``alpha`` n^2, up to a factor. 0: all items cost the same."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}: give a finite number from 0")

    def costs(self, lengths_P: IntArray) -> FloatArray:
        """Cost of each length."""
        lengths = lengths_P.astype(np.float64)
        return lengths + self.alpha * lengths**2

    def fitted(self, items_S: FloatArray, squares_S: FloatArray, seconds_S: FloatArray) -> CostModel:
        """The model that explains measured steps best: their items, the sum of their lengths' squares, their seconds.

        Steps that something else slowed down are left out; where the steps do not tell items and squares apart, the model stays as it is.
        """
        usable = (items_S > 0) & (seconds_S > 0)
        if usable.sum() < _LEAST_STEPS:
            return self
        columns = np.stack([np.ones(usable.sum()), items_S[usable], squares_S[usable]], 1)
        scale = np.abs(columns).max(0)
        # Relative errors: long steps must not drown the short ones.
        scaled = columns / scale / seconds_S[usable][:, None]
        if np.linalg.cond(scaled) > 1e4:
            return self
        weight = np.ones(len(scaled))
        for _ in range(_FIT_ROUNDS):  # towards the least sum of errors, which a few slow steps do not move
            found, _ = nnls(scaled * weight[:, None], weight)
            weight = 1 / np.sqrt(np.maximum(np.abs(scaled @ found - 1), 1e-6))
        error = np.abs(scaled @ found - 1)
        kept = error <= 3 * np.median(error) + 1e-6
        found, _ = nnls(scaled[kept], np.ones(kept.sum()))
        _, per_item, per_square = found / scale
        if per_item <= 0:
            return self
        return CostModel(float(per_square / per_item))


def assign(costs_P: FloatArray, num_ranks: int) -> list[IntArray]:
    """Places of the pieces of each rank: the dearest piece first, each to the rank with the least cost so far; ranks may stay empty."""
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks: give at least 1")
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owner = np.empty(len(costs_P), dtype=np.int64)
    order = np.argsort(-costs_P, kind="stable")
    owners = []
    for cost in costs_P[order].tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        owners.append(rank)
    owner[order] = owners
    by_rank = np.argsort(owner, kind="stable")
    return np.split(by_rank, np.cumsum(np.bincount(owner, minlength=num_ranks))[:-1])


def imbalance(costs_P: FloatArray, parts: Sequence[IntArray]) -> float:
    """How much of the dearest rank's time an average rank waits: (max - mean) / max of the ranks' costs."""
    loads = np.array([costs_P[part].sum() for part in parts])
    return float(1 - loads.mean() / loads.max()) if loads.max() > 0 else 0.0


@dataclass(frozen=True)
class Share:
    """This rank's part of one global batch.

    ``num_items`` and ``counts_K`` (targets of each part of the loss) are those of all ranks together; None on a world of one.
    """

    batch: HistoryBatch
    num_items: int
    counts_K: Tensor | None
    imbalance: float


class Shares:
    """This rank's shares of an epoch's batches, made ahead on a thread of their own, or with ``ahead`` 0 by the thread that asks; close it.

    ``change`` takes another cost model, on all ranks from the same batch on; what is made already stays.
    """

    def __init__(
        self,
        world: World,
        epoch: Epoch,
        model: CostModel,
        count: Callable[[HistoryBatch], Tensor],
        *,
        first: int = 0,
        balanced: bool = True,
        ahead: int = _AHEAD,
    ) -> None:
        """``world`` is a channel that nobody else uses."""
        self._world, self._epoch, self._count = world, epoch, count
        self._models = [(first, model)]
        self._balanced, self._ahead = balanced, ahead
        self._next = first
        self._made: dict[int, Future[Share]] = {}
        # One thread: the collectives of a channel come in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "shares") if world.size > 1 and ahead else None

    def __getitem__(self, index: int) -> Share:
        """The share of one batch; batches are asked for in order, from ``first`` on.

        Raises: RankLost when a rank is gone.
        """
        if self._thread is None and self._world.size > 1:
            return self._make(index)
        if self._thread is None:
            batch = self._epoch.batch(index)
            return Share(batch, int(self._epoch.sizes_P[self._epoch.batches[index]].sum()), None, 0.0)
        while self._next < min(index + self._ahead + 1, len(self._epoch)):
            self._made[self._next] = self._thread.submit(self._make, self._next)
            self._next += 1
        return self._made.pop(index).result()

    def change(self, model: CostModel, consumed: int) -> None:
        """Share out by ``model`` from the first batch on that no rank can have made when none has been asked for ``consumed``."""
        self._models.append((consumed + self._ahead + 1, model))

    def close(self) -> None:
        """End the thread. What was begun is ended first: the other ranks have begun it too."""
        if self._thread is not None:
            self._thread.shutdown()

    def _make(self, index: int) -> Share:
        model = next(model for first, model in reversed(self._models) if first <= index)
        epoch, world = self._epoch, self._world
        pieces = epoch.batches[index]
        lengths = epoch.sizes_P[pieces]
        costs = model.costs(lengths)
        parts = assign(costs, world.size) if self._balanced else np.array_split(np.arange(len(pieces)), world.size)
        shares = [pieces[part] for part in parts]
        batch = epoch.gather(shares[world.rank]) if epoch.homes_P is None else self._exchanged(shares, epoch.homes_P)
        counts_K = world.all_reduce_sum(self._count(batch).cpu().clone())
        return Share(batch, int(lengths.sum()), counts_K, imbalance(costs, parts))

    def _exchanged(self, wanted: Sequence[IntArray], homes_P: IntArray) -> HistoryBatch:
        """The pieces that this rank shall train on, each from the rank that holds it: one all-to-all, whose sizes all ranks know from the plan."""
        rank, size, lengths_P = self._world.rank, self._world.size, self._epoch.lengths_P
        sent = []
        for pieces in wanted:
            batch = self._epoch.gather(pieces[homes_P[pieces] == rank])
            assert batch.events_T is not None
            sent.append(torch.stack([batch.items.values, batch.times_T, batch.events_T], 1))
        mine = wanted[rank]
        from_each = [_shorter_first(mine[homes_P[mine] == other], lengths_P) for other in range(size)]
        got_T3 = torch.cat(self._world.all_to_all(sent, [int(lengths_P[pieces].sum()) for pieces in from_each]))
        come = np.concatenate(from_each)
        # In the order in which one process would have packed them.
        packed = _shorter_first(mine, lengths_P)
        begins = np.empty(len(lengths_P), dtype=np.int64)
        begins[come] = np.cumsum(lengths_P[come]) - lengths_P[come]
        lengths = lengths_P[packed]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = torch.from_numpy(np.arange(offsets[-1]) + np.repeat(begins[packed] - offsets[:-1], lengths))
        values_T, times_T, events_T = (column_T.contiguous() for column_T in got_T3[places].unbind(1))
        return HistoryBatch(Jagged(values_T, torch.from_numpy(offsets)), times_T, torch.from_numpy(packed), events_T, self._epoch.number)


class StepTimes:
    """What this rank's steps took, for the next fit of the cost model."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._rows: list[tuple[float, float, float]] = []

    @property
    def wanted(self) -> bool:
        """Whether more steps would make the next fit better."""
        return len(self._rows) < self._most

    def add(self, lengths_B: Tensor, seconds: float) -> None:
        """One step's histories and the seconds of its own computing, waits left out."""
        lengths = lengths_B.double()
        self._rows.append((float(lengths.sum()), float((lengths**2).sum()), seconds))

    def fit(self, world: World, model: CostModel) -> CostModel:
        """The model fitted to all ranks' steps so far, the same on every rank; the measurements begin anew."""
        rows = np.array([row for rows in world.gather_json(self._rows) for row in rows], dtype=np.float64).reshape(-1, 3)
        self._rows = []
        return model.fitted(rows[:, 0], rows[:, 1], rows[:, 2])


def _shorter_first(pieces: IntArray, lengths_P: IntArray) -> IntArray:
    return pieces[np.argsort(lengths_P[pieces], kind="stable")]
