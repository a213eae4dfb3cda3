import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from semantide.services.training import checkpoint
from semantide.services.training.batches import Sampler
from semantide.services.training.objective import NextItem
from semantide.services.training.recipes import TrainConfig, recipe, tiny
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, RunState, Trainer
from semantide.shared.errors import Conflict, JobCancelled, PermanentError, TransientError
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig

SCRIPT = Path(__file__).with_name("ring_run.py")


class Forks:
    """Starts runs one after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self._parent = subprocess.Popen([sys.executable, str(SCRIPT)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, folder: Path, pause_seconds: float) -> int:
        folder.mkdir(exist_ok=True)
        assert self._parent.stdin is not None
        self._parent.stdin.write(f"{folder} {pause_seconds}\n")
        self._parent.stdin.flush()
        return self._read()

    def wait(self) -> int:
        return self._read()

    def _read(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.communicate(timeout=120)


def steps(folder: Path) -> list[str]:
    return (folder / "steps.txt").read_text().splitlines() if (folder / "steps.txt").exists() else []


def test_a_run_killed_at_random_points_has_the_loss_curve_and_weights_of_one_left_alone(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    chance = random.Random(int.from_bytes(os.urandom(4), "little"))
    forks = Forks()
    forks.start(alone, 0)
    assert forks.wait() == 0
    for _ in range(4):
        process = forks.start(killed, 0.02)
        wanted = len(steps(killed)) + chance.randrange(1, 4)
        while len(steps(killed)) < wanted:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)  # anywhere in a step, a checkpoint being written included
        os.kill(process, signal.SIGKILL)
        assert forks.wait() == signal.SIGKILL
    forks.start(killed, 0)
    assert forks.wait() == 0
    forks.close()
    assert (killed / "result.json").read_text() == (alone / "result.json").read_text()
    assert (killed / "model" / "model.safetensors").read_bytes() == (alone / "model" / "model.safetensors").read_bytes()
    losses = json.loads((alone / "result.json").read_text())["losses"]
    by_step = {int(line.split()[0]): float(line.split()[1]) for line in steps(killed) if float(line.split()[1])}
    assert [by_step[step + 1] for step in range(len(losses))] == losses


class Run:
    """A small SASRec run in this process."""

    def __init__(self, folder: Path, *, stop_at: int | None = None, seed: int = 0, scores: list[float] | None = None, **changes: object) -> None:
        self.config: TrainConfig = replace(tiny(), model_type="sasrec", epochs=3, items_per_batch=32, warmup_steps=2, **changes)  # type: ignore[arg-type]
        torch.manual_seed(seed)
        self.model = SASRec(SASRecConfig(num_items=20, hidden_size=8, dropout=0.3))
        sampler = Sampler([(start + np.arange(6)) % 20 for start in range(20)], self.config, seed)
        self.calls, self.stop_at, self.scores, self.metrics = 0, stop_at, list(scores or []), []  # type: ignore[var-annotated]
        listener = Listener(lambda: 0.0, metric=lambda step, values: self.metrics.append((step, values)), check_cancelled=self.check)
        validate = self.validate if scores is not None else None
        self.trainer = Trainer(self.config, NextItem(self.model, self.config), sampler, validate, listener, folder, seed=seed)

    def check(self) -> None:
        self.calls += 1
        if self.calls == self.stop_at:
            raise JobCancelled("stop")

    def validate(self) -> dict[str, float]:
        return {"ndcg@10": self.scores.pop(0)}

    def __call__(self) -> RunState:
        return self.trainer.run()


def test_a_cancelled_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a")()
    with pytest.raises(JobCancelled):
        Run(tmp_path / "b", stop_at=7)()
    again = Run(tmp_path / "b")
    assert again() == whole
    assert again.calls == whole.step - 6
    # A finished run answers at once.
    third = Run(tmp_path / "b")
    assert third() == whole
    assert third.calls == 0


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(tmp_path: Path) -> None:
    curves = [Run(tmp_path / str(index), seed=seed, learning_rate=1e-2)().losses for index, seed in enumerate((1, 1, 2))]
    assert curves[0] == curves[1] != curves[2]
    assert curves[0][-1] < curves[0][0]


def test_it_stops_after_patience_and_keeps_the_best_weights(tmp_path: Path) -> None:
    best = Run(tmp_path / "a", scores=[0.5])
    best.trainer.config = best.config = replace(best.config, epochs=3)
    run = Run(tmp_path / "b", scores=[0.5, 0.4, 0.5], patience=2)
    weights = []
    validate = run.trainer.validate
    assert validate is not None

    def remember() -> dict[str, float]:
        weights.append(run.model.items.weight.detach().clone())
        return validate()

    run.trainer.validate = remember
    state = run()
    assert (state.epoch, state.best_epoch, state.best, state.waited) == (3, 1, 0.5, 2)
    assert torch.equal(run.model.items.weight, weights[0])
    assert not torch.equal(weights[0], weights[1])


def test_a_loss_that_is_not_a_number_ends_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(JobCancelled):
        Run(tmp_path, stop_at=4)()
    run = Run(tmp_path)
    loss = run.trainer.objective.loss

    def broken(batch, rows):  # type: ignore[no-untyped-def]
        sums = loss(batch, rows)
        return replace(sums, sums_K=sums.sums_K * float("nan"))

    run.trainer.objective.loss = broken  # type: ignore[method-assign]
    with pytest.raises(PermanentError, match=r"at step 3 .*loss is nan.*lower learning_rate .*last good checkpoint"):
        run()
    assert Run(tmp_path)() == Run(tmp_path / "other")()


def test_a_disk_that_fills_up_in_the_background_ends_the_run_and_with_room_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, write, calls = Run(tmp_path / "other")(), checkpoint._write_alone, 0

    def fills_up(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(28, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "_write_alone", fills_up)
        with pytest.raises(TransientError, match="make room there, then resume the job"):
            Run(tmp_path / "run")()
    again = Run(tmp_path / "run")
    assert again() == whole
    assert again.calls == whole.step * 2 // 3  # the first of three epochs is not trained again


def test_memory_that_runs_out_is_told_with_what_to_change(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def large(batch, rows):  # type: ignore[no-untyped-def]
        return torch.empty(1 << 46)

    run.trainer.objective.loss = large  # type: ignore[method-assign]
    with pytest.raises(PermanentError, match=r"rank 0 ran out of memory at step 0 .*lower items_per_batch \(now 32\)"):
        run()


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobCancelled):
        Run(tmp_path, stop_at=4)()
    with pytest.raises(Conflict, match="another configuration, input or seed"):
        Run(tmp_path, seed=1)()
    with pytest.raises(Conflict, match="another configuration"):
        Run(tmp_path, label_smoothing=0.1)()


def test_metrics_come_as_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path, scores=[0.1, 0.2, 0.3], log_every=5)
    run()
    training = [(step, values) for step, values in run.metrics if "loss" in values]
    assert [step for step, _ in training] == list(range(5, run.trainer.state.step + 1, 5))
    shares = {"compute_share", "exposed_load", "exposed_sparse", "exposed_copy", "exposed_dense", "idle_share"}
    assert {"loss", "lr", "tokens", "tokens_per_second", "loss_part_0", *shares} == set(training[0][1])
    assert [values["valid_ndcg@10"] for _, values in run.metrics if "valid_ndcg@10" in values] == [0.1, 0.2, 0.3]


class TableRun(Run):
    """A small retriever, whose item vectors lie in a table."""

    def __init__(self, folder: Path, *, stop_at: int | None = None, **changes: object) -> None:
        super().__init__(folder, stop_at=stop_at)
        self.config = replace(recipe("retriever-tiny"), epochs=3, items_per_batch=24, warmup_steps=2, num_negatives=6, sync_steps=2, max_items=8, **changes)  # type: ignore[arg-type]
        torch.manual_seed(0)
        shape = RetrieverConfig(hidden_size=8, num_layers=1, num_heads=1, max_items=8, time_buckets=8, dropout=0.1)
        self.table = LocalTable(20, 8)
        objective = NextItemSampled(Retriever(shape), self.table, torch.ones(20), self.config)
        sampler = Sampler([(start + np.arange(3 + start % 5)) % 20 for start in range(20)], self.config, 0)
        listener = Listener(lambda: 0.0, metric=lambda step, values: self.metrics.append((step, values)), check_cancelled=self.check)
        self.trainer = Trainer(self.config, objective, sampler, None, listener, folder, seed=0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_with_rows_on_the_way_a_stopped_run_ends_as_one_left_alone_and_as_one_without_threads(tmp_path: Path, staleness: int) -> None:
    whole = TableRun(tmp_path / "whole", staleness=staleness)
    state = whole()
    plain = TableRun(tmp_path / "plain", staleness=staleness, batches_in_flight=1)
    assert plain() == state
    for stop_at in (1, 2, 4, 7):
        with pytest.raises(JobCancelled):
            TableRun(tmp_path / str(stop_at), staleness=staleness, stop_at=stop_at)()
        again = TableRun(tmp_path / str(stop_at), staleness=staleness)
        assert again() == state
        assert torch.equal(again.table.weight_ND, whole.table.weight_ND)
    assert torch.equal(plain.table.weight_ND, whole.table.weight_ND)


def test_staleness_changes_a_run_after_its_synchronous_steps_only(tmp_path: Path) -> None:
    losses = [TableRun(tmp_path / str(staleness), staleness=staleness)().losses for staleness in (0, 1)]
    # Step 2 is the first whose rows may lack an update.
    assert losses[0][:2] == losses[1][:2]
    assert losses[0] != losses[1]


def test_a_table_reports_how_often_rows_collide(tmp_path: Path) -> None:
    run = TableRun(tmp_path, log_every=2)
    run()
    assert all(0 < values["collision_rate"] <= 1 for _, values in run.metrics if "loss" in values)


def test_rows_whose_gradient_is_not_a_number_end_the_run_before_the_table_is_changed(tmp_path: Path) -> None:
    run = TableRun(tmp_path)
    update, applied = run.table.update, []

    def watched(*arguments: object) -> None:
        applied.append(True)
        update(*arguments)  # type: ignore[arg-type]

    run.table.update = watched  # type: ignore[method-assign]
    loss = run.trainer.objective.loss

    def broken(batch, rows):  # type: ignore[no-untyped-def]
        if len(applied) >= 3:
            rows["items"].vectors_UD.register_hook(lambda gradient: gradient * float("nan"))
        return loss(batch, rows)

    run.trainer.objective.loss = broken  # type: ignore[method-assign]
    with pytest.raises(PermanentError, match="gradient's norm nan"):
        run()
    assert torch.isfinite(run.table.weight_ND).all()
