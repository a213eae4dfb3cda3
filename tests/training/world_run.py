"""Cases of several ranks, each rank a process; torch is imported once and every rank is a fork.

Each line of standard input, ``CASE SIZE FOLDER [ARGUMENT]``, starts one case; the ranks' exit statuses are printed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from safetensors.torch import save_file

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.gradients import GradientSum
from semantide.services.training.hierarchical_sparse import hierarchical_table
from semantide.services.training.load_balancing import CostModel, Shares
from semantide.services.training.objective import NextItem, NextToken
from semantide.services.training.recipes import TrainConfig, tiny
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.services.training.world import World
from semantide.shared.errors import JobCancelled, RankLost
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig

LENGTHS = [int(length) for length in np.random.default_rng(1).geometric(0.12, 57).clip(1, 30)]


def collectives(world: World, folder: Path, argument: str) -> None:
    rank, size = world.rank, world.size
    assert world.all_reduce_sum(torch.full((3,), float(rank + 1))).tolist() == [size * (size + 1) / 2] * 3
    pending = world.start_all_reduce_sum(torch.ones(2, dtype=torch.float64))
    assert pending.wait().tolist() == pending.wait().tolist() == [size] * 2
    for kind in (torch.int64, torch.bfloat16, torch.bool, torch.float64):
        parts = world.all_to_all([torch.full((rank * receiver, 2), rank).to(kind) for receiver in range(size)])
        assert [tuple(part.shape) for part in parts] == [(sender * rank, 2) for sender in range(size)]
        assert all(part.dtype == kind and bool((part == torch.tensor(sender).to(kind)).all()) for sender, part in enumerate(parts))
    known = world.all_to_all([torch.arange(2) + 10 * rank] * size, [2] * size)
    assert [part.tolist() for part in known] == [[10 * sender, 10 * sender + 1] for sender in range(size)]
    assert [part.tolist() for part in world.all_gather(torch.arange(rank))] == [list(range(sender)) for sender in range(size)]
    assert world.broadcast(torch.tensor([rank, 7]), size - 1).tolist() == [size - 1, 7]
    assert world.gather_json({"rank": rank, "name": "ü"}) == [{"rank": sender, "name": "ü"} for sender in range(size)]
    assert world.traffic.calls > 5 and world.traffic.num_bytes > 0
    assert world.leads == (rank == 0)
    assert world.channel().traffic.calls == 0


def grid(world: World, folder: Path, argument: str) -> None:
    cut = world.grid(2)
    assert cut.shards.ranks == ((0, 1), (2, 3))[world.rank // 2]
    assert cut.replicas.ranks == ((0, 2), (1, 3))[world.rank % 2]
    assert (cut.shards.rank, cut.replicas.rank) == (world.rank % 2, world.rank // 2)
    assert cut.shards.all_reduce_sum(torch.tensor([world.rank])).tolist() == [sum(cut.shards.ranks)]
    assert cut.replicas.broadcast(torch.tensor([world.rank]), 1).tolist() == [cut.replicas.ranks[1]]
    whole, alone = world.grid(4), world.grid(1)
    assert (whole.replicas.size, alone.shards.size) == (1, 1)
    assert whole.replicas.all_reduce_sum(torch.tensor([3])).tolist() == [3]
    assert alone.replicas.all_reduce_sum(torch.tensor([1])).tolist() == [4]


def lost(world: World, folder: Path, argument: str) -> None:
    """The last rank ends without a word."""
    if world.rank == world.size - 1:
        os._exit(9)
    try:
        world.barrier()
    except RankLost as error:
        assert f"rank {world.rank}: the all-reduce with ranks" in str(error)
    else:
        raise AssertionError("the others went on without a rank")


def gradients(world: World, folder: Path, argument: str) -> None:
    """Rank 1 has no samples, one parameter is used by rank 0 alone, one by nobody."""
    a, b, c, d = (torch.nn.Parameter(torch.full((3,), float(n + 1), dtype=torch.float64)) for n in range(4))
    reduced = GradientSum(world, [a, b, c, d], bucket_bytes=50, overlap=argument == "overlap")
    for _ in range(2):
        for parameter in (a, b, c, d):
            parameter.grad = None
        reduced.begin()
        if world.rank != 1:
            loss = (a * b).sum() * (world.rank + 1)
            (loss + d.sum() if world.rank == 0 else loss).backward()
        reduced.finish()
        factor = sum(rank + 1 for rank in range(world.size) if rank != 1)
        assert a.grad is not None and a.grad.tolist() == [2.0 * factor] * 3
        assert b.grad is not None and b.grad.tolist() == [1.0 * factor] * 3
        assert c.grad is None
        assert d.grad is not None and d.grad.tolist() == [1.0] * 3


def exchange(world: World, folder: Path, argument: str) -> None:
    """Each rank holds only its own histories; what the exchange brings is what a rank that held all would have gathered."""
    config = replace(tiny(), items_per_batch=120, max_items=12, crop="cover", skip_rate=0.3, batching="mixed")
    histories = [np.arange(length) + 100 * user for user, length in enumerate(LENGTHS)]
    times = [1000 * history for history in histories]
    epoch = Sampler(histories, config, 3, times).epoch(1)
    own = Sampler(histories, config, 3, times, (world.rank, world.size)).epoch(1)
    assert len(own.rows) < len(epoch.rows) and own.homes_P is not None

    def count(batch: HistoryBatch) -> torch.Tensor:
        return torch.tensor([len(batch.items.values)])

    near, far = (Shares(world.channel(), seen, CostModel(0.1), count) for seen in (epoch, own))
    seen: list[int] = []
    for index in range(len(epoch)):
        one, other = near[index], far[index]
        assert torch.equal(one.batch.items.values, other.batch.items.values)
        assert torch.equal(one.batch.items.offsets_B1, other.batch.items.offsets_B1)
        assert torch.equal(one.batch.times_T, other.batch.times_T)
        assert torch.equal(one.batch.samples_B, other.batch.samples_B)
        assert one.counts_K is not None and one.counts_K.tolist() == [one.num_items]
        seen += one.batch.samples_B.tolist()
    near.close()
    far.close()
    everybody = [piece for pieces in world.gather_json(seen) for piece in pieces]
    assert sorted(everybody) == list(range(len(epoch.lengths_P)))


def train(world: World, folder: Path, argument: str) -> None:
    """A run in float64; ``generator:stop`` is stopped once by its last rank, and goes on; with ``:break`` it fails there."""
    kind, _, how = argument.partition(":")
    model, objective, config = _model(kind, world)
    sampler = Sampler([(user + np.arange(length)) % 24 for user, length in enumerate(LENGTHS)], config, 5, None, (world.rank, world.size))
    stop_at = 5 if how and world.rank == world.size - 1 and not (folder / "checkpoints").exists() else -1
    calls, metrics = 0, []

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise JobCancelled("stop") if how == "stop" else OSError("broken")

    listener = Listener(lambda: 0.0, metric=lambda step, values: metrics.append(values), check_cancelled=check)
    trainer = Trainer(config, objective, sampler, None, listener, folder / "checkpoints", seed=5, world=world)
    try:
        state = trainer.run()
    except (JobCancelled, RankLost, OSError) as error:
        (folder / f"ended-{world.rank}").write_text(type(error).__name__)
        (folder / f"state-{world.rank}.json").write_text(json.dumps(trainer.state.step))
        return
    assert all(world.size == 1 or "imbalance" in values for values in metrics if "loss" in values)
    tables = {name: table.read(torch.arange(24)) for name, table in objective.tables.items()}
    save_file(tables | {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, folder / f"rank-{world.rank}.safetensors")
    (folder / f"rank-{world.rank}.json").write_text(json.dumps({"losses": state.losses}))


def few(world: World, folder: Path, argument: str) -> None:
    """Fewer histories than ranks: some ranks train on nothing, in step with the others."""
    _, objective, config = _model("sasrec", world)
    config = replace(config, items_per_batch=3, epochs=1, skip_rate=0.0)
    trainer = Trainer(config, objective, Sampler([np.arange(4), np.arange(3)], config, 0), None, Listener(time.monotonic), folder / "c", seed=0, world=world)
    state = trainer.run()
    assert state.step == 2 and all(np.isfinite(state.losses))


def _retriever(kind: str, config: TrainConfig, world: World) -> tuple[torch.nn.Module, Any, TrainConfig]:
    """``GROUP[-STALENESS-IN_FLIGHT]``: with its table here, or dealt out to groups of so many ranks."""
    group, staleness, in_flight = map(int, kind.split("-")) if "-" in kind else (int(kind), int(kind) % 2, 4)
    config = replace(
        config, model_type="retriever", table_optimiser="row-adam", muon_rate=0.0, ema=0.0, staleness=staleness, batches_in_flight=in_flight, sync_steps=2
    )
    torch.set_default_dtype(torch.float64)
    shape = RetrieverConfig(num_layers=1, hidden_size=16, num_heads=2, max_items=30, dropout=0.0, embedding_dropout=0.0)
    model = Retriever(shape)

    def share(count: int, rows: slice) -> LocalTable:
        table = LocalTable(count, 16, optimiser="row-adam")
        table.weight_ND.copy_(torch.randn(24, 16, generator=torch.Generator().manual_seed(2))[rows] * 0.1)
        return table

    table: Any = share(24, slice(None)) if world.size == 1 else hierarchical_table(24, world, group, share)
    return model, NextItemSampled(model, table, torch.ones(24), config), config


def _model(kind: str, world: World) -> tuple[torch.nn.Module, NextItem | NextToken, TrainConfig]:
    config = replace(tiny(), epochs=2, items_per_batch=90, ema=0.9, muon_rate=0.01, max_items=30, warmup_steps=2, log_every=1, skip_rate=0.2)
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # ranks begin with what the first one has
    if kind.startswith("retriever"):
        return _retriever(kind.removeprefix("retriever"), config, world)
    if kind == "sasrec":
        config = replace(config, model_type="sasrec", label_smoothing=0.1)
        sasrec = SASRec(SASRecConfig(num_items=24, max_items=30, hidden_size=16, num_layers=1, dropout=0.0, embedding_dropout=0.0)).double()
        return sasrec, NextItem(sasrec, config), config
    codes = np.stack([np.arange(24) // 6, np.arange(24) % 6], 1).astype(np.int64)
    shape = GeneratorConfig((4, 6), num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16, seen_bias=True)
    generator = Generator(shape).double()
    config = replace(config, level_weights=(1.0, 0.5))
    return generator, NextToken(generator, torch.from_numpy(generator.vocabulary.item_tokens(codes)), config), config


CASES = {case.__name__: case for case in (collectives, grid, lost, gradients, exchange, train, few)}


def main() -> None:
    for line in sys.stdin:
        case, size, folder, *argument = line.split()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(int(size)):
            child = os.fork()
            if child == 0:
                if size != "1":
                    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                try:
                    world = World.join("cpu", timeout_seconds=120, clock=time.perf_counter)
                    CASES[case](world, Path(folder), "".join(argument))
                    if case != "lost":
                        world.close()
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)


if __name__ == "__main__":
    main()
