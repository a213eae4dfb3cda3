"""What staleness hides and what it costs: the exchanges' share of a step that nothing covers, and the quality of runs 0, 1 and 2 updates behind.

Exposed share: exchanges of a distant table take 24.12 % of a step that does one thing after another (TurboGR's share). The first three steps, which fill
the stages, and the update after the last are left out. Quality: the retriever on Amazon Beauty, the same steps for every staleness and seed, full ranking; within noise means that
the means differ by less than twice the standard error of their difference. Staleness 0 with six batches in flight must equal one after another.
Usage: python tests/benchmarks/semi_async.py [--data DIR-of-beauty] [--lengths DIR] [--seeds 3] [--json] [--quick] [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import public_data
import torch
from distant_table import Delays, Outcome, train
from kuairand_lengths import kuairand_lengths
from quality import SETTINGS, Run, train_and_measure
from stopwatch import finish

from semantide.services.training.recipes import recipe

SPARSE, SCALE, LONGEST = 0.2412, 100.0, 512
STALENESS = (0, 1, 2)


def exposed(options: argparse.Namespace, wrong: list[str]) -> dict[str, dict[str, Any]]:
    """Shares of the exchanges that nothing covers."""
    lengths = kuairand_lengths(options.lengths, 200 if options.quick else 800, SCALE, LONGEST, np.random.default_rng(0)).tolist()
    dense = train(lengths[: len(lengths) // 2], Delays(), in_flight=1, staleness=0).dense_seconds
    delays, runs = Delays.of_step(dense, SPARSE, 0.0), 1 if options.quick else 5
    modes = {"sync": (1, 0), **{f"stale{staleness}": (6, staleness) for staleness in STALENESS}}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in modes}
    for _ in range(runs):
        for name, (in_flight, staleness) in modes.items():
            outcomes[name].append(train(lengths, delays, in_flight=in_flight, staleness=staleness))
    if outcomes["sync"][0].losses != outcomes["stale0"][0].losses:
        wrong.append("staleness 0 with six batches in flight is not the synchronous run")
    measures: dict[str, dict[str, Any]] = {}
    for name in modes:
        value = statistics.median(outcome.shares["exposed_sparse"] for outcome in outcomes[name])
        bounds = {"at_least": 0.022, "aim": 0.01} if name == "stale1" else {}
        measures[f"exposed_sparse_{name}"] = {
            "value": value,
            "unit": "share",
            "better": "lower",
            "baseline": "TurboGR 0.2412 -> 0.0219",
            "runs": runs,
            **bounds,
        }
        seconds = statistics.median(outcome.step_seconds for outcome in outcomes[name])
        measures[f"step_seconds_{name}"] = {"value": seconds, "unit": "seconds", "better": "lower", "runs": runs}
    return measures


def quality(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Test metrics of the retriever for each staleness, means over seeds."""
    dataset = public_data.beauty(options.data, 1500 if options.quick else None)
    settings = {**SETTINGS["beauty"]["retriever"], **({"epochs": 2, "valid_users": 100, "evaluate_every": 1} if options.quick else {})}
    results: dict[int, list[dict[str, float]]] = {staleness: [] for staleness in STALENESS}
    for seed in range(1 if options.quick else options.seeds):
        for staleness in STALENESS:
            # As long a synchronous beginning as the rate's warm-up.
            sync_steps = 0 if options.quick else settings["warmup_steps"]
            config = replace(recipe("retriever-small", settings), staleness=staleness, sync_steps=sync_steps)
            rows = train_and_measure(dataset, options.quick, options.threads, Run("retriever", seed, config, None, [], ()))["rows"][False]
            sys.stderr.write(f"staleness {staleness} seed {seed}: {rows}\n")
            results[staleness].append(rows)
    measures: dict[str, dict[str, Any]] = {}
    for metric in ("recall@10", "ndcg@10"):
        base = [row[metric] for row in results[0]]
        for staleness in STALENESS:
            values = [row[metric] for row in results[staleness]]
            entry: dict[str, Any] = {"value": statistics.mean(values), "unit": "share", "better": "higher", "baseline": "staleness 0", "runs": len(values)}
            if len(values) > 1:
                entry["spread"] = statistics.stdev(values)
                if staleness:
                    noise = math.sqrt((statistics.variance(values) + statistics.variance(base)) / len(values))
                    entry["at_least"] = round(statistics.mean(base) - 2 * noise, 5)
            measures[f"beauty_{metric.replace('@', '')}_stale{staleness}"] = entry
    return measures


def main() -> int:
    """Run, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with Amazon Beauty; without it quality is passed over")
    parser.add_argument("--lengths", type=Path, help="folder that holds kuairand/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer steps, one seed, few users: within a minute or two")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wrong: list[str] = []
    measures = exposed(options, wrong)
    if options.data is not None and (options.data / "beauty.seq").is_file():
        measures |= quality(options)
    else:
        sys.stderr.write("no beauty.seq: quality is passed over; give its folder with --data\n")
    return finish("semi_async", options, measures, wrong)


if __name__ == "__main__":
    raise SystemExit(main())
