"""Ranks that fail in one way or another, each a fork as in ``world_run.py``; what they consumed is kept line by line."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import world_run
from align_run import aligned
from torch import Tensor

from semantide.services.training import checkpoint
from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.checkpoint import Checkpoints, Deal
from semantide.services.training.objective import LossSum, NextItem
from semantide.services.training.recipes import TrainConfig, tiny
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.services.training.world import World
from semantide.shared.errors import PermanentError, RankLost, TransientError
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig

ITEMS = 30


class Noted:
    """Keeps which samples each step consumed, and does what it is told at some step."""

    def __init__(self, inner: Any, world: World, folder: Path, fault: Any = None) -> None:
        self._inner, self._fault, self.trainer = inner, fault, None
        self.model, self.tables, self.tokens_per_item, self.counts = inner.model, inner.tables, 1, inner.counts
        self._rank, self._ledger = world.rank, (folder / f"ledger-{os.getpid()}.jsonl").open("a")

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        drawn: Mapping[str, Tensor] = self._inner.draw(batch, generator)
        return drawn

    def loss(self, batch: HistoryBatch, rows: Any) -> LossSum:
        assert self.trainer is not None
        state = self.trainer.state
        self._ledger.write(json.dumps([state.epoch, state.batch, batch.samples_B.tolist(), batch.items.lengths_B.tolist()]) + "\n")
        self._ledger.flush()
        if self._fault is not None:
            self._fault(state.step, self._rank)
        loss: LossSum = self._inner.loss(batch, rows)
        return loss


def trained(
    world: World, folder: Path, lengths: list[int], *, fault: Any = None, wrong_item: int = 0, table: bool = False, max_items: int = 50, batch: int = 60
) -> Trainer:
    torch.manual_seed(0)
    config: TrainConfig = replace(tiny(), epochs=2, items_per_batch=batch, max_items=max_items, warmup_steps=2, log_every=1, skip_rate=0.0)
    histories = [(user + np.arange(length)) % ITEMS for user, length in enumerate(lengths)]
    if wrong_item:
        histories[-1][0] = wrong_item
    objective: Any
    if table:
        retriever = Retriever(RetrieverConfig("hstu", 16, 1, 2, max_items, dropout=0.0, embedding_dropout=0.0))
        config = replace(config, model_type="retriever", num_negatives=8)
        objective = NextItemSampled(retriever, LocalTable(ITEMS, 16), torch.ones(ITEMS), config)
    else:
        config = replace(config, model_type="sasrec")
        model = SASRec(SASRecConfig(num_items=ITEMS, max_items=max_items, hidden_size=16, num_layers=1, dropout=0.0, embedding_dropout=0.0)).double()
        objective = NextItem(model, config)
    noted = Noted(objective, world, folder, fault)
    trainer = Trainer(
        config, noted, Sampler(histories, config, 5), None, Listener(lambda: 0.0), folder / "checkpoints", seed=5, checkpoint_seconds=0, world=world
    )
    noted.trainer = trainer  # type: ignore[assignment]
    return trainer


def finished(trainer: Trainer, folder: Path, world: World) -> None:
    state = trainer.run()
    total = sum(float(parameter.detach().double().sum()) for parameter in trainer.model.parameters())
    (folder / f"result-{world.rank}.json").write_text(json.dumps({"losses": state.losses, "total": total}))


def uneven(world: World, folder: Path, argument: str) -> None:
    """``RANK:STEP`` is killed there, ``host:STEP`` with the agent that started it and all its ranks; without an argument the run goes on to its end."""
    whom, _, when = argument.partition(":")

    def fault(step: int, rank: int) -> None:
        if argument and step == int(when) and whom == "host":
            agent = os.getppid()
            others = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            for process in (agent, *(int(other) for other in others if int(other) != os.getpid()), os.getpid()):
                os.kill(process, signal.SIGKILL)
        elif argument and whom != "host" and (rank, step) == (int(whom), int(when)):
            os.kill(os.getpid(), signal.SIGKILL)

    lengths = [int(length) for length in np.random.default_rng(2).geometric(0.2, 101 + 57).clip(1, 40)]
    finished(trained(world, folder, lengths, fault=fault, batch=120), folder, world)


def torn(world: World, folder: Path, argument: str) -> None:
    """Rank 1 is killed in the middle of writing its part of the third checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints", world)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.full((1000,), float(step))}, {"step": step}, own={"mine": torch.tensor([world.rank])})
        checkpoints.wait()
    if world.rank == 1:
        checkpoint.digest_file = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    checkpoints.save(3, {"x": torch.zeros(1000)}, {"step": 3}, own={"mine": torch.tensor([world.rank])})
    try:
        checkpoints.wait()
    except RankLost:
        return
    raise AssertionError("a checkpoint without a rank was taken for whole")


def after(world: World, folder: Path, argument: str) -> None:
    """What the last one holds, on any number of ranks."""
    found = Checkpoints(folder / "checkpoints", world).latest({"table.": Deal(world.rank, world.size)})
    assert found is not None
    (folder / f"after-{world.rank}.json").write_text(
        json.dumps({"state": found.state, **{name: t.tolist() for name, t in found.tensors.items()}, "own": {n: t.tolist() for n, t in found.own.items()}})
    )


def dealt(world: World, folder: Path, argument: str) -> None:
    """A table over the ranks, of which each writes its own rows; what all have alike is written once."""
    rows = torch.arange(22.0).view(11, 2)
    checkpoints = Checkpoints(folder / "checkpoints", world)
    tensors = {"dense": torch.arange(5), "table.w": rows[world.rank :: world.size]}
    checkpoints.save(7, tensors, {"step": 7}, own={"mine": torch.full((world.rank,), 1)}, deals={"table.": Deal(world.rank, world.size)})
    checkpoints.wait()
    size = sum(path.stat().st_size for path in (folder / "checkpoints" / "step-000000007").glob("*.safetensors"))
    (folder / f"size-{world.rank}.json").write_text(json.dumps(size))


def full(world: World, folder: Path, argument: str) -> None:
    """Rank 1 may not write more than a few bytes: its disk is full."""
    checkpoints = Checkpoints(folder / "checkpoints", world)
    checkpoints.save(1, {"x": torch.arange(9)}, {"step": 1})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    checkpoints.save(2, {"x": torch.zeros(9)}, {"step": 2}, own={"large": torch.zeros(10_000)})
    try:
        checkpoints.wait()
    except TransientError as error:
        assert "step 2 could not be written" in str(error) and "rank 1" in str(error) and "make room" in str(error), error
    else:
        raise AssertionError("a checkpoint that was not written counts")
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = checkpoints.latest()
    assert found is not None and found.state["step"] == 1
    # With room again, it goes on.
    checkpoints.save(2, {"x": torch.zeros(9)}, {"step": 2})
    found = checkpoints.latest()
    assert found is not None and found.state["step"] == 2


def not_a_number(world: World, folder: Path, argument: str) -> None:
    """The loss of one rank is no number in the fourth step: all ranks end with that cause."""
    trainer = trained(world, folder, [10] * 40)
    loss = trainer.objective.loss

    def broken(batch: HistoryBatch, rows: Any) -> LossSum:
        sums = loss(batch, rows)
        return replace(sums, sums_K=sums.sums_K * float("nan")) if trainer.state.step == 3 and world.rank == world.size - 1 else sums

    trainer.objective.loss = broken  # type: ignore[method-assign]
    try:
        trainer.run()
    except PermanentError as error:
        assert "at step 3" in str(error) and "last good checkpoint stays" in str(error)
    else:
        raise AssertionError("the run went on")


def memory(world: World, folder: Path, argument: str) -> None:
    """Rank 1 asks for more memory than there is."""

    def fault(step: int, rank: int) -> None:
        if (rank, step) == (1, 2):
            torch.empty(1 << 46)

    try:
        trained(world, folder, [10] * 40, fault=fault).run()
    except PermanentError as error:
        assert world.rank == 1 and "rank 1 ran out of memory at step 2" in str(error) and "lower items_per_batch" in str(error), error
        os._exit(3)
    except RankLost:
        assert world.rank != 1
        os._exit(4)


def outside(world: World, folder: Path, argument: str) -> None:
    """An id that the table does not have: whoever meets it says so, the others do not wait for ever."""
    try:
        trained(world, folder, [10] * 40, wrong_item=99, table=True).run()
    except ValueError as error:
        assert "99" in str(error) and f"{ITEMS} rows" in str(error), error
        os._exit(3)
    except RankLost:
        os._exit(4)


def lengths(world: World, folder: Path, argument: str) -> None:
    """``long``: one history alone is longer than a batch may be; ``ones``: every history has one item; ``uneven``: 57 samples cost as much as the other 101."""
    trainer = {
        "long": lambda: trained(world, folder, [200, *[5] * 30], max_items=300),
        "ones": lambda: trained(world, folder, [1] * 90),
        "uneven": lambda: trained(world, folder, [45, *[1] * 157], batch=300),
    }[argument]()
    finished(trainer, folder, world)


def launched(folder: Path, argument: str) -> None:
    """One rank that an agent started; the fault comes in the first attempt alone."""
    world = World.join("cpu", timeout_seconds=120)
    first = argument.startswith("host") or not (folder / f"began-{world.rank}").exists()
    (folder / f"began-{world.rank}").touch()
    uneven(world, folder, argument if first else "")
    world.close()


if __name__ == "__main__":
    if "RANK" in os.environ:
        launched(Path(sys.argv[1]), sys.argv[2])
    else:
        world_run.CASES.update({case.__name__: case for case in (uneven, torn, after, dealt, full, not_a_number, memory, outside, lengths, aligned)})
        world_run.main()
