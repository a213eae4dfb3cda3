"""How much of this device's arithmetic dense training steps use, on packed histories of KuaiRand's lengths: FuXi and HSTU in the `long` shape, scaled.

A step is forward, backward and optimiser of the dense model under a product of its states; look-ups and the loss over items are left out, on both sides
of the ratio. Operations are those that the packed histories need (services/training/flops.py); the peak is that of square matrix products, measured in
turn with the steps. Checked first: a batch's loss is that of its histories one by one.

    python tests/benchmarks/mfu.py [--quick] [--json] [--threads 1] [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stopwatch import finish  # type: ignore[import-not-found]

from semantide.services.training.flops import measured_peak, work_of
from semantide.services.training.recipes import recipe
from semantide.shared.jagged import Jagged
from semantide.shared.models.retriever import Retriever

SHARE = 20
"""Histories are this many times shorter than KuaiRand's."""


def lengths(data: Path | None, count: int, longest: int) -> torch.Tensor:
    """Numbers of items: drawn from KuaiRand-27K's quantiles where they are, else log-normal with their mean and median."""
    rng = np.random.default_rng(0)
    path = None if data is None else data / "kuairand" / "kuairand27k_len_quantiles.csv"
    if path is not None and path.exists():
        with path.open() as file:
            rows = [[float(x) for x in row] for row in csv.reader(file) if row and row[0][0].isdigit()]
        shares, quantiles = np.array(rows).T[:2]
        drawn = np.exp(np.interp(rng.random(count), shares / shares.max(), np.log(np.maximum(quantiles, 1))))
    else:
        print("KuaiRand's lengths are not here (--data): log-normal ones with their mean and median instead", file=sys.stderr)
        drawn = rng.lognormal(np.log(8591), np.sqrt(2 * np.log(11812 / 8591)), count)
    return torch.from_numpy(np.clip(drawn / SHARE, 1, longest).astype(np.int64))


def batch_of(lengths_B: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Item vectors, which rows begin a history, offsets and times."""
    generator = torch.Generator().manual_seed(1)
    offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    total = int(offsets_B1[-1])
    begins_T = torch.zeros(total, dtype=torch.bool)
    begins_T[offsets_B1[:-1]] = True
    times_T = torch.randint(1, 3600, (total,), generator=generator).cumsum(0)
    return torch.randn(total, size, generator=generator), begins_T, offsets_B1, times_T


def per_history(model: Retriever, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The same states, one history at a time."""
    vectors_TD, begins_T, offsets_B1, times_T = given
    found = []
    for rows in Jagged(torch.arange(len(vectors_TD)), offsets_B1):
        found.append(model(vectors_TD[rows], begins_T[rows], torch.tensor([0, len(rows)]), times_T[rows]))
    return torch.cat(found)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer histories and runs: within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the C++ kernels")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, measures, wrong = torch.device("cpu"), {}, []
    size, layers, histories, runs = (256, 2, 8, 3) if options.quick else (512, 4, 8, 5)
    for layer in ("fuxi", "hstu"):
        longest = 4096 // (4 if options.quick else 2)
        changes: dict[str, Any] = {"hidden_size": size, "num_layers": layers, "num_heads": size // 64, "dropout": 0.0, "embedding_dropout": 0.0}
        config = recipe("fuxi-long" if layer == "fuxi" else "retriever-long", {"retriever": changes, "max_items": longest})
        torch.manual_seed(0)
        model = Retriever(config.retriever)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        lengths_B = lengths(options.data, histories, longest)
        given = batch_of(lengths_B, size)
        few = batch_of(torch.tensor([1, 2, 65, 130]), size)
        with torch.no_grad():
            if not torch.allclose(model(*few), per_history(model, few), rtol=1e-3, atol=1e-4):
                wrong.append(f"{layer}: states of a batch are not those of its histories")
        target_TD = torch.randn_like(given[0])
        work = work_of(model, config, 0)
        # The loss is one product of states and targets, which is no matrix product.
        flops = work.flops(lengths_B) - 6 * work.per_item * int(lengths_B.sum())

        def step(
            model: Retriever = model, optimiser: torch.optim.Optimizer = optimiser, given: Any = given, target_TD: torch.Tensor = target_TD
        ) -> dict[str, float]:
            marks = [time.perf_counter()]
            optimiser.zero_grad(set_to_none=True)
            loss = (model(*given) * target_TD).sum()
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            optimiser.step()
            marks.append(time.perf_counter())
            return {name: end - begin for name, begin, end in zip(("forward", "backward", "optimiser"), marks[:-1], marks[1:], strict=True)}

        step()
        shares, peaks, spent = [], [], []
        for _ in range(runs):
            before = measured_peak(device, torch.float32, time.perf_counter)
            spent.append(step())
            peaks.append((before + measured_peak(device, torch.float32, time.perf_counter)) / 2)
            shares.append(flops / sum(spent[-1].values()) / peaks[-1])
        seconds = statistics.median(sum(parts.values()) for parts in spent)
        parts = ", ".join(f"{name} {statistics.median(entry[name] for entry in spent) * 1e3:.0f} ms" for name in spent[0])
        bounds = {"at_least": 0.5, "aim": 0.65} if layer == "fuxi" else {}
        what = f"{int(lengths_B.sum())} items in {histories} histories, longest {int(lengths_B.max())}, D={size}, {layers} layers; {parts}"
        entry = {"value": round(statistics.median(shares), 4), "unit": "share", "better": "higher", "baseline": "measured matrix-product peak"}
        measures[f"mfu_{layer}_long_scaled"] = entry | bounds | {"runs": runs, "work": what}
        for name, value, unit in (
            ("gflops_per_second", flops / seconds / 1e9, "GFLOP/s"),
            ("peak_gflops_per_second", statistics.median(peaks) / 1e9, "GFLOP/s"),
            ("tokens_per_second", int(lengths_B.sum()) / seconds, "1/s"),
        ):
            measures[f"{name}_{layer}"] = {"value": round(value, 2), "unit": unit, "better": "higher", "baseline": what, "runs": runs}
        pairs = float((lengths_B.double() * (lengths_B + 1) / 2).sum())
        measures[f"attention_share_{layer}"] = {
            "value": round(6 * work.per_pair * pairs / flops, 3), "unit": "of flops", "better": "lower", "baseline": what, "runs": 1,
        }  # fmt: skip
    return finish("mfu", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
