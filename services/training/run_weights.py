"""The tensors of a run: weights, their optimisers' state, their running average, the best ones so far, and the tables; put in and taken out of checkpoints by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from semantide.services.training.checkpoint import Deal
from semantide.services.training.optimiser import build_optimisers
from semantide.services.training.recipes import TrainConfig


class Trained(Protocol):
    """What a run changes: a model whose parameters are trained in full, and tables by name."""

    @property
    def model(self) -> nn.Module:
        """Trained in full."""
        ...

    @property
    def tables(self) -> Mapping[str, Any]:
        """Of which a step touches some rows."""
        ...


class RunWeights:
    """What is trained, and what is kept of it."""

    def __init__(self, objective: Trained, config: TrainConfig) -> None:
        self.tables = dict(sorted(objective.tables.items()))
        self.optimisers = build_optimisers(objective.model, config)
        self.names = [name for name, _ in objective.model.named_parameters()]
        self.parameters = [parameter for _, parameter in objective.model.named_parameters()]
        self._decay = config.ema
        self._average = [parameter.detach().clone() for parameter in self.parameters] if config.ema else None
        self._best: list[Tensor] | None = None
        self._best_tables: dict[str, Tensor] = {}

    def begin_average(self) -> None:
        """Let the average begin at the weights as they are now."""
        if self._average is not None:
            self._average = self._copied()

    def average(self, step: int) -> None:
        """Let the weights after a step join the running average, where there is one."""
        if self._average is not None:
            # The average of a young run is the plain mean: its first weights are no better than noise.
            decay = min(self._decay, (step + 1) / (step + 11))
            torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self.parameters], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has its average, where there is one, and afterwards its own weights again."""
        own = self._copied()
        if self._average is not None:
            self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    def keep(self) -> None:
        """The weights as they are now and the tables' vectors are the best so far."""
        self._best = self._copied()
        self._best_tables = {name: table.state()["weight"].clone() for name, table in self.tables.items()}

    def take_best(self) -> None:
        """Go back to the best; without one to the average, where there is one."""
        if self._best is not None:
            self._put(self._best)
            for name, weight in self._best_tables.items():
                self.tables[name].load({"weight": weight})
        elif self._average is not None:
            self._put(self._average)

    def settle(self) -> None:
        """Bring all tables home."""
        for table in self.tables.values():
            table.settle()

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name."""
        tensors: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            tensors[f"model.{name}"] = parameter
            for optimiser in self.optimisers:
                tensors |= {f"optimiser.{key}.{name}": value for key, value in optimiser.state.get(parameter, {}).items()}
            if self._average is not None:
                tensors[f"average.{name}"] = self._average[index]
            if self._best is not None:
                tensors[f"best.{name}"] = self._best[index]
        for name, table in self.tables.items():
            tensors |= {f"table.{name}.{key}": tensor for key, tensor in table.state().items()}
            if name in self._best_tables:
                tensors[f"best_table.{name}.weight"] = self._best_tables[name]
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave."""
        device = self.parameters[0].device
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            with torch.no_grad():
                parameter.copy_(tensors[f"model.{name}"])
                if self._average is not None:
                    self._average[index].copy_(tensors[f"average.{name}"])
            owner = next(o for o in self.optimisers if any(parameter is p for group in o.param_groups for p in group["params"]))
            for key in ("step", "exp_avg", "exp_avg_sq", "momentum"):
                if f"optimiser.{key}.{name}" in tensors:
                    owner.state[parameter][key] = tensors[f"optimiser.{key}.{name}"].to(device)
        if any(name.startswith("best.") for name in tensors):
            self._best = [tensors[f"best.{name}"].to(device) for name in self.names]
        for name, table in self.tables.items():
            table.load({key: tensors[f"table.{name}.{key}"] for key in table.state()})
            if self._best is not None:
                self._best_tables[name] = tensors[f"best_table.{name}.weight"]

    def deals(self) -> dict[str, Deal]:
        """Which tensors are this rank's rows of tables over several ranks."""
        dealt = {name: table.shards for name, table in self.tables.items() if hasattr(table, "shards")}
        return {f"{kind}.{name}.": Deal(shards.rank, shards.size) for name, shards in dealt.items() for kind in ("table", "best_table")}

    def _copied(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
