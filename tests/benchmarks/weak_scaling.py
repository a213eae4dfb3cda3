"""Weak scaling: two processes, a core each and twice the batch, against one process on one core.

Both forms are steps of one run and alternate, so that the machine's moods meet both: alone one rank trains on a batch of its own while the other sleeps;
together they share out a batch of twice the size, sum gradients while the backward pass goes on, clip and update. Lengths are KuaiRand-27K's, scaled.
The shared step's summed gradients are first compared with those of one process that sees the whole batch.
Usage: python tests/benchmarks/weak_scaling.py [--data DIR] [--json] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kuairand_lengths import kuairand_lengths
from stopwatch import finish
from torch import Tensor, nn

from semantide.services.training.batches import Epoch
from semantide.services.training.gradients import GradientSum
from semantide.services.training.load_balancing import CostModel, Shares, StepTimes
from semantide.services.training.objective import NextItem
from semantide.services.training.optimiser import build_optimisers, set_rate
from semantide.services.training.recipes import sasrec
from semantide.services.training.world import World
from semantide.shared.allocator import keep_freed_memory
from semantide.shared.models.sasrec import SASRec, SASRecConfig

LONGEST, NUM_ITEMS, WARM = 512, 500, 16


def epoch_of(lengths: np.ndarray[Any, np.dtype[np.int64]], per_batch: int, rng: np.random.Generator) -> Epoch:
    pieces = np.arange(len(lengths))
    batches = tuple(pieces[begin : begin + per_batch] for begin in range(0, len(pieces), per_batch))
    return Epoch(rng.integers(0, NUM_ITEMS, int(lengths.sum())), None, np.cumsum(lengths) - lengths, lengths, batches)


def rank_main(rank: int, size: int, port: int, folder: str, data: str, steps: int, per_rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    keep_freed_memory()  # as jobs do
    gc.freeze()
    world = World.join("cpu", clock=time.perf_counter)
    torch.manual_seed(0)
    config = replace(sasrec(), learning_rate=1e-3)
    shape = SASRecConfig(num_items=NUM_ITEMS, hidden_size=128, feedforward_size=512, max_items=LONGEST, dropout=0.0, embedding_dropout=0.0)
    model = SASRec(shape)
    objective, optimisers = NextItem(model, config), build_optimisers(model, config)
    parameters = list(model.parameters())
    gradients = GradientSum(world, parameters)
    nobody = GradientSum(World.single(), parameters)
    times, rng = StepTimes(), np.random.default_rng(2)
    lengths = kuairand_lengths(Path(data), size * per_rank * (WARM + steps), 40, LONGEST, rng)
    epoch = epoch_of(lengths, size * per_rank, rng)
    shares = Shares(world.channel(), epoch, CostModel(0.0), objective.counts)

    def step(batch: Any, counts_K: Tensor, reduced: GradientSum) -> None:
        for optimiser in optimisers:
            set_rate(optimiser, 1.0)
            optimiser.zero_grad(set_to_none=True)
        reduced.begin()
        began = time.perf_counter()
        objective.loss(batch).total(counts_K).backward()
        times.add(batch.items.lengths_B, time.perf_counter() - began)
        reduced.finish()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for optimiser in optimisers:
            optimiser.step()

    def flat() -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])

    # One process that sees the whole batch, then the ranks together.
    whole = epoch.batch(0)
    objective.loss(whole).total().backward()
    expected = flat()
    share = shares[0]
    assert share.counts_K is not None
    model.zero_grad()
    gradients.begin()
    objective.loss(share.batch).total(share.counts_K).backward()
    gradients.finish()
    differ = float((flat() - expected).abs().max() / expected.abs().max())

    # Nanoseconds per item, so that batches of different sizes count alike; alone each rank's core is measured in turn.
    alone: list[float] = []
    together: list[float] = []
    for index in range(1, WARM + steps):
        if index == WARM:
            shares.change(times.fit(world, CostModel(0.0)), index)
        share = shares[index]
        assert share.counts_K is not None
        for turn in range(size):
            world.barrier()
            if rank == turn:
                batch = epoch.gather(epoch.batches[index][turn::size])
                began = time.perf_counter()
                step(batch, objective.counts(batch), nobody)
                if index >= WARM:
                    alone.append((time.perf_counter() - began) / len(batch.items.values) * 1e9)
        world.barrier()
        began = time.perf_counter()
        step(share.batch, share.counts_K, gradients)
        world.barrier()
        if index >= WARM:
            together.append((time.perf_counter() - began) / (share.num_items / size) * 1e9)
    shares.close()
    everybody = world.gather_json({"alone": alone, "together": together, "bytes": world.traffic.num_bytes})
    if rank == 0:
        found = {
            "alone": statistics.median(value for one in everybody for value in one["alone"]),
            "together": statistics.median(everybody[0]["together"]),
            "differ": differ,
            "megabytes": everybody[0]["bytes"] / len(together) / 1e6,
        }
        (Path(folder) / "found.json").write_text(json.dumps(found))
    world.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SEMANTIDE_TEST_DATA", "../shared/data")))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.threads = 1
    if len(os.sched_getaffinity(0)) < 2:
        sys.stderr.write("this benchmark needs 2 cores\n")
        return 1
    steps = 12 if options.quick else 60
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(rank_main, (2, port, folder, str(options.data), steps, 16), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]
        found = json.loads((Path(folder) / "found.json").read_text())
    wrong = [f"gradients differ from one process's by {found['differ']:.2e} of the largest"] if found["differ"] > 1e-4 else []
    measures = {
        "weak_scaling_2_processes": {
            "value": found["alone"] / found["together"], "unit": "ratio", "better": "higher", "baseline": "1 process, 1 core", "at_least": 0.95, "aim": 0.98,
            "runs": steps,
        },
        "items_per_second_and_core": {"value": 1e9 / found["together"], "unit": "1/s", "better": "higher", "runs": steps},
        "gradient_traffic": {"value": found["megabytes"], "unit": "MB a step", "better": "lower", "runs": steps},
    }  # fmt: skip
    return finish("weak_scaling", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
