"""How much of a step is computing when batches follow each other through the six stages, with waits as long as those of a network and a disk.

Exchanges take 24.12 % of a step that does one thing after another (TurboGR's share before overlap), reading the batch another 10 %. Each row of the
table is a run with so many batches in flight and so many updates behind; equal staleness must give equal losses and tables, bit for bit.
    compute_share   time in forward, backward and dense optimiser over the wall, as TurboGR counts
    useful_share    the same work's time in the run with one batch in flight, over the wall: what threads take from each other counts against it
Usage: python tests/benchmarks/pipeline.py [--data DIR] [--json] [--quick] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distant_table import Delays, Outcome, train
from kuairand_lengths import kuairand_lengths
from stopwatch import finish

SPARSE, LOAD, SCALE, LONGEST = 0.2412, 0.10, 100.0, 512
MODES = {"one": (1, 0), "flights6_sync": (6, 0), "flights6_stale1": (6, 1), "flights6_stale2": (6, 2)}


def main() -> int:
    """Run, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer steps and runs: within a minute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = kuairand_lengths(options.data, 200 if options.quick else 800, SCALE, LONGEST, np.random.default_rng(0)).tolist()
    dense = train(lengths[: len(lengths) // 2], Delays(), in_flight=1, staleness=0).dense_seconds
    delays = Delays.of_step(dense, SPARSE, LOAD)
    runs = 1 if options.quick else 5
    outcomes: dict[str, list[Outcome]] = {name: [] for name in MODES}
    for _ in range(runs):
        for name, (in_flight, staleness) in MODES.items():
            outcomes[name].append(train(lengths, delays, in_flight=in_flight, staleness=staleness))
    wrong = [name for name in ("flights6_sync",) if not same(outcomes["one"][0], outcomes[name][0])]
    for name in ("flights6_stale1", "flights6_stale2"):
        plain = train(lengths, Delays(), in_flight=1, staleness=MODES[name][1])
        wrong += [] if same(plain, outcomes[name][0]) else [name]
    measures: dict[str, dict[str, Any]] = {}
    alone = statistics.median(outcome.dense_seconds for outcome in outcomes["one"])
    for name in MODES:
        bounds = {"at_least": 0.94, "aim": 0.97} if name == "flights6_stale1" else {}
        entry = {"unit": "share", "better": "higher", "baseline": "one batch in flight", "runs": runs}
        compute = statistics.median(outcome.shares["compute_share"] for outcome in outcomes[name])
        measures[f"compute_share_{name}"] = {"value": compute, **entry, **bounds}
        useful = statistics.median(alone / outcome.step_seconds for outcome in outcomes[name])
        measures[f"useful_share_{name}"] = {"value": useful, **entry}
        for share in ("exposed_load", "exposed_sparse", "idle_share"):
            value = statistics.median(outcome.shares[share] for outcome in outcomes[name])
            measures[f"{share}_{name}"] = {"value": value, **entry, "better": "lower"}
    return finish("pipeline", options, measures, wrong)


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two runs computed the same."""
    return one.losses == other.losses and torch.equal(one.weight_ND, other.weight_ND)


if __name__ == "__main__":
    raise SystemExit(main())
