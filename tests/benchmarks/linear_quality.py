"""Recommendation quality of hybrids beside pure softmax and pure linear attention, with equal parameters, data, ids, seeds and steps.

Protocol and other numbers are those of quality.py: leave-one-out, full ranking, the epoch chosen by validation NDCG@10, seen-item filter off and on. All arms have four
layers and the width of the feed-forward blocks that makes their parameters equal to those of the softmax arm; `hybrid` has softmax in the last layer only.
Answers first: the beams of every arm are compared with a plain forward of what they hold; exit 1 where they differ.

    python tests/benchmarks/linear_quality.py --data DIR [--dataset beauty|ml-1m] [--seeds 3] [--arms softmax hybrid linear kda] [--workers N] [--quick] [--json]

DIR holds beauty.seq or ml-1m.seq (and what belongs to it).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from quality import KS, SETTINGS, Run, end_with_parent, train_and_measure
from stopwatch import finish

from semantide.services.tokenization.spelling import build
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.trie import Trie

LAYERS = 4
ARMS = {
    "softmax": (),
    "hybrid": ("linear_attention",) * (LAYERS - 1) + ("full_attention",),
    "linear": ("linear_attention",) * LAYERS,
    "kda": ("kda",) * (LAYERS - 1) + ("full_attention",),
    "gla": ("gla",) * (LAYERS - 1) + ("full_attention",),
    "mamba2": ("mamba2",) * (LAYERS - 1) + ("full_attention",),
}


def parameters(shape: GeneratorConfig) -> int:
    """Of a model of this shape."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Generator(shape).parameters())


def shape_of(arm: str, base: GeneratorConfig) -> GeneratorConfig:
    """The arm's layers, their feed-forward width such that the parameters are those of the softmax arm."""
    softmax = replace(base, num_layers=LAYERS)
    if not ARMS[arm]:
        return softmax
    heads = base.num_heads
    linear = LinearConfig(max(1, heads // 2), heads, base.head_dim, base.head_dim)
    found = replace(softmax, layer_types=ARMS[arm], linear=linear, attention_gate=True, centred_norms=True)
    left = parameters(softmax) - parameters(replace(found, intermediate_size=1))
    return replace(found, intermediate_size=1 + round(left / (3 * base.hidden_size * LAYERS)))


def wrong_beams(arm: str, config: TrainConfig, codes: Any, level_sizes: tuple[int, ...]) -> list[str]:
    """Whether the scores of a fresh model's beams are those of a plain forward of prompt and codes."""
    torch.manual_seed(0)
    generator = Generator(replace(config.generator, level_sizes=level_sizes, vocab_size=0, initializer_range=0.3, seen_bias=False)).eval()
    vocabulary = generator.vocabulary
    prompt = torch.from_numpy(vocabulary.history_tokens(vocabulary.item_tokens(codes[:5])))
    offsets = torch.tensor([0, len(prompt)])
    found = beam_search(GeneratorDecoder(generator), Trie.build(codes), prompt, offsets, 8)
    firsts = torch.tensor([vocabulary.first(level) for level in range(vocabulary.levels)])
    chosen = torch.from_numpy(codes)[found.rows_RW[0, : int(found.counts_R[0])]]
    with torch.no_grad():
        for row, score in zip(chosen, found.scores_RW[0], strict=False):
            tokens = torch.cat([prompt, row + firsts])
            hidden = generator(tokens, torch.tensor([0, len(tokens)]))[len(prompt) - 1 : -1]
            plain = sum(generator.logits(hidden[level], level).log_softmax(-1)[row[level]] for level in range(vocabulary.levels))
            if abs(float(plain) - float(score)) > 1e-3:
                return [f"{arm}: a beam's score is {float(score):.4f}, and {float(plain):.4f} by a plain forward"]
    return []


def plan(name: str, folder: Path, options: argparse.Namespace) -> tuple[Any, list[Run], list[str]]:
    """The data set, all runs, and what is wrong with an arm's beams."""
    settings, quick = SETTINGS[name], options.quick
    dataset = settings["load"](folder, (1500 if name == "beauty" else 150) if quick else None)
    spelled = build(dataset, replace(settings["tokenizer"], iterations=5) if quick else settings["tokenizer"], seed=0)
    short: dict[str, Any] = {"epochs": 1, "valid_users": 100, "evaluate_every": 1} if quick else {}
    config = recipe("small", {**settings["generator"], **short})
    codes, sizes, books = spelled.catalog.codes, spelled.catalog.level_sizes, list(spelled.tokenizer.codes.codebooks)
    runs, wrong = [], []
    for arm in options.arms:
        own = replace(config, generator=shape_of(arm, replace(config.generator, level_sizes=sizes)))
        wrong += wrong_beams(arm, own, codes, sizes)
        runs += [Run(arm, seed, own, codes, books, sizes) for seed in range(1 if quick else options.seeds)]
    return dataset, runs, wrong


def measures_of(name: str, results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over seeds of every arm, and by how much each is above the softmax arm, seed by seed."""
    measures: dict[str, dict[str, Any]] = {}
    arms = dict.fromkeys(result["name"] for result in results)
    for arm in arms:
        own = sorted((result for result in results if result["name"] == arm), key=lambda result: result["seed"])
        told = f"{own[0]['parameters']} weights, {np.mean([result['train_seconds'] for result in own]):.0f} s of training"
        for seen in (False, True):
            for metric in (f"{kind}@{k}" for k in KS for kind in ("recall", "ndcg")):
                key = f"{name}_{arm}_{metric.replace('@', '')}_{'filtered' if seen else 'unfiltered'}"
                values = np.array([result["rows"][seen][metric] for result in own])
                measures[key] = {
                    "value": float(values.mean()),
                    "unit": "share",
                    "better": "higher",
                    "baseline": told,
                    "runs": len(values),
                    "spread": float(values.std()),
                }
                if arm != "softmax" and "softmax" in arms and metric == "ndcg@10":
                    theirs = np.array([r["rows"][seen][metric] for r in sorted((r for r in results if r["name"] == "softmax"), key=lambda r: r["seed"])])
                    if not theirs.all():
                        continue  # a quick run's few users may find nothing
                    apart = 100 * (values / theirs - 1)
                    noise = 100 * theirs.std() / theirs.mean()
                    measures[f"{key}_above_softmax"] = {
                        "value": float(apart.mean()), "unit": "%", "better": "higher", "baseline": f"softmax, whose seeds differ by {noise:.2f} %",
                        "at_least": round(-float(noise), 3), "aim": 0, "runs": len(values), "spread": float(apart.std()),
                    }  # fmt: skip
    return measures


def main() -> int:
    """Train every arm, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["softmax", "hybrid", "linear"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at the same time; they share the cores")
    parser.add_argument("--quick", action="store_true", help="a few users and one epoch: shows that it works, not how well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.threads = max(1, (os.cpu_count() or 1) // options.workers)
    name = options.dataset or next((name for name, settings in SETTINGS.items() if (options.data / settings["file"]).is_file()), None)
    if name is None or not (options.data / SETTINGS[name]["file"]).is_file():
        sys.stderr.write(f"{options.data} holds none of {', '.join(s['file'] for s in SETTINGS.values())}: give the folder of a data set with --data\n")
        return 2
    dataset, runs, wrong = plan(name, options.data, options)
    results = []
    with multiprocessing.get_context("spawn").Pool(min(options.workers, len(runs)), initializer=end_with_parent) as pool:
        for result in pool.imap_unordered(partial(train_and_measure, dataset, options.quick, options.threads), runs):
            results.append(result)
            # A run of an hour that is broken off must not lose what it has measured.
            sys.stderr.write(json.dumps({**result, "rows": {"seen" if seen else "all": figures for seen, figures in result["rows"].items()}}) + "\n")
    return finish("linear_quality", options, measures_of(name, results), wrong)


if __name__ == "__main__":
    sys.exit(main())
