"""The training loop: batch, step, validate, keep the best, and be able to go on from any kill.

A resumed run computes bit for bit what the uninterrupted one would have: parameters, optimiser, average, random numbers, and the sampler's
place are part of every checkpoint, and when checkpoints are taken changes nothing that is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.checkpoint import Checkpoints
from semantide.services.training.objective import Objective, TableRows
from semantide.services.training.optimiser import build_optimisers, rate_share, set_rate
from semantide.services.training.recipes import TrainConfig
from semantide.shared.errors import Conflict, JobCancelled, PermanentError


@dataclass
class RunState:
    """Where a run stands and what it has seen; together with the tensors this is the run."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    best: float = -math.inf
    best_epoch: int = -1
    waited: int = 0
    finished: bool = False


@dataclass(frozen=True)
class Listener:
    """Who hears of a run and may end it; ``clock`` tells seconds and only decides when to checkpoint and how fast it went."""

    clock: Callable[[], float]
    progress: Callable[[float, float, str, str], None] = lambda done, total, unit, stage: None
    metric: Callable[[int, dict[str, float]], None] = lambda step, values: None
    check_cancelled: Callable[[], None] = lambda: None


class Trainer:
    """Trains one model; its best weights are in the model when ``run`` returns."""

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        sampler: Sampler,
        validate: Callable[[], dict[str, float]] | None,
        listener: Listener,
        checkpoints: Path,
        *,
        seed: int,
        identity: str = "",
        checkpoint_seconds: float = 20.0,
    ) -> None:
        self.config, self.objective, self.sampler, self.validate, self.listener = config, objective, sampler, validate, listener
        self.model: nn.Module = objective.model
        self.state = RunState()
        self._seed, self._identity, self._checkpoint_seconds = seed, identity, checkpoint_seconds
        self._checkpoints = Checkpoints(checkpoints)
        self._optimisers = build_optimisers(self.model, config)
        self._names = [name for name, _ in self.model.named_parameters()]
        self._parameters = [parameter for _, parameter in self.model.named_parameters()]
        self._average = [parameter.detach().clone() for parameter in self._parameters] if config.ema else None
        self._best: list[Tensor] | None = None
        self._best_tables: dict[str, dict[str, Tensor]] = {}
        self._device = self._parameters[0].device
        self._saved_at = 0.0

    def run(self) -> RunState:
        """Train until the epochs are over or validation has not improved for ``patience`` times.

        Raises: JobCancelled, PermanentError when the loss is not a number, Conflict when the checkpoints are another run's.
        """
        torch.manual_seed(self._seed)
        self._restore()
        state, config = self.state, self.config
        self._saved_at = self.listener.clock()
        while not state.finished:
            epoch = self.sampler.epoch(state.epoch)
            self.model.train()
            mark, tokens = self.listener.clock(), 0
            while state.batch < len(epoch):
                try:
                    self.listener.check_cancelled()
                except JobCancelled:
                    self._save()
                    raise
                share = rate_share(config, state.step, (state.epoch + state.batch / len(epoch)) / config.epochs)
                batch = epoch.batch(state.batch)
                tokens += len(batch.items.values) * self.objective.tokens_per_item
                parts = self._train_on(batch, share)
                state.batch += 1
                state.step += 1
                if state.step % config.log_every == 0:
                    seconds = max(self.listener.clock() - mark, 1e-9)
                    values = {"loss": state.losses[-1], "lr": config.learning_rate * share, "tokens_per_second": tokens / seconds}
                    self.listener.metric(state.step, values | {f"loss_part_{index}": part for index, part in enumerate(parts)})
                    mark, tokens = self.listener.clock(), 0
                self.listener.progress(state.epoch + state.batch / len(epoch), config.epochs, "epochs", "training")
                if self.listener.clock() - self._saved_at >= self._checkpoint_seconds:
                    self._save()
            self._end_epoch()
            self._save()
        if self._best is not None:
            self._put(self._best)
            for name, table in self.objective.tables.items():
                table.load(self._best_tables[name])
        elif self._average is not None:
            self._put(self._average)
        self.model.eval()
        return state

    def _train_on(self, batch: HistoryBatch, share: float) -> list[float]:
        tables, routes, rows = self.objective.tables, {}, {}
        if tables:
            # What is drawn depends on seed and step alone, whoever draws it and when.
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self.state.step) % (1 << 63))
            for name, ids in self.objective.draw(batch, generator).items():
                routes[name] = tables[name].route(ids)
                fetched = tables[name].fetch(routes[name]).to(self._device).requires_grad_()
                rows[name] = TableRows(routes[name].ids_U.to(self._device), fetched, routes[name].inverse_T.to(self._device))
        batch = batch.to(self._device)
        for optimiser in self._optimisers:
            set_rate(optimiser, share)
            optimiser.zero_grad(set_to_none=True)
        with self._autocast():
            sums = self.objective.loss(batch, rows)
            loss, parts = sums.total(), sums.parts_K().detach()
        value = float(loss.detach())
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm, foreach=True))
        if not (math.isfinite(value) and math.isfinite(norm)):
            kept = self._checkpoints.folder
            raise PermanentError(
                f"at step {self.state.step} (epoch {self.state.epoch}) the loss is {value} and the gradient's norm {norm}: lower learning_rate (now "
                f"{self.config.learning_rate}) or raise warmup_steps; the last good checkpoint stays in {kept}"
            )
        for optimiser in self._optimisers:
            optimiser.step()
        for name, route in routes.items():
            gradients = rows[name].vectors_UD.grad
            assert gradients is not None
            tables[name].update(route, gradients, (self.config.table_rate or self.config.learning_rate) * share)
        self.state.losses.append(value)
        if self._average is not None:
            # The average of a young run is the plain mean: its first weights are no better than noise.
            decay = min(self.config.ema, (self.state.step + 1) / (self.state.step + 11))
            torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - decay)
        return [float(part) for part in parts]

    def _end_epoch(self) -> None:
        state, config = self.state, self.config
        state.epoch += 1
        state.batch = 0
        last = state.epoch >= config.epochs
        if self.validate is not None and (last or state.epoch % config.evaluate_every == 0):
            current = [parameter.detach().clone() for parameter in self._parameters]
            if self._average is not None:
                self._put(self._average)
            self.model.eval()
            figures = self.validate()
            candidate = [parameter.detach().clone() for parameter in self._parameters]
            tables = {name: {key: tensor.clone() for key, tensor in table.state().items()} for name, table in self.objective.tables.items()}
            self._put(current)
            state.validations.append({"epoch": state.epoch, "step": state.step, **figures})
            self.listener.metric(state.step, {f"valid_{name}": value for name, value in figures.items()} | {"epoch": state.epoch})
            if figures["ndcg@10"] > state.best:
                state.best, state.best_epoch, state.waited = figures["ndcg@10"], state.epoch, 0
                self._best, self._best_tables = candidate, tables
            else:
                state.waited += 1
        state.finished = last or state.waited >= config.patience

    def _autocast(self) -> AbstractContextManager[Any]:
        wanted = self.config.dtype
        if wanted == "bfloat16" or (wanted == "auto" and self._device.type == "cuda" and torch.cuda.is_bf16_supported()):
            return torch.autocast(self._device.type, torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            tensors[f"model.{name}"] = parameter
            for optimiser in self._optimisers:
                tensors |= {f"optimiser.{key}.{name}": value for key, value in optimiser.state.get(parameter, {}).items()}
            if self._average is not None:
                tensors[f"average.{name}"] = self._average[index]
            if self._best is not None:
                tensors[f"best.{name}"] = self._best[index]
        for name, table in self.objective.tables.items():
            tensors |= {f"table.{name}.{key}": tensor for key, tensor in table.state().items()}
            tensors |= {f"best_table.{name}.{key}": tensor for key, tensor in self._best_tables.get(name, {}).items()}
        return tensors

    def _save(self) -> None:
        self._checkpoints.save(
            self.state.step, self._tensors(), {"run": asdict(self.state), "config": _plain(self.config), "identity": self._identity, "seed": self._seed}
        )
        self._saved_at = self.listener.clock()

    def _restore(self) -> None:
        found = self._checkpoints.latest()
        if found is None:
            return
        tensors, saved = found.tensors, found.state
        if saved["config"] != _plain(self.config) or saved["identity"] != self._identity or saved["seed"] != self._seed:
            raise Conflict(
                f"the checkpoints in {self._checkpoints.folder} are of a run with another configuration, input or seed: give each run a folder of its own"
            )
        self.state = RunState(**saved["run"])
        for index, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            with torch.no_grad():
                parameter.copy_(tensors[f"model.{name}"])
                if self._average is not None:
                    self._average[index].copy_(tensors[f"average.{name}"])
            owner = next(o for o in self._optimisers if any(parameter is p for group in o.param_groups for p in group["params"]))
            for key in ("step", "exp_avg", "exp_avg_sq", "momentum"):
                if f"optimiser.{key}.{name}" in tensors:
                    owner.state[parameter][key] = tensors[f"optimiser.{key}.{name}"].to(self._device)
        if any(name.startswith("best.") for name in tensors):
            self._best = [tensors[f"best.{name}"].to(self._device) for name in self._names]
        for name, table in self.objective.tables.items():
            table.load({key: tensors[f"table.{name}.{key}"] for key in table.state()})
            if self._best is not None:
                self._best_tables[name] = {key: tensors[f"best_table.{name}.{key}"] for key in table.state()}
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self._device)


def _plain(config: TrainConfig) -> Any:
    """The configuration as it comes back from JSON."""
    import json

    return json.loads(json.dumps(asdict(config)))
