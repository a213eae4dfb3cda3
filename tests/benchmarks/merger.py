"""What merging the items of a prompt saves and what it costs: places, prefill, keys and values against the same model unmerged, and recommendation quality.

Saved: one model of random weights read in four ways: item by item as its codes (our layout), its codes and a separator (GenRec's layout), merged to one vector, and
merged to one vector with a separator kept (GenRec's merger). Answers first: decoding of merged prompts is compared with a plain computation written here, and a
returning user's with a new one's; exit 1 where they differ. The readings take turns in one thread; `returning` is a request with one new item.

Costs (with --data, a folder that holds amazon/): Amazon Beauty, leave-one-out, full ranking, beam width 50, seen-item filter off and on, three seeds.
`scratch`: the generator trained with and without a merger from the same seed, for equal steps. `continued`: both go on from the same unmerged checkpoint for equal
steps, where the merger begins as the mean. Every run takes its best epoch by validation NDCG@10.

    python tests/benchmarks/merger.py [--quick] [--json] [--threads N] [--data DIR] [--only speed|quality] [--seeds 3] [--forms merged kept] [--workers 1]

Legend: N items of a prompt, L levels, D hidden size, P places.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import public_data
import torch
from quality import SETTINGS, Run, end_with_parent
from quality import assemble as assembled
from shop import SHAPES
from stopwatch import alternate, arguments_parser, finish
from torch import Tensor

from semantide.services.tokenization.spelling import build
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.initialisation import begin_at_checkpoint
from semantide.services.training.objective import NextToken
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.recipes import recipe
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.dataset import Dataset
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder, PromptKV
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.models.vocabulary import Layout
from semantide.shared.trie import Trie

LEVEL_SIZES = (256, 256, 256)
ITEMS = 12_101
MERGED, KEPT = MergerConfig(True), MergerConfig(True, "kept")
READINGS = {"codes": MergerConfig(), "separated": MergerConfig(), "merged": MERGED, "kept": KEPT}
BASELINES = {"codes": "the same model unmerged, 3 codes an item", "separated": "the same model unmerged, 3 codes and a separator an item"}
BOUNDS = {"places": (2, 4), "prefill": (1.8, 3), "kv": (2, 4)}
KS, BEAM_WIDTH = (10, 50), 50
LOSSES = {"hr@10": {}, "ndcg@10": {}, "hr@50": {"at_least": 0.005, "aim": 0}, "ndcg@50": {"at_least": 0.01, "aim": 0}}
Measure = dict[str, Any]


def say(text: str) -> None:
    """Progress, apart from the result."""
    sys.stderr.write(text + "\n")


@dataclass(frozen=True)
class Readings:
    """One model in every way of reading prompts; where it merges, by a map that is not the mean, as after training."""

    generators: dict[str, Generator]
    codes_NL: np.ndarray

    @classmethod
    def of(cls, shape: str) -> Readings:
        """With random weights, which all share."""
        layouts = {name: Layout(between=(0,)) if name == "separated" else Layout() for name in READINGS}
        generators: dict[str, Generator] = {}
        for name, merger in READINGS.items():
            torch.manual_seed(0)
            config = GeneratorConfig(LEVEL_SIZES, initializer_range=0.08, layout=layouts[name], merger=merger, **SHAPES[shape])  # type: ignore[arg-type]
            generators[name] = Generator(config).eval().requires_grad_(False)
            generators[name].load_state_dict(generators["codes"].state_dict(), strict=False)
            if merger.enabled:
                torch.nn.init.normal_(generators[name].merger.proj.weight, std=0.02)
        numbers = np.random.default_rng(0).choice(int(np.prod(LEVEL_SIZES)), ITEMS, replace=False)
        return cls(generators, np.stack(np.unravel_index(numbers, LEVEL_SIZES), 1).astype(np.int64))

    def prompt(self, name: str, items: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """A history of so many items as this reading spells it, and its offsets."""
        rows = np.random.default_rng([seed, items]).integers(0, ITEMS, items)
        tokens = torch.from_numpy(PromptSpelling.of(self.generators[name], self.codes_NL).prompt(rows))
        return tokens, torch.tensor([0, len(tokens)])


def plain_logits(generator: Generator, prompt: Tensor) -> Tensor:
    """Logits of the first level after a merged prompt, item by item and with a dense mask."""
    levels, table = len(LEVEL_SIZES), generator.model.embed_tokens.weight
    vectors = [table[prompt[0]]]
    for codes in prompt[1:].view(-1, levels):
        embedded = [table[token] for token in codes]
        vectors.append(sum(embedded[1:], embedded[0]) / levels + generator.merger.proj.weight @ torch.cat(embedded))
        vectors += list(generator.merger.places)
    x_PD = torch.stack(vectors)
    cos, sin = generator.rotation(torch.arange(len(x_PD)))
    hidden = torch.ones(len(x_PD), len(x_PD), dtype=torch.bool).triu(1)
    for layer in generator.layers:
        q, k, v = (x.transpose(0, 1) for x in layer.project(x_PD, cos, sin))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
        x_PD = layer.finish(x_PD, (weights @ v).transpose(0, 1))
    return generator.logits(generator.model.norm(x_PD[-1]), 0)


def wrong_answers(shape: str) -> list[str]:
    """What decoding of merged prompts, cold and with a kept prompt, says otherwise than the plain computation."""
    readings, wrong = Readings.of(shape), []
    for name in ("merged", "kept"):
        decoder = GeneratorDecoder(readings.generators[name].double())
        for items in (0, 1, 7, 40):
            prompt, offsets = readings.prompt(name, items)
            cold, state = decoder.begin(prompt, offsets)
            if not torch.allclose(cold[0], plain_logits(decoder.generator, prompt), rtol=1e-8, atol=1e-8):
                wrong.append(f"{shape}: {name} prompt of {items} items against the plain computation")
            before = prompt[: 1 + (len(prompt) - 1) // 6 * 3]
            kept = decoder.begin(before, torch.tensor([0, len(before)]))[1].prompt_kv(0)
            warm, warm_state = decoder.begin(prompt, offsets, [kept])
            if not (torch.allclose(cold, warm, rtol=1e-8, atol=1e-8) and torch.allclose(state.prompt_L2PGd, warm_state.prompt_L2PGd, rtol=1e-8, atol=1e-8)):
                wrong.append(f"{shape}: {name} prompt of {items} items, a returning user")
    return wrong


def saved(options: argparse.Namespace) -> tuple[dict[str, Measure], list[str]]:
    """Places, prefill, and keys and values of each reading over those of the merged ones."""
    measures: dict[str, Measure] = {}
    shapes, lengths, runs = (("128x2",), (200,), 5) if options.quick else (("128x2", "256x4"), (50, 200, 600), 15)
    wrong = wrong_answers(shapes[0])
    for shape in shapes:
        readings = Readings.of(shape)
        decoders = {name: GeneratorDecoder(generator) for name, generator in readings.generators.items()}
        for items in lengths:
            prompts = {name: readings.prompt(name, items) for name in decoders}
            kept = {name: decoder.begin(*prompts[name])[1].prompt_kv(0) for name, decoder in decoders.items()}
            figures = {
                "places": {name: float(prompt.num_places) for name, prompt in kept.items()},
                "prefill": alternate({name: partial(decoder.begin, *prompts[name]) for name, decoder in decoders.items()}, runs, 0.02),
                "kv": {name: float(prompt.kv_L2pGd.nbytes) for name, prompt in kept.items()},
                "returning": alternate({name: partial(_return, decoders[name], readings, name, items) for name in decoders}, runs, 0.02),
            }
            say(f"{shape}, {items} items: " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in figures["prefill"].items()))
            for what, values in figures.items():
                for base, baseline in BASELINES.items():
                    for ours in ("merged", "kept"):
                        entry: Measure = {"value": values[base] / values[ours], "unit": "ratio", "better": "higher", "baseline": baseline, "runs": runs}
                        # Bounds are for the merger without a separator, which is the default (a kept one is GenRec's own form), and of times for prompts that
                        # outweigh what every request costs.
                        if what in BOUNDS and ours == "merged" and (what != "prefill" or items >= 200):
                            entry |= {"at_least": BOUNDS[what][0], "aim": BOUNDS[what][1]}
                        measures[f"{what}_{base}_over_{ours}_{shape}_items{items}"] = entry
    return measures, wrong


_KEPT: dict[tuple[int, str, int], PromptKV] = {}


def _return(decoder: GeneratorDecoder, readings: Readings, name: str, items: int) -> None:
    """A user whose history is known up to the last item."""
    prompt, offsets = readings.prompt(name, items)
    key = (id(decoder), name, items)
    if key not in _KEPT:
        before = prompt[: len(prompt) - len(prompt[1:]) // items]
        _KEPT[key] = decoder.begin(before, torch.tensor([0, len(before)]))[1].prompt_kv(0)
    decoder.begin(prompt, offsets, [_KEPT[key]])


@dataclass(frozen=True)
class Trained:
    """What one run has: its name, whether it merges, and from what it goes on."""

    run: Run
    merger: MergerConfig
    checkpoint: Path | None = None


def train(dataset: Dataset, quick: bool, threads: int, scratch: Path, asked: Trained) -> dict[str, Any]:
    """Train one generator for all its epochs, then rank the test items with the seen filter off and on; ``checkpoint`` is what it ended with."""
    torch.set_num_threads(threads)
    begin, run, items = time.monotonic(), asked.run, len(dataset.item_ids)
    config = replace(run.config, generator=replace(run.config.generator, merger=asked.merger))
    if asked.checkpoint is None:
        objective, ranker = assembled(dataset, replace(run, config=config), config.valid_beam_width)
        generator = objective.model
        assert isinstance(generator, Generator)
    else:
        torch.manual_seed(run.seed)
        generator, _ = begin_at_checkpoint(asked.checkpoint, config.generator, run.level_sizes, False, run.seed)
        assert run.codes is not None
        objective = NextToken(generator, torch.from_numpy(generator.vocabulary.item_tokens(run.codes)), config)
        ranker = GeneratorRanker(generator, Trie.build(run.codes), run.codes, np.arange(items), config.max_items, config.valid_beam_width)
    valid = cases_of(dataset, "valid", config.valid_users, seed=0)

    def validate() -> dict[str, float]:
        figures = evaluate(ranker, valid, ks=(10,), num_items=items, exclude_seen=False)
        say(f"{run.name} seed {run.seed}: {time.monotonic() - begin:.0f} s, validation N@10 {figures['ndcg@10']:.4f}")
        return figures

    folder, sampler = scratch / f"{run.name}-{run.seed}", Sampler(dataset.train_histories(), config, run.seed)
    state = Trainer(config, objective, sampler, validate, Listener(time.monotonic), folder / "checkpoints", seed=run.seed).run()
    assert run.codes is not None
    last = GeneratorRanker(generator, Trie.build(run.codes), run.codes, np.arange(items), config.max_items, BEAM_WIDTH)
    test = cases_of(dataset, "test", 200 if quick else None)
    rows = {"filtered" if seen else "unfiltered": evaluate(last, test, ks=KS, num_items=items, exclude_seen=seen) for seen in (False, True)}
    generator.save_pretrained(folder)
    took = time.monotonic() - begin
    return {"name": run.name, "seed": run.seed, "rows": rows, "steps": state.step, "best_epoch": state.best_epoch, "seconds": took, "checkpoint": str(folder)}


def plan(dataset: Dataset, quick: bool) -> tuple[Run, dict[str, Any]]:
    """The unmerged run that all others are changes of, and how many epochs each part has."""
    settings = SETTINGS["beauty"]["generator"]
    # Three levels, as GenRec has them.
    tokenizer = TokenizerConfig(level_sizes=(256, 64, 16), content_weight=0.7, iterations=5 if quick else 25)
    spelled = build(dataset, tokenizer, seed=0)
    epochs = {"scratch": 1, "continued": 1} if quick else {"scratch": 12, "continued": 6}
    config = recipe("small", {**settings, "patience": 1000, "evaluate_every": 1 if quick else 2, "valid_users": 100 if quick else 2000})
    say(f"spelled {len(spelled.catalog)} items over levels {spelled.catalog.level_sizes}")
    return Run("plain", 0, config, spelled.catalog.codes, list(spelled.tokenizer.codes.codebooks), spelled.catalog.level_sizes), epochs


def costs(options: argparse.Namespace, scratch: Path) -> dict[str, Measure]:
    """Loss of quality by the mergers, from scratch and continued; ``scratch`` takes the runs' checkpoints."""
    dataset = public_data.beauty(options.data / "amazon", 1500 if options.quick else None)
    base, epochs = plan(dataset, options.quick)
    seeds = range(1 if options.quick else options.seeds)

    def of(part: str, name: str, seed: int) -> Run:
        return replace(base, name=f"{part}-{name}", seed=seed, config=replace(base.config, epochs=epochs[part]))

    mergers = {"plain": MergerConfig(), **{name: READINGS[name] for name in options.forms}}
    results: list[dict[str, Any]] = []
    work = partial(train, dataset, options.quick, options.threads, scratch)
    with multiprocessing.get_context("spawn").Pool(options.workers, initializer=end_with_parent) as pool:
        for result in pool.imap(work, [Trained(of("scratch", name, seed), merger) for seed in seeds for name, merger in mergers.items()]):
            results.append(result)
            say(json.dumps(result))
        begun = {result["seed"]: Path(result["checkpoint"]) for result in results if result["name"] == "scratch-plain"}
        again = [Trained(of("continued", name, seed), merger, begun[seed]) for seed in seeds for name, merger in mergers.items()]
        for result in pool.imap(work, again):
            results.append(result)
            say(json.dumps(result))
    return losses(results, options)


def losses(results: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Measure]:
    """Relative losses against the unmerged run of the same seed: mean over seeds, and the standard error of that mean."""
    of = {(result["name"], result["seed"]): result["rows"] for result in results}
    seeds = sorted({seed for _, seed in of})
    measures: dict[str, Measure] = {}
    for part in ("scratch", "continued"):
        for ours in options.forms:
            for form in ("unfiltered", "filtered"):
                for metric, bounds in LOSSES.items():
                    plain, merged = (np.array([of[f"{part}-{name}", seed][form][metric] for seed in seeds]) for name in ("plain", ours))
                    if not plain.all():
                        continue  # nothing was learned that could be lost
                    each = 1 - merged / plain
                    measures[f"loss_{metric.replace('@', '')}_{ours}_{part}_{form}"] = {
                        "value": float(1 - merged.mean() / plain.mean()), "unit": "share", "better": "lower", "runs": len(seeds),
                        "baseline": f"unmerged, {plain.mean():.4f} against {merged.mean():.4f}",
                        "error": float(each.std(ddof=1) / math.sqrt(len(seeds))) if len(seeds) > 1 else None, **({} if options.quick else bounds),
                    }  # fmt: skip
    return measures


def main() -> int:
    """Run, check, print."""
    parser = arguments_parser(__doc__ or "", data=True)
    parser.add_argument("--only", choices=("speed", "quality"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=("merged", "kept"), default=["merged"], help="mergers whose quality is measured")
    parser.add_argument("--workers", type=int, default=1, help="trainings at the same time; each has --threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measures: dict[str, Measure] = {}
    wrong: list[str] = []
    if options.only != "quality":
        measures, wrong = saved(options)
    if options.only != "speed":
        if not (options.data / "amazon" / "beauty.seq").is_file():
            say(f"{options.data} has no amazon/beauty.seq: quality is not measured; give the folder with --data")
        else:
            with tempfile.TemporaryDirectory() as scratch:
                measures |= costs(options, Path(scratch))
    return finish("merger", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
