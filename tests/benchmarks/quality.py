"""Recommendation quality on public data: popularity, SASRec with a softmax loss, the retriever (HSTU, FuXi-alpha), and the generator with our and with published ids.

Protocol: leave-one-out, the validation item is part of the input at test time, full ranking over all items, the epoch is chosen by validation
NDCG@10. Every row is given with the seen-item filter off and on. Runs at the same time share the cores.
Usage: python tests/benchmarks/quality.py --data DIR [--dataset beauty|ml-1m] [--seeds 3] [--models ...] [--quick] [--json]
DIR holds beauty.seq or ml-1m.seq (and what belongs to it).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import numpy.typing as npt
import public_data
import torch
from machine import machine

from semantide.services.tokenization.spelling import build
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.initialisation import FloatArray, begin_at_codebooks, centroids
from semantide.services.training.objective import NextItem, NextToken, Objective
from semantide.services.training.rankers import GeneratorRanker, PopularityRanker, Ranker, RetrieverRanker, SASRecRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.brute_force import score_every_item
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.popularity import Popularity
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.sasrec import SASRec
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.trie import Trie
from semantide.shared.version import code_version

KS = (5, 10, 50)
BEAM_WIDTH = 50
MODELS = ("generator", "letter", "sasrec", "retriever", "fuxi")

_BEAUTY_SHAPE = {
    "seen_bias": True,
    "num_layers": 2,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "beauty": {
        "file": "beauty.seq",
        "load": public_data.beauty,
        "tokenizer": TokenizerConfig(level_sizes=(1024, 64), content_weight=0.7),
        "generator": {
            "generator": {**_BEAUTY_SHAPE, "dropout": 0.2, "embedding_dropout": 0.1, "initializer_range": 0.06},
            "max_items": 30, "items_per_batch": 768, "learning_rate": 2e-3, "label_smoothing": 0.02, "codebook_share": 0.7, "skip_rate": 0.2, "epochs": 26, "patience": 4,
            "evaluate_every": 4, "valid_users": 3000, "warmup_steps": 200,
        },
        "letter": {
            "generator": {**_BEAUTY_SHAPE, "dropout": 0.2, "embedding_dropout": 0.1, "initializer_range": 0.06},
            "max_items": 20, "items_per_batch": 768, "learning_rate": 2e-3, "label_smoothing": 0.02, "codebook_share": 0.7, "skip_rate": 0.2, "epochs": 26, "patience": 4,
            "evaluate_every": 4, "valid_users": 2000, "warmup_steps": 200,
        },
        "sasrec": {
            "sasrec": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "feedforward_size": 64, "dropout": 0.3, "embedding_dropout": 0.3, "initializer_range": 0.125},
            "max_items": 50, "items_per_batch": 1024, "learning_rate": 3e-3, "num_negatives": 1500, "weight_decay": 0.0, "epochs": 27, "patience": 4,
            "evaluate_every": 3, "valid_users": 3000, "warmup_steps": 0,
        },
        "retriever": {
            "retriever": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.3, "embedding_dropout": 0.3, "time_buckets": 0, "initializer_range": 0.05},
            "max_items": 50, "items_per_batch": 1024, "learning_rate": 2e-3, "num_negatives": 1500, "epochs": 27, "patience": 4,
            "evaluate_every": 3, "valid_users": 3000, "warmup_steps": 100,
        },
        "bounds": {
            ("retriever", 10, True): ("HSTU, eSASRec's run, filtered", 0.0788, 0.0921, 0.0439, 0.0531),
            ("generator", 10, False): ("TIGER as published", 0.0648, 0.0809, 0.0384, 0.0464),
            ("generator", 10, True): ("SASRec tuned by eSASRec, filtered", 0.0921, 0.0921, 0.0531, 0.0531),
            ("letter", 10, False): ("LETTER-TIGER reproduced", 0.067, 0.067, 0.036, 0.036),
        },
    },
    "ml-1m": {
        "file": "ml-1m.seq",
        "load": public_data.ml_1m,
        "tokenizer": TokenizerConfig(level_sizes=(64, 64), content_weight=0.3, window=5),
        "generator": {
            "generator": {"seen_bias": True, "num_layers": 3, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 256, "embedding_scale": 4.0, "level_scales": True,
                          "dropout": 0.1, "embedding_dropout": 0.1, "tie_word_embeddings": True, "initializer_range": 0.05},
            "codebook_share": 0.0, "label_smoothing": 0.0, "skip_rate": 0.0, "max_items": 200, "crop": "mixed", "items_per_batch": 3200, "learning_rate": 3e-3, "muon_rate": 0.02, "epochs": 12, "patience": 5,
            "evaluate_every": 3, "valid_users": 1000, "warmup_steps": 100,
        },
        "sasrec": {
            "sasrec": {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "feedforward_size": 256, "embedding_scale": 4.0, "positions": "start"},
            "max_items": 200, "crop": "cover", "items_per_batch": 3200, "learning_rate": 1.5e-3, "weight_decay": 0.01, "epochs": 10, "patience": 4,
            "evaluate_every": 1, "valid_users": 2000, "warmup_steps": 200,
        },
        "retriever": {
            "retriever": {"hidden_size": 128, "num_layers": 3, "num_heads": 2, "dropout": 0.2, "embedding_dropout": 0.2, "time_buckets": 0, "initializer_range": 0.02},
            "max_items": 200, "crop": "cover", "items_per_batch": 3200, "learning_rate": 4e-3, "num_negatives": 1024, "epochs": 30, "patience": 5,
            "evaluate_every": 1, "valid_users": 2000, "warmup_steps": 200,
        },
        "bounds": {
            ("generator", 10, False): ("SASRec, sampled softmax", 0.2853, 0.3294, 0.1603, 0.1893),
            ("retriever", 10, False): ("HSTU / HSTU-large as published", 0.295, 0.3294, 0.165, 0.1893),
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One model to train and measure; ``codes`` and ``codebooks`` are None for SASRec and the retriever."""

    name: str
    seed: int
    config: TrainConfig
    codes: npt.NDArray[np.int64] | None
    codebooks: list[FloatArray | None]
    level_sizes: tuple[int, ...]


def assemble(dataset: Dataset, run: Run, beam_width: int) -> tuple[Objective, Ranker]:
    """The objective with a fresh model, and the ranker of that model."""
    torch.manual_seed(run.seed)
    config, rows = run.config, np.arange(len(dataset.item_ids))
    if config.model_type == "retriever":
        shape = replace(config.retriever, max_items=config.max_items)
        retriever = Retriever(shape)
        table = LocalTable(len(rows), shape.hidden_size, optimiser=config.table_optimiser, std=shape.initializer_range, beta2=config.beta2, seed=run.seed)
        counts = torch.bincount(torch.from_numpy(np.concatenate([*dataset.train_histories()]).astype(np.int64)), minlength=len(rows))
        return NextItemSampled(retriever, table, counts, config), RetrieverRanker(retriever, table.read, rows, config.max_items)
    if run.codes is None:
        sasrec = SASRec(replace(config.sasrec, num_items=len(rows), max_items=config.max_items))
        return NextItem(sasrec, config), SASRecRanker(sasrec, rows, config.max_items)
    generator = Generator(replace(config.generator, level_sizes=run.level_sizes, vocab_size=0))
    if config.codebook_share:
        begin_at_codebooks(generator, run.codebooks, config.codebook_share, run.seed)
    tokens = torch.from_numpy(generator.vocabulary.item_tokens(run.codes))
    return NextToken(generator, tokens, config), GeneratorRanker(generator, Trie.build(run.codes), run.codes, rows, config.max_items, beam_width)


def train_and_measure(dataset: Dataset, quick: bool, threads: int, run: Run) -> dict[str, Any]:
    """Train one model, then rank the test items with the seen filter off and on."""
    torch.set_num_threads(threads)
    begin, config, items = time.monotonic(), run.config, len(dataset.item_ids)
    objective, ranker = assemble(dataset, run, config.valid_beam_width)
    valid = cases_of(dataset, "valid", config.valid_users, seed=0)

    def validate() -> dict[str, float]:
        figures = evaluate(ranker, valid, ks=(10,), num_items=items, exclude_seen=False)
        sys.stderr.write(
            f"{run.name} seed {run.seed}: {time.monotonic() - begin:.0f} s, validation R@10 {figures['recall@10']:.4f} N@10 {figures['ndcg@10']:.4f}\n"
        )
        return figures

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            config, objective, Sampler(dataset.train_histories(), config, run.seed), validate, Listener(time.monotonic), Path(scratch), seed=run.seed
        )
        state = trainer.run()
    trained = time.monotonic() - begin
    if run.codes is not None:
        assert isinstance(objective.model, Generator)
        ranker = GeneratorRanker(objective.model, Trie.build(run.codes), run.codes, np.arange(items), config.max_items, BEAM_WIDTH)
    test = cases_of(dataset, "test", 300 if quick else None)
    rows = {seen: evaluate(ranker, test, ks=KS, num_items=items, exclude_seen=seen) for seen in (False, True)}
    parameters = sum(parameter.numel() for parameter in objective.model.parameters())
    parameters += sum(table.state()["weight"].numel() for table in objective.tables.values())
    return {"name": run.name, "seed": run.seed, "rows": rows, "epochs": state.epoch, "best_epoch": state.best_epoch, "valid_ndcg": state.best,
            "parameters": parameters, "train_seconds": trained, "seconds": time.monotonic() - begin}  # fmt: skip


def end_with_parent() -> None:
    """End this process when the one that started it does, however that ends."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def same_answer(dataset: Dataset, run: Run) -> bool:
    """Whether beam search as wide as the catalog returns what scoring every item does, for a fresh model."""
    assert run.codes is not None
    torch.manual_seed(1)
    generator = Generator(replace(run.config.generator, level_sizes=run.level_sizes, vocab_size=0, initializer_range=0.3)).double().eval()
    cases = cases_of(dataset, "test", 3)
    ranker = GeneratorRanker(generator, Trie.build(run.codes), run.codes, np.arange(len(run.codes)), 20, len(run.codes))
    lists = ranker.rank([case.history for case in cases], 50, exclude_seen=False)
    tokens = generator.vocabulary.item_tokens(run.codes)
    prompts = Jagged.from_sequences(generator.vocabulary.history_tokens(tokens[history_window(case.history, 20)]) for case in cases)
    scores = score_every_item(GeneratorDecoder(generator), run.codes, prompts.values, prompts.offsets_B1)
    return all(np.allclose(np.sort(score)[::-1][:50], score[row]) for score, row in zip(scores, lists, strict=True))


def plan(name: str, dataset: Dataset, folder: Path, seeds: int, quick: bool) -> list[Run]:
    """All runs of a data set, the longest first."""
    settings = SETTINGS[name]
    short: dict[str, Any] = {"epochs": 1, "valid_users": 100, "evaluate_every": 1} if quick else {}
    tokenizer = replace(settings["tokenizer"], iterations=5) if quick else settings["tokenizer"]
    spelled = build(dataset, tokenizer, seed=0)
    sys.stderr.write(f"spelled {len(spelled.catalog)} items over levels {spelled.catalog.level_sizes}\n")
    books = list(spelled.tokenizer.codes.codebooks)
    runs = []
    if "letter" in settings and not quick:
        codes, sizes = public_data.letter_ids(folder, dataset), (256,) * 4
        table = np.stack(dataset.item_table["embedding"].to_numpy())
        runs.append(Run("letter", 0, recipe("small", {**settings["letter"], **short}), codes, centroids(table, codes, sizes), sizes))
    config = recipe("small", {**settings["generator"], **short})
    runs += [Run("generator", seed, config, spelled.catalog.codes, books, spelled.catalog.level_sizes) for seed in range(1 if quick else seeds)]
    for row, base in (("retriever", "retriever-small"), ("fuxi", "fuxi-small")):
        numbers = {**settings["retriever"], **short, "retriever": {**settings["retriever"]["retriever"], "layer": "hstu" if row == "retriever" else "fuxi"}}
        runs.append(Run(row, 0, recipe(base, numbers), None, [], ()))
    runs.append(Run("sasrec", 0, recipe("sasrec", {**settings["sasrec"], **short}), None, [], ()))
    return runs


def measures_of(name: str, results: list[dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Means over seeds, one measure per model, metric and filter, with the bounds where there are any and all users were measured."""
    measures: dict[str, Any] = {}
    for model in dict.fromkeys(result["name"] for result in results):
        own = [result for result in results if result["name"] == model]
        for seen in (False, True):
            for metric in (f"{kind}@{k}" for k in KS for kind in ("recall", "ndcg")):
                values = [result["rows"][seen][metric] for result in own]
                entry: dict[str, Any] = {
                    "value": float(np.mean(values)),
                    "unit": "share",
                    "better": "higher",
                    "runs": len(values),
                    "spread": float(np.std(values)),
                }
                bound = SETTINGS[name]["bounds"].get((model, int(metric.split("@")[1]), seen))
                if bound and not quick:
                    entry |= {
                        "baseline": bound[0],
                        "at_least": bound[1 if metric.startswith("recall") else 3],
                        "aim": bound[2 if metric.startswith("recall") else 4],
                    }
                measures[f"{name}_{model}_{metric.replace('@', '')}_{'filtered' if seen else 'unfiltered'}"] = entry
    return measures


def main() -> int:
    """Run, check, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", choices=SETTINGS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["generator", "letter", "sasrec", "retriever"], help="which rows to train")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at the same time; they share the cores")
    parser.add_argument("--quick", action="store_true", help="a few users and one epoch: shows that it works, not how well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = options.dataset or next((name for name, settings in SETTINGS.items() if (options.data / settings["file"]).is_file()), None)
    if name is None or not (options.data / SETTINGS[name]["file"]).is_file():
        sys.stderr.write(f"{options.data} holds none of {', '.join(s['file'] for s in SETTINGS.values())}: give the folder of a data set with --data\n")
        return 2
    begin = time.monotonic()
    dataset = SETTINGS[name]["load"](options.data, 1500 if options.quick and name == "beauty" else 150 if options.quick else None)
    planned = plan(name, dataset, options.data, options.seeds, options.quick)
    runs = [run for run in planned if run.name in options.models]
    if not same_answer(dataset, next(run for run in planned if run.name == "generator")):
        sys.stderr.write("beam search over the whole catalog does not return the items of the best scores\n")
        return 1
    popularity = PopularityRanker(Popularity.fit(dataset.train_histories(), len(dataset.item_ids)))
    test = cases_of(dataset, "test", 300 if options.quick else None)
    rows = {seen: evaluate(popularity, test, ks=KS, num_items=len(dataset.item_ids), exclude_seen=seen) for seen in (False, True)}
    results: list[dict[str, Any]] = [
        {"name": "popularity", "seed": 0, "rows": rows, "epochs": 0, "best_epoch": 0, "parameters": 0, "train_seconds": 0.0, "seconds": 0.0}
    ]
    with multiprocessing.get_context("spawn").Pool(min(options.workers, len(runs)), initializer=end_with_parent) as pool:
        for result in pool.imap_unordered(partial(train_and_measure, dataset, options.quick, max(1, (os.cpu_count() or 1) // options.workers)), runs):
            results.append(result)
            # A run of an hour that is broken off must not lose what it has measured.
            sys.stderr.write(json.dumps({**result, "rows": {"seen" if seen else "all": figures for seen, figures in result["rows"].items()}}) + "\n")
    results.sort(key=lambda result: (result["name"], result["seed"]))
    measures = measures_of(name, results, options.quick)
    minutes = (time.monotonic() - begin) / 60
    report = {"benchmark": "quality", "commit": code_version(), "machine": machine(), "dataset": name, "quick": options.quick, "minutes": round(minutes, 1),
              "beam_width": BEAM_WIDTH, "ranking": "full", "measures": measures,
              "runs": [{key: value for key, value in result.items() if key != "rows"} for result in results],
              "configs": {run.name: asdict(run.config) for run in runs}}  # fmt: skip
    if options.json:
        print(json.dumps(report))
        return 0
    metrics = [f"{kind}@{k}" for k in KS for kind in ("recall", "ndcg")]
    print(f"{name}: {len(dataset.user_ids)} users, {len(dataset.item_ids)} items, full ranking, beam width {BEAM_WIDTH}, {minutes:.1f} minutes")
    print(f"{'model':<12}{'seed':>5} {'seen filter':<12}" + "".join(f"{metric:>12}" for metric in metrics) + f"{'epoch':>8}{'train s':>9}{'weights':>10}")
    for result in results:
        for seen in (False, True):
            figures = "".join(f"{result['rows'][seen][metric]:>12.4f}" for metric in metrics)
            print(
                f"{result['name']:<12}{result['seed']:>5} {'on' if seen else 'off':<12}{figures}{result['best_epoch']:>8}{result['train_seconds']:>9.0f}{result['parameters']:>10}"
            )
    for measure, entry in measures.items():
        if "at_least" in entry:
            verdict = "met" if entry["value"] >= entry["at_least"] else "MISSED"
            print(
                f"{measure}: {entry['value']:.4f} +- {entry['spread']:.4f} over {entry['runs']} seeds; at least {entry['at_least']} ({entry['baseline']}): {verdict}; aim {entry['aim']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
