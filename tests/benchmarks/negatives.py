"""Sampled negatives: memory and time of the loss against plain torch, and with --quality what short vectors and sharing do to a retriever.

The plain form gathers a vector for every negative, [targets, negatives, features], and leaves the gradients to autograd. Memory is the peak of this process's
resident memory over a forward and a backward pass, above what hidden states, vectors and the drawn rows occupy; the kernel resets the peak before each.

    python tests/benchmarks/negatives.py [--quick] [--json] [--threads 1]
    python tests/benchmarks/negatives.py --quality --data DIR [--seeds 3] [--only float32-128 vectors-64x4 ...] [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import public_data  # type: ignore[import-not-found]
from stopwatch import alternate, finish  # type: ignore[import-not-found]

from semantide.kernels.known_rows import is_known
from semantide.kernels.sampled_softmax import known_keys, sampled_softmax
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.rankers import RetrieverRanker
from semantide.services.training.recipes import NegativesConfig, TrainConfig, recipe
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.dataset import Dataset
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever

ITEMS, SIZE = 50_000, 64


class Work:
    """A batch of targets with negatives of their own, and its leaves."""

    def __init__(self, targets: int, negatives: int) -> None:
        draw = torch.Generator().manual_seed(negatives)
        self.hidden_TD = (torch.randn(targets, SIZE, generator=draw) / 8).requires_grad_()
        self.vectors_UD = torch.randn(ITEMS, SIZE, generator=draw).requires_grad_()
        self.positives_T = torch.randint(0, ITEMS, (targets,), generator=draw)
        self.negatives_TR = torch.randint(0, ITEMS, (targets, negatives), generator=draw)
        self.log_q_TR = -5 * torch.rand(targets, negatives, generator=draw)
        self.sequences_T = torch.arange(targets) // 16
        self.known_K = known_keys(self.sequences_T, self.positives_T, ITEMS)
        self.partners_MT = torch.stack([torch.randperm(targets, generator=draw) for _ in range(3)])

    def run(self, function: Callable[..., Tensor], **options: Any) -> tuple[float, Tensor, Tensor]:
        """Forward and backward."""
        given = {"log_q_TR": self.log_q_TR, "sequences_T": self.sequences_T, "known_K": self.known_K, **options}
        total = function(self.hidden_TD, self.vectors_UD, self.positives_T, self.negatives_TR, **given).sum()
        gradients = torch.autograd.grad(total, [self.hidden_TD, self.vectors_UD])
        return float(total.detach()), *gradients


def plain(
    hidden_TD: Tensor, vectors_UD: Tensor, positives_T: Tensor, negatives_TR: Tensor, *, log_q_TR: Tensor, sequences_T: Tensor, known_K: Tensor
) -> Tensor:
    """The baseline: the same loss as one would write it, with its backward pass left to autograd."""
    positive_T = (hidden_TD * F.embedding(positives_T, vectors_UD)).sum(-1)
    logits_TR = torch.einsum("td,trd->tr", hidden_TD, F.embedding(negatives_TR, vectors_UD)) - log_q_TR - math.log(negatives_TR.shape[1])
    out_TR = (negatives_TR == positives_T.unsqueeze(1)) | is_known(sequences_T.unsqueeze(1), negatives_TR, known_K, len(vectors_UD))
    return torch.cat([positive_T.unsqueeze(1), logits_TR.masked_fill(out_TR, -torch.inf)], 1).logsumexp(1) - positive_T


def resident(field: str) -> int:
    """A line of this process's status, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_bytes(function: Callable[[], Any]) -> int:
    """By how much the resident memory grows at its highest while the function runs."""
    function()  # what is made once and kept is not this call's
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def memory_and_time(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The tables of the loss alone."""
    targets, measures, wrong = 4096 if options.quick else 8192, dict[str, dict[str, Any]](), []
    forms: dict[str, dict[str, Any]] = {"float32": {}, "float16": {"precision": "float16"}, "int8": {"precision": "int8"}}
    peaks: dict[tuple[str, int], int] = {}
    for negatives in (32, 128) if options.quick else (32, 64, 128, 512):
        work = Work(targets, negatives)
        ours, theirs = work.run(sampled_softmax), work.run(plain)
        if not all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-3, atol=1e-4) for a, b in zip(ours, theirs, strict=True)):
            wrong.append(f"{negatives} negatives")
        for name, form in forms.items():
            peaks[name, negatives] = peak_bytes(lambda form=form, work=work: work.run(sampled_softmax, **form))
        whole = peaks["plain", negatives] = peak_bytes(lambda work=work: work.run(plain))
        saved = 100 * (1 - peaks["float32", negatives] / whole)
        baseline = f"plain torch: {whole / 1e6:.0f} MB, ours {peaks['float32', negatives] / 1e6:.0f} MB"
        entry = {"value": saved, "unit": "% less", "better": "higher", "baseline": baseline}
        measures[f"peak_memory_{negatives}_negatives"] = entry | ({"at_least": 60} if negatives == 128 else {})
        seconds = alternate(
            {
                "plain": lambda work=work: work.run(plain),
                **{name: lambda form=form, work=work: work.run(sampled_softmax, **form) for name, form in forms.items()},
            },
            3 if options.quick else 7,
        )
        for name in forms:
            measures[f"speedup_{negatives}_negatives_{name}"] = {
                "value": seconds["plain"] / seconds[name], "unit": "ratio", "better": "higher",
                "baseline": f"plain torch, {1e3 * seconds['plain']:.0f} ms for {1e3 * seconds[name]:.1f} ms",
            }  # fmt: skip
        if negatives == 32:
            shared = {"partners_MT": work.partners_MT}
            for sharing in ("vectors", "logits"):
                form = {**shared, "sharing": sharing}
                cost = alternate({"k1": lambda work=work: work.run(sampled_softmax), "k4": lambda form=form, work=work: work.run(sampled_softmax, **form)}, 3)
                measures[f"time_32x4_over_32_{sharing}"] = {"value": cost["k4"] / cost["k1"], "unit": "ratio", "better": "lower", "baseline": "no sharing"}
        for name in ("float16", "int8"):
            short = work.run(sampled_softmax, precision=name)[0]
            measures[f"loss_change_{negatives}_negatives_{name}"] = {
                "value": 100 * abs(short / ours[0] - 1),
                "unit": "%",
                "better": "lower",
                "baseline": "float32",
            }
    least, most = min(n for _, n in peaks), max(n for _, n in peaks)
    growth = (peaks["float32", most] - peaks["float32", least]) / peaks["float32", least]
    measures[f"peak_memory_growth_{least}_to_{most}"] = {
        "value": 100 * growth, "unit": "%", "better": "lower", "aim": 10,
        "baseline": f"plain torch: {100 * (peaks['plain', most] / peaks['plain', least] - 1):.0f} %; constant in the number of negatives is the aim",
    }  # fmt: skip
    return measures, wrong


VARIANTS: dict[str, tuple[int, NegativesConfig]] = {
    "float32-128": (128, NegativesConfig()),
    "float16-128": (128, NegativesConfig(precision="float16")),
    "int8-128": (128, NegativesConfig(precision="int8")),
    "float32-64": (64, NegativesConfig()),
    "vectors-64x2": (64, NegativesConfig(expansion=2)),
    "vectors-64x4": (64, NegativesConfig(expansion=4)),
    "logits-64x4": (64, NegativesConfig(expansion=4, sharing="logits")),
}


def trained(dataset: Dataset, config: TrainConfig, seed: int, quick: bool) -> dict[str, float]:
    """Train one retriever and rank the test items, all of them, with the seen filter off."""
    torch.manual_seed(seed)
    items = len(dataset.item_ids)
    shape = replace(config.retriever, max_items=config.max_items)
    model = Retriever(shape)
    table = LocalTable(items, shape.hidden_size, optimiser=config.table_optimiser, std=shape.initializer_range, beta2=config.beta2, seed=seed)
    counts_N = torch.bincount(torch.from_numpy(np.concatenate([*dataset.train_histories()]).astype(np.int64)), minlength=items)
    ranker = RetrieverRanker(model, table.read, np.arange(items), config.max_items)
    valid = cases_of(dataset, "valid", config.valid_users, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        Trainer(
            config,
            NextItemSampled(model, table, counts_N, config),
            Sampler(dataset.train_histories(), config, seed, dataset.train_times()),
            lambda: evaluate(ranker, valid, ks=(10,), num_items=items, exclude_seen=False),
            Listener(time.monotonic),
            Path(scratch),
            seed=seed,
        ).run()
    return evaluate(ranker, cases_of(dataset, "test", 500 if quick else None), ks=(10, 200, 1000, 2000), num_items=items, exclude_seen=False)


def quality(options: argparse.Namespace) -> dict[str, Any]:
    """Means over seeds on Beauty, and their differences from the form they are compared with."""
    dataset = public_data.beauty(options.data / "amazon", 2000 if options.quick else None)
    seeds = 1 if options.quick else options.seeds
    base = recipe("retriever-tiny", {"negative_scope": "target", "negative_power": 0.75, "max_items": 50, "items_per_batch": 2048,
                                     "retriever": {"hidden_size": 64}, "epochs": 1 if options.quick else options.epochs, "valid_users": 1000})  # fmt: skip
    figures: dict[str, list[dict[str, float]]] = {}
    for name in options.only or VARIANTS:
        negatives, config = VARIANTS[name]
        for seed in range(seeds):
            begin = time.monotonic()
            figures.setdefault(name, []).append(trained(dataset, replace(base, num_negatives=negatives, negatives=config), seed, options.quick))
            found = figures[name][-1]
            sys.stderr.write(f"{name} seed {seed}: {time.monotonic() - begin:.0f} s, NDCG@200 {found['ndcg@200']:.4f}, HR@2000 {found['hr@2000']:.4f}\n")
    measures: dict[str, Any] = {}
    for name, runs in figures.items():
        for metric in ("hr@10", "ndcg@10", "ndcg@200", "ndcg@1000", "hr@2000"):
            values = [run[metric] for run in runs]
            measures[f"{name}_{metric.replace('@', '')}"] = {
                "value": float(np.mean(values)), "unit": "share", "better": "higher", "runs": len(values), "spread": float(np.std(values)),
            }  # fmt: skip

    def compare(name: str, other: str, metric: str, at_least: float, unit: str) -> None:
        if name not in figures or other not in figures:
            return
        ours, theirs = (float(np.mean([run[metric] for run in figures[each]])) for each in (name, other))
        noise = float(np.std([run[metric] for run in figures[other]]))
        value = ours - theirs if unit == "difference" else 100 * abs(ours - theirs)
        measures[f"{name}_against_{other}_{metric.replace('@', '')}"] = {
            "value": value, "unit": unit, "better": "higher" if unit == "difference" else "lower", "at_least": at_least,
            "baseline": f"{other}: {theirs:.4f}, spread over seeds {noise:.4f}", "runs": seeds,
        }  # fmt: skip

    for short in ("float16-128", "int8-128"):
        compare(short, "float32-128", "hr@2000", 0.01, "% points")
        compare(short, "float32-128", "ndcg@1000", 0.05, "% points")
    for shared in ("vectors-64x4", "logits-64x4"):
        compare(shared, "float32-128", "ndcg@200", 0.0, "difference")
    return measures


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and runs: within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the C++ kernels")
    parser.add_argument("--quality", action="store_true", help="train retrievers instead: minutes each")
    parser.add_argument("--data", type=Path, help="folder with amazon/, for --quality")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="which forms to train")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quality:
        if options.data is None:
            parser.error("--quality trains on real data: name its folder with --data")
        return int(finish("negatives_quality", options, quality(options), []))
    return int(finish("negatives", options, *memory_and_time(options)))


if __name__ == "__main__":
    sys.exit(main())
