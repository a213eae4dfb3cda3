"""What the benchmarks of single kernels share: alternate runs, medians, the table and the JSON object."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine  # type: ignore[import-not-found]

from semantide.shared.version import code_version


def arguments_parser(description: str, data: bool = False) -> argparse.ArgumentParser:
    """The options every one of them has, and the folder of real data where one is read."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and runs: within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the C++ kernels")
    if data:
        parser.add_argument(
            "--data", type=Path, default=Path(__file__).resolve().parents[2].parent / "shared" / "data", help="folder that holds amazon/ and kuairand/"
        )
    return parser


def arguments(description: str, data: bool = False) -> argparse.Namespace:
    """The command line of one that has no other options."""
    options = arguments_parser(description, data).parse_args()
    torch.set_num_threads(options.threads)
    return options


def clock() -> Callable[[], float]:
    """What one thread does, or the time that passes."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def alternate(
    functions: dict[str, Callable[[], object]], runs: int, least_seconds: float = 0.005, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of one call of each function; every run calls all of them in turn, each as often as fills the least time.

    With ``time.process_time`` for a clock what other processes do in between does not count, as it should not where one thread works.
    """
    calls = {}
    for name, function in functions.items():
        function()
        start = clock()
        function()
        calls[name] = max(1, int(least_seconds / max(clock() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name, function in functions.items():
            start = clock()
            for _ in range(calls[name]):
                function()
            seconds[name].append((clock() - start) / calls[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def finish(benchmark: str, options: argparse.Namespace, measures: dict[str, dict[str, Any]], wrong: list[str]) -> int:
    """Print the table or the object; the exit code says whether all answers were equal."""
    where = {**machine(), "threads": options.threads}
    if options.json:
        print(json.dumps({"benchmark": benchmark, "commit": code_version(), "machine": where, "wrong_answers": len(wrong), "measures": measures}))
    else:
        print(f"{benchmark}: {where}")
        print(f"{'measure':44} {'value':>10} {'unit':12} {'at least':>8} {'aim':>6}  baseline")
        for name, entry in measures.items():
            bound, aim = entry.get("at_least", ""), entry.get("aim", "")
            print(f"{name:44} {entry['value']:>10.4g} {entry['unit']:12} {bound:>8} {aim:>6}  {entry.get('baseline', '')}")
        print(f"answers that differ: {len(wrong)}", *wrong, sep="\n  " if wrong else "")
    return 1 if wrong else 0
