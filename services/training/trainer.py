"""The training loop: batch, step, validate, keep the best, and be able to go on from any kill.

A resumed run computes bit for bit what the uninterrupted one would have: parameters, optimiser, average, random numbers, and the sampler's
place are part of every checkpoint, and when checkpoints are taken changes nothing that is computed (but with copies of tables that meet periodically, where
each is a meeting). Of several processes each takes its share of every batch; gradients are summed and divided by the targets of all, so a step is the one that a single process would make. What surrounds the
computing of a step (loading, the tables' rows and their updates) is the pipeline's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semantide.services.training import run_config
from semantide.services.training.batches import Epoch, Epochs
from semantide.services.training.change_log import ChangeLog
from semantide.services.training.checkpoint import Checkpoints
from semantide.services.training.fence import Staleness
from semantide.services.training.flight import Flight
from semantide.services.training.flops import StepMeter
from semantide.services.training.gradients import GradientSum
from semantide.services.training.load_balancing import CostModel, Shares, StepTimes
from semantide.services.training.objective import Objective
from semantide.services.training.occupancy import Occupancy
from semantide.services.training.optimiser import rate_share, set_rate
from semantide.services.training.pipeline import Pipeline
from semantide.services.training.publication import Link, Publication
from semantide.services.training.recipes import TrainConfig
from semantide.services.training.run_weights import RunWeights
from semantide.services.training.table_traffic import TableTraffic
from semantide.services.training.world import World
from semantide.shared.errors import Conflict, JobCancelled, PermanentError, RankLost, SemantideError

_FITS = tuple(16 * 4**power for power in range(12))
"""Steps after which several processes fit their cost model anew."""

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


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
    alpha: float = 0.0
    """Of the cost model that processes share batches by; 0 until it is known."""
    link: str = ""
    links: int = 0
    """Where serving's table stands, and how many links that is from its base; see ``Publication``."""


@dataclass(frozen=True)
class Listener:
    """Who hears of a run and may end it; ``clock`` tells seconds and only decides when to checkpoint and how fast it went."""

    clock: Callable[[], float]
    progress: Callable[[float, float, str, str], None] = lambda done, total, unit, stage: None
    metric: Callable[[int, dict[str, float]], None] = lambda step, values: None
    check_cancelled: Callable[[], None] = lambda: None
    memory_bytes: Callable[[], int] = lambda: 0
    """The most memory that the process had so far; 0 where nobody looks."""
    step_seconds: Callable[[float], None] = lambda seconds: None
    """How long this process computed for a step of late, without its waits for others."""


class Trainer:
    """Trains one model; its best weights are in the model when ``run`` returns."""

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        sampler: Epochs,
        validate: Callable[[], dict[str, float]] | None,
        listener: Listener,
        checkpoints: Path,
        *,
        seed: int,
        identity: str = "",
        checkpoint_seconds: float = 20.0,
        world: World | None = None,
        meter: StepMeter | None = None,
        publication: Publication | None = None,
    ) -> None:
        """``meter`` adds the use of the device's arithmetic to the metrics; ``publication`` tells serving of the tables as they become."""
        self.config, self.objective, self.sampler, self.validate, self.listener = config, objective, sampler, validate, listener
        self.model: nn.Module = objective.model
        self.state = RunState()
        self._seed, self._identity, self._checkpoint_seconds = seed, identity, checkpoint_seconds
        self._weights = RunWeights(objective, config)
        self._parameters = self._weights.parameters
        self._world = world or World.single(self._parameters[0].device)
        for parameter in self._parameters:
            self._world.broadcast(parameter.detach())
        self._weights.begin_average()
        self._on_the_way: dict[str, Tensor] = {}
        self._occupancy = Occupancy()
        self._meter = meter
        self._device = self._parameters[0].device
        self._saved_at = 0.0
        self._computed, self._untold_tokens = 0.0, 0
        self._loading = self._world.channel()
        self._checkpoints = Checkpoints(checkpoints, self._world)
        self._deals = self._weights.deals()
        self._gradients = GradientSum(self._world, self._parameters)
        self._times = StepTimes()
        self._wire = TableTraffic(objective.tables)
        self._publication = publication
        self._logs = {name: ChangeLog(table) for name, table in objective.tables.items()} if publication is not None else {}
        if publication is not None:
            self.state.link, self.state.links = publication.begun.ref, publication.begun.number

    def run(self) -> RunState:
        """Train until the epochs are over or validation has not improved for ``patience`` times.

        Raises: JobCancelled, PermanentError when the loss is not a number, Conflict when the checkpoints are another run's.
        """
        try:
            return self._run()
        except RankLost:
            raise  # a checkpoint that is being written waits for the rank that is gone
        except Exception:
            # What is being written is the last good one: this run's own end must not cut it off.
            with suppress(SemantideError):
                self._checkpoints.wait()
            raise

    def _run(self) -> RunState:
        torch.manual_seed(self._seed)
        self._restore()
        state = self.state
        self._saved_at = self.listener.clock()
        while not state.finished:
            epoch = self.sampler.epoch(state.epoch)
            self.model.train()
            self._run_epoch(epoch)
            self._end_epoch()
            self._save()
        self._checkpoints.wait()
        self._weights.take_best()
        self.model.eval()
        return state

    def _run_epoch(self, epoch: Epoch) -> None:
        state, config = self.state, self.config
        shares = Shares(self._loading, epoch, self._costs(), self.objective.counts, balanced=config.balance == "cost", ahead=0)
        start = state.step - state.batch
        pipeline = Pipeline(
            self.objective,
            lambda step: shares[step - start],
            self._device,
            start=start,
            first=state.step,
            end=start + len(epoch),
            seed=self._seed,
            in_flight=config.batches_in_flight,
            staleness=Staleness(config.staleness, config.sync_steps),
            kept=self._on_the_way,
            clock=self.listener.clock,
            occupancy=self._occupancy,
            num_ranks=self._world.size,
            logs=self._logs,
        )
        with pipeline:
            self._run_batches(pipeline, shares, len(epoch))
        self._on_the_way = {}

    def _run_batches(self, pipeline: Pipeline, shares: Shares, num_batches: int) -> None:
        state, config, clock = self.state, self.config, self.listener.clock
        mark, tokens, moved, steps = clock(), 0, self._world.traffic.seconds, state.step
        self._computed = 0.0
        self._occupancy.report(1.0)
        self._wire.report(state.step)
        if self._meter is not None:
            self._meter.report(1.0)
        while state.batch < num_batches:
            cancelled = self._cancelled()
            if cancelled is not None and self._world.size == 1:
                self._save(pipeline)
                self._checkpoints.wait()
                raise cancelled
            rate = rate_share(config, state.step, (state.epoch + state.batch / num_batches) / config.epochs)
            with _Memory(self._world.rank, state.step, config.items_per_batch):
                flight = pipeline.take()
                parts, stop, save = self._train_on(flight, rate, cancelled is not None)
            tokens += flight.share.num_items * self.objective.tokens_per_item
            self._untold_tokens += flight.share.num_items * self.objective.tokens_per_item
            if self._meter is not None:
                self._meter.add(flight.share.batch.items.lengths_B, flight.share.batch.targets)
            pipeline.give_back(flight, (config.table_rate or config.learning_rate) * rate)
            state.batch += 1
            state.step += 1
            if state.step % config.log_every == 0:
                seconds = max(clock() - mark, 1e-9)
                values = {"loss": state.losses[-1], "lr": config.learning_rate * rate, "tokens": self._told_tokens(), "tokens_per_second": tokens / seconds}
                values |= self._occupancy.report(seconds)
                if self._world.size > 1:
                    self.listener.step_seconds(self._computed / (state.step - steps))
                    self._computed, steps = 0.0, state.step
                    values |= {"imbalance": flight.share.imbalance, "communication_share": (self._world.traffic.seconds - moved) / seconds}
                values |= self._wire.report(state.step)
                if self._meter is not None:
                    values |= self._meter.report(seconds)
                if memory := self.listener.memory_bytes():
                    values["memory_bytes"] = memory
                self.listener.metric(state.step, values | {f"loss_part_{index}": part for index, part in enumerate(parts)})
                mark, tokens, moved = clock(), 0, self._world.traffic.seconds
            self.listener.progress(state.epoch + state.batch / num_batches, config.epochs, "epochs", "training")
            if self._world.size > 1 and state.step in _FITS:
                # What may be loaded already on some rank is shared out by the old model on all.
                shares.change(self._costs(), state.batch + pipeline.room)
            if self._publication is not None and state.step % config.publish_every == 0 and state.step >= config.warmup_steps:
                pipeline.settle()
                self._publish(self._publication)
            if stop or save:
                self._save(pipeline)
            if stop:
                self._checkpoints.wait()
                raise cancelled or JobCancelled("another rank was asked to stop")

    def _cancelled(self) -> JobCancelled | None:
        try:
            self.listener.check_cancelled()
        except JobCancelled as error:
            return error
        return None

    def _train_on(self, flight: Flight, rate: float, cancelled: bool) -> tuple[list[float], bool, bool]:
        """One step; the loss's parts, and whether any rank wants to stop or the first to save."""
        world, share, batch = self._world, flight.share, flight.batch
        began, exchanging = self.listener.clock(), world.traffic.seconds
        for optimiser in self._weights.optimisers:
            set_rate(optimiser, rate)
            optimiser.zero_grad(set_to_none=True)
        if world.size > 1:
            # Drawn anew for each step and rank, so that going on needs no rank's past and works with any number of ranks.
            torch.manual_seed(int(np.random.SeedSequence([self._seed, self.state.step, world.rank]).generate_state(1)[0]))
        self._gradients.begin()
        counts_K = None if share.counts_K is None else share.counts_K.to(self._device)
        loss: Tensor | None = None
        if len(batch) or counts_K is None:
            with self._autocast():
                sums = self.objective.loss(batch, flight.rows)
                loss, parts_K = sums.total(counts_K), sums.parts_K(counts_K).detach()
            value = float(loss.detach())
        else:
            parts_K, value = torch.zeros(len(counts_K), device=self._device), 0.0
        save = self.listener.clock() - self._saved_at >= self._checkpoint_seconds and world.leads
        told = world.start_all_reduce_sum(torch.tensor([value, cancelled, save, *parts_K.tolist()], dtype=torch.float64)) if world.size > 1 else None
        if loss is not None:
            loss.backward()
        self._computed += self.listener.clock() - began
        if world.size > 1 and self._times.wanted:
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            self._times.add(batch.lengths_B, self.listener.clock() - began)
        self._gradients.finish()
        stop, parts = False, [float(part) for part in parts_K]
        if told is not None:
            value, stopping, saving, *parts = told.wait().tolist()
            stop, save = stopping > 0, saving > 0
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm, foreach=True))
        rows_finite = all(math.isfinite(float(rows.vectors_UD.grad.sum())) for rows in flight.rows.values() if rows.vectors_UD.grad is not None)
        if not (math.isfinite(value) and math.isfinite(norm) and rows_finite):
            kept = self._checkpoints.folder
            raise PermanentError(
                f"at step {self.state.step} (epoch {self.state.epoch}) the loss is {value} and the gradient's norm {norm if rows_finite else math.nan}: lower learning_rate (now "
                f"{self.config.learning_rate}) or raise warmup_steps; the last good checkpoint stays in {kept}"
            )
        for optimiser in self._weights.optimisers:
            optimiser.step()
        self.state.losses.append(value)
        self._weights.average(self.state.step)
        self._occupancy.worked("dense", self.listener.clock() - began)
        self._occupancy.exchanged(world.traffic.seconds - exchanging)
        return parts, stop, save

    def _costs(self) -> CostModel:
        """The cost model of this epoch, the same on every rank."""
        if self.config.attention_cost or self._world.size == 1:
            return CostModel(self.config.attention_cost)
        self.state.alpha = self._times.fit(self._world, CostModel(self.state.alpha)).alpha
        return CostModel(self.state.alpha)

    def _end_epoch(self) -> None:
        state, config = self.state, self.config
        state.epoch += 1
        state.batch = 0
        last = state.epoch >= config.epochs
        if self.validate is not None and (last or state.epoch % config.evaluate_every == 0):
            self._weights.settle()
            with self._weights.averaged():
                self.model.eval()
                figures = self.validate()
                if figures["ndcg@10"] > state.best:
                    self._weights.keep()
            state.validations.append({"epoch": state.epoch, "step": state.step, **figures})
            self.listener.metric(
                state.step, {f"valid_{name}": value for name, value in figures.items()} | {"epoch": state.epoch, "tokens": self._told_tokens()}
            )
            if figures["ndcg@10"] > state.best:
                state.best, state.best_epoch, state.waited = figures["ndcg@10"], state.epoch, 0
            else:
                state.waited += 1
        state.finished = last or state.waited >= config.patience

    def _told_tokens(self) -> float:
        """Tokens that this process trained on since they were last told."""
        told, self._untold_tokens = float(self._untold_tokens), 0
        return told

    def _publish(self, publication: Publication) -> None:
        self._weights.settle()
        began = self.listener.clock()
        changed = {name: log.rows() for name, log in self._logs.items()}
        link = publication.publish(self.state.step, Link(self.state.link, self.state.links), changed)
        if link is not None:
            self.state.link, self.state.links = link.ref, link.number
            for log in self._logs.values():
                log.clear()
        figures = {"publish_seconds": self.listener.clock() - began, "changed_rows": float(sum(map(len, changed.values())))}
        self.listener.metric(self.state.step, figures)

    def _autocast(self) -> AbstractContextManager[Any]:
        wanted = self.config.dtype
        if wanted == "bfloat16" or (wanted == "auto" and self._device.type == "cuda" and torch.cuda.is_bf16_supported()):
            return torch.autocast(self._device.type, torch.bfloat16)
        return nullcontext()

    def _own(self) -> dict[str, Tensor]:
        """What this rank alone has."""
        own = {"random.cpu": torch.get_rng_state()} | {f"on_the_way.{name}": tensor for name, tensor in self._on_the_way.items()}
        own |= {f"changed.{name}": log.changed_N for name, log in self._logs.items()}
        return own | ({"random.cuda": torch.cuda.get_rng_state(self._device)} if self._device.type == "cuda" else {})

    def _save(self, pipeline: Pipeline | None = None) -> None:
        if pipeline is not None:
            pipeline.settle()
            self._on_the_way = pipeline.on_the_way()
        self._weights.settle()
        began = self.listener.clock()
        state = {"run": asdict(self.state), "config": run_config.plain(self.config), "identity": self._identity, "seed": self._seed}
        self._checkpoints.save(self.state.step, self._weights.tensors(), state, own=self._own(), deals=self._deals)
        self.listener.metric(self.state.step, {"checkpoint_stall_seconds": self.listener.clock() - began})
        self._saved_at = self.listener.clock()

    def _restore(self) -> None:
        found = self._checkpoints.latest(self._deals)
        if found is None:
            return
        saved = found.state
        if not run_config.same(saved["config"], self.config) or saved["identity"] != self._identity or saved["seed"] != self._seed:
            raise Conflict(
                f"the checkpoints in {self._checkpoints.folder} are of a run with another configuration, input or seed: give each run a folder of its own"
            )
        self.state = RunState(**saved["run"])
        self._weights.restore(found.tensors)
        self._on_the_way = {name.removeprefix("on_the_way."): tensor for name, tensor in found.own.items() if name.startswith("on_the_way.")}
        for name, log in self._logs.items():
            if f"changed.{name}" in found.own:
                log.changed_N.copy_(found.own[f"changed.{name}"])
            else:
                log.touch_all()
        if "random.cpu" in found.own:
            torch.set_rng_state(found.own["random.cpu"])
        else:
            # Another number of ranks than before: nobody's random numbers go on, and none come a second time.
            torch.manual_seed(int(np.random.SeedSequence([self._seed, self.state.step]).generate_state(1)[0]))
        if "random.cuda" in found.own and self._device.type == "cuda":
            torch.cuda.set_rng_state(found.own["random.cuda"], self._device)


class _Memory:
    """Tells of memory that ran out with the numbers that decide how much is needed."""

    def __init__(self, rank: int, step: int, items_per_batch: int) -> None:
        self._rank, self._step, self._items = rank, step, items_per_batch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)):
            raise PermanentError(
                f"rank {self._rank} ran out of memory at step {self._step} ({error}): lower items_per_batch (now {self._items}) or max_items, or train with "
                "more processes on more machines; the last good checkpoint stays"
            ) from error
