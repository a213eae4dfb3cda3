"""A retriever whose table answers as slowly as one that lies on other machines, and whose histories come as slowly as from a disk.

The waits are sleeps: they take no processor time, as a network or a disk does not. What the table itself computes is real.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.models.item_table import LocalTable, Route
from semantide.shared.models.retriever import Retriever, RetrieverConfig

NUM_ITEMS = 20_000


@dataclass(frozen=True)
class Delays:
    """Seconds of every batch."""

    load: float = 0.0
    ids: float = 0.0
    vectors: float = 0.0
    gradients: float = 0.0

    @classmethod
    def of_step(cls, seconds: float, sparse: float, load: float) -> Delays:
        """``sparse`` is the exchanges' share of a step that does one thing after another, ``load`` that of reading."""
        whole = seconds / (1 - sparse - load)
        # An id is 4 bytes, a vector and a gradient 4 bytes a feature: the wire carries ids in a small part of the time, which is mostly latency.
        return cls(load * whole, 0.1 * sparse * whole, 0.45 * sparse * whole, 0.45 * sparse * whole)


class DistantTable:
    """A local table with delays."""

    def __init__(self, table: LocalTable, delays: Delays) -> None:
        self.table, self.delays = table, delays

    def route(self, ids_T: Tensor) -> Route:
        time.sleep(self.delays.ids)
        return self.table.route(ids_T)

    def fetch(self, route: Route) -> Tensor:
        vectors_UD = self.table.fetch(route)
        time.sleep(self.delays.vectors)
        return vectors_UD

    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        time.sleep(self.delays.gradients)
        self.table.update(route, gradients_UD, rate)

    def settle(self) -> None:
        self.table.settle()

    def gather(self) -> Tensor:
        return self.table.gather()

    def state(self) -> dict[str, Tensor]:
        return self.table.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.table.load(state)


class Delayed(NextItemSampled):
    """Reads slowly."""

    def __init__(self, *arguments: Any, delays: Delays) -> None:
        super().__init__(*arguments)
        self._delays = delays

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        time.sleep(self._delays.load)
        return super().draw(batch, generator)


@dataclass(frozen=True)
class Outcome:
    """What a run computed, and what its time went into."""

    losses: list[float]
    weight_ND: Tensor
    shares: dict[str, float]
    step_seconds: float
    dense_seconds: float


def train(lengths: list[int], delays: Delays, *, in_flight: int, staleness: int, items_per_batch: int = 2048, sync_steps: int = 0) -> Outcome:
    """One epoch over histories of these lengths; the first steps fill the stages and are not counted in the shares."""
    shape = RetrieverConfig(hidden_size=64, num_layers=2, num_heads=2, max_items=max(lengths), dropout=0.0, embedding_dropout=0.0)
    config: TrainConfig = replace(
        recipe("retriever-small"), retriever=shape, max_items=max(lengths), crop="last", items_per_batch=items_per_batch, num_negatives=256, epochs=1,
        negative_scope="batch", batches_in_flight=in_flight, staleness=staleness, sync_steps=sync_steps, log_every=1,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    popularity = 1 / np.arange(1, NUM_ITEMS + 1)
    histories = [rng.choice(NUM_ITEMS, size=length, p=popularity / popularity.sum()) for length in lengths]
    torch.manual_seed(0)
    table = LocalTable(NUM_ITEMS, shape.hidden_size)
    objective = Delayed(Retriever(shape), DistantTable(table, delays), torch.ones(NUM_ITEMS), config, delays=delays)
    rows: list[tuple[float, dict[str, float]]] = []
    listener = Listener(time.perf_counter, metric=lambda step, values: rows.append((time.perf_counter(), values)))
    with tempfile.TemporaryDirectory() as scratch:
        state = Trainer(config, objective, Sampler(histories, config, 0), None, listener, Path(scratch), seed=0, checkpoint_seconds=1e9).run()
    steps = [(time_ - before, values) for (before, _), (time_, values) in pairwise(rows[2:]) if "loss" in values]
    total = sum(seconds for seconds, _ in steps)
    names = ("compute_share", "exposed_load", "exposed_sparse", "exposed_copy", "idle_share")
    shares = {name: sum(seconds * values[name] for seconds, values in steps) / total for name in names}
    dense = [seconds * values["compute_share"] for seconds, values in steps]
    return Outcome(state.losses, table.weight_ND.clone(), shares, total / len(steps), statistics.mean(dense))
