"""How evenly ranks are loaded: in the cost model at 8, 32 and 128 ranks, and by the clock of real processes.

Lengths are those of KuaiRand-27K, scaled; every policy shares out the same batches of 32 histories a rank.
    fixed    the same number of histories for every rank
    tokens   histories in the order they come, each rank closed at its share of the items
    snake    sorted by length and dealt out to and fro
    cost     longest processing time first by n + alpha n^2 (ours)
Real processes: two ranks, each on a core of its own, train a SASRec on batches shared out by ``fixed`` and by ``cost`` in turn. A step's wait share is
how long the rank that was ready first waits for the last, over the step. Both policies must give the same sum of gradients. In between both ranks
train on the very same histories (``same``): what they wait for each other then is the machine's doing, and no policy can be below it.
Usage: python tests/benchmarks/load_balancing.py [--data DIR] [--json] [--quick] [--skip-processes]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kuairand_lengths import kuairand_lengths
from stopwatch import finish

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.load_balancing import CostModel, StepTimes, assign, imbalance
from semantide.services.training.objective import NextItem
from semantide.services.training.recipes import sasrec
from semantide.services.training.world import World
from semantide.shared.allocator import keep_freed_memory
from semantide.shared.jagged import Jagged
from semantide.shared.models.sasrec import SASRec, SASRecConfig

IntArray = npt.NDArray[np.int64]
PER_RANK, SCALE, LONGEST = 32, 20.0, 4096
ALPHA = 1 / (6 * 1024)


def fixed(lengths: IntArray, ranks: int, model: CostModel) -> list[IntArray]:
    return np.array_split(np.arange(len(lengths)), ranks)


def tokens(lengths: IntArray, ranks: int, model: CostModel) -> list[IntArray]:
    begins = np.cumsum(lengths) - lengths
    rank = np.minimum(begins * ranks // lengths.sum(), ranks - 1)
    return [np.flatnonzero(rank == one) for one in range(ranks)]


def snake(lengths: IntArray, ranks: int, model: CostModel) -> list[IntArray]:
    order = np.argsort(-lengths, kind="stable")
    place = np.arange(len(lengths)) % (2 * ranks)
    rank = np.minimum(place, 2 * ranks - 1 - place)
    return [order[rank == one] for one in range(ranks)]


def cost(lengths: IntArray, ranks: int, model: CostModel) -> list[IntArray]:
    return assign(model.costs(lengths), ranks)


POLICIES: dict[str, Callable[[IntArray, int, CostModel], list[IntArray]]] = {"fixed": fixed, "tokens": tokens, "snake": snake, "cost": cost}


def in_the_model(data: Path, draws: int, wrong: list[str]) -> dict[str, dict[str, Any]]:
    model, rng = CostModel(ALPHA), np.random.default_rng(0)
    measures: dict[str, dict[str, Any]] = {}
    for ranks in (8, 32, 128):
        shares: dict[str, list[float]] = {name: [] for name in POLICIES}
        gaps: dict[str, list[int]] = {name: [] for name in POLICIES}
        seconds = []
        for _ in range(draws):
            lengths = kuairand_lengths(data, ranks * PER_RANK, SCALE, LONGEST, rng)
            costs = model.costs(lengths)
            for name, policy in POLICIES.items():
                began = time.perf_counter()
                parts = policy(lengths, ranks, model)
                if name == "cost":
                    seconds.append(time.perf_counter() - began)
                if sorted(np.concatenate(parts)) != list(range(len(lengths))):
                    wrong.append(f"{name} at {ranks} ranks is not a partition of the batch")
                shares[name].append(imbalance(costs, parts))
                loads = [int(lengths[part].sum()) for part in parts]
                gaps[name].append(max(loads) - min(loads))
        said = ", ".join(f"{name} {100 * statistics.mean(shares[name]):.2f} %" for name in ("fixed", "tokens", "snake"))
        measures[f"imbalance_{ranks}_ranks"] = {
            "value": 100 * statistics.mean(shares["cost"]), "unit": "%", "better": "lower", "baseline": said, "at_least": 0.5, "aim": 0.1, "runs": draws,
        }  # fmt: skip
        measures[f"imbalance_{ranks}_ranks_worst_draw"] = {"value": 100 * max(shares["cost"]), "unit": "%", "better": "lower", "runs": draws}
        measures[f"plan_{ranks}_ranks"] = {"value": 1e3 * statistics.median(seconds), "unit": "ms a step", "better": "lower", "runs": draws}
    return measures


def rank_main(rank: int, size: int, port: int, folder: str, data: str, steps: int) -> None:
    """One real rank; the first writes what was measured."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    keep_freed_memory()  # as jobs do
    gc.freeze()
    world = World.join("cpu", clock=time.perf_counter)
    torch.manual_seed(0)
    longest = 1024
    model = SASRec(SASRecConfig(num_items=500, hidden_size=64, max_items=longest, dropout=0.0, embedding_dropout=0.0))
    objective = NextItem(model, sasrec())
    rng, times, alpha = np.random.default_rng(1), StepTimes(), CostModel(0.0)
    waits: dict[str, list[tuple[float, float]]] = {"fixed": [], "cost": [], "same": []}
    differ = 0.0

    def step(policy: str, lengths: IntArray, rows: IntArray) -> torch.Tensor:
        part = POLICIES["cost"](lengths, size, alpha)[0] if policy == "same" else POLICIES[policy](lengths, size, alpha)[rank]
        part = part[np.argsort(lengths[part], kind="stable")]
        begins = np.cumsum(lengths) - lengths
        batch = HistoryBatch.of(Jagged.from_sequences([rows[begins[one] : begins[one] + lengths[one]] for one in part]))
        model.zero_grad()
        world.barrier()
        began = time.perf_counter()
        objective.loss(batch).total(torch.tensor([int(lengths.sum())])).backward()
        ready = time.perf_counter()
        world.barrier()
        ended = time.perf_counter()
        times.add(batch.items.lengths_B, ready - began)
        waits[policy].append((ended - ready, ended - began))
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    for index in range(16 + steps):
        if index == 16:
            alpha = times.fit(world, alpha)
            waits = {"fixed": [], "cost": [], "same": []}
        lengths = kuairand_lengths(Path(data), size * PER_RANK, 40, longest, rng)
        rows = rng.integers(0, 500, int(lengths.sum()))
        sums = [world.all_reduce_sum(step(policy, lengths, rows)) for policy in (["fixed", "cost"] if index % 2 else ["cost", "fixed"])]
        step("same", lengths, rows)
        differ = max(differ, float((sums[0] - sums[1]).abs().max() / sums[0].abs().max()))
    everybody = world.gather_json(waits)
    if rank == 0:
        found: dict[str, Any] = {"alpha": alpha.alpha, "differ": differ}
        for policy in waits:
            by_step = np.array([ranks[policy] for ranks in everybody])  # [rank, step, (wait, whole)]
            found[policy] = float(by_step[:, :, 0].max(0).sum() / by_step[:, :, 1].mean(0).sum())
            found[f"{policy}_seconds"] = float(np.median(by_step[:, :, 1].mean(0)))
        (Path(folder) / "found.json").write_text(json.dumps(found))
    world.close()


def by_the_clock(data: Path, steps: int, wrong: list[str]) -> dict[str, dict[str, Any]]:
    if len(os.sched_getaffinity(0)) < 2:
        sys.stderr.write("fewer than 2 cores: the measured wait share is left out\n")
        return {}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(rank_main, (2, port, folder, str(data), steps), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]
        found = json.loads((Path(folder) / "found.json").read_text())
    if found["differ"] > 1e-4:
        wrong.append(f"gradients of the two policies differ by {found['differ']:.2e} of the largest")
    baseline = f"fixed {100 * found['fixed']:.2f} %, the same histories on both ranks {100 * found['same']:.2f} %"
    return {
        "measured_wait_share_2_processes": {
            "value": 100 * found["cost"], "unit": "% of a step", "better": "lower", "baseline": baseline, "at_least": 2.4, "aim": 1.0, "runs": steps,
        },
        "step_speedup_2_processes": {"value": found["fixed_seconds"] / found["cost_seconds"], "unit": "ratio", "better": "higher", "baseline": "fixed", "runs": steps},
        "fitted_alpha": {"value": found["alpha"], "unit": "1/items", "better": "higher", "runs": 32},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SEMANTIDE_TEST_DATA", "../shared/data")))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--skip-processes", action="store_true", help="only the cost model")
    options = parser.parse_args()
    options.threads = 1
    wrong: list[str] = []
    measures = in_the_model(options.data, 20 if options.quick else 100, wrong)
    if not options.skip_processes:
        measures |= by_the_clock(options.data, 12 if options.quick else 60, wrong)
    return finish("load_balancing", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
