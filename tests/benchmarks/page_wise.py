"""Training by pages against point-wise training: how well the next page is predicted, at equal prompts and at equal optimiser tokens.

Protocol: the last page of a user is the test, the last but one the validation; cases are users whose test page has two positives or more; the history is all that
came before the page; full ranking over all items, beam width 50; hit rate and NDCG of the whole page; every figure with the seen-item filter off and on.
Point-wise is one positive of each page an epoch, drawn anew, from the same histories in the same batches: *equal prompts* gives it as many epochs, *equal tokens* as
many more that it reads and predicts as many tokens, *equal targets* as many more that it predicts as many. Beside them: the sequential form of the paper, parallel targets
that are contrasted with what was exposed, and each item from all before it (recipe small), which no page decides.
Where the log is the simulator's, the models then meet the same simulated people (A/B): true clicks and orders.
First it is checked that parallel targets are predicted as by one plain sequence for each of them, and the time of both is taken.
Usage: python tests/benchmarks/page_wise.py [--source simulator|sample|movielens|kuairand] [--path DIR] [--seeds 3] [--forms ...] [--quick] [--json]
DIR holds u.data and u.item (or RecBole's ml-100k.inter and ml-100k.item), or KuaiRand-Pure's processed Parquet files; the simulator and the sample need none.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import page_data
import torch
from stopwatch import alternate, arguments_parser, finish

from semantide.kernels.target_attention import TargetSpans, target_attention
from semantide.services.tokenization.spelling import Spelled, build
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import Case, cases_of, evaluate
from semantide.services.training.initialisation import begin_at_codebooks
from semantide.services.training.objective import NextToken
from semantide.services.training.page_batches import PageSampler
from semantide.services.training.page_objective import PageWise
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.dataset import Dataset
from semantide.shared.models.generator import Generator
from semantide.shared.models.targets import TargetBlocks, target_hidden
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.pages import Pages
from semantide.shared.simulator.ab_test import ab_test
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.recommenders import Recommender, Request
from semantide.shared.simulator.users import SimulatorConfig

BEAM_WIDTH = 50
KS = (10, 50)
FORMS = ("parallel", "parallel, contrast", "point", "point, equal tokens", "point, equal targets", "sequential", "next token")
SHAPE = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "intermediate_size": 192,
    "dropout": 0.2,
    "embedding_dropout": 0.2,
}
TRAINED: dict[str, dict[str, Any]] = {
    "movielens": {"max_items": 100, "items_per_batch": 2048, "epochs": 24, "learning_rate": 2e-3, "warmup_steps": 50, "crop": "cover"},
    "kuairand": {"max_items": 50, "items_per_batch": 1536, "epochs": 12, "learning_rate": 2e-3, "warmup_steps": 50, "crop": "cover"},
    "sample": {"max_items": 50, "items_per_batch": 1536, "epochs": 12, "learning_rate": 2e-3, "warmup_steps": 50, "crop": "cover"},
    "simulator": {"max_items": 100, "items_per_batch": 2048, "epochs": 12, "learning_rate": 2e-3, "warmup_steps": 50, "crop": "cover"},
}
SPELLED = {
    "movielens": TokenizerConfig(level_sizes=(64, 32), content_weight=0.3),
    "kuairand": TokenizerConfig(level_sizes=(128, 64), content_weight=0.5),
    "sample": TokenizerConfig(level_sizes=(128, 64), content_weight=0.5),
    "simulator": TokenizerConfig(level_sizes=(48, 48), content_weight=0.3),
}


@dataclass(frozen=True)
class World:
    """A data set, its ids and its pages."""

    name: str
    dataset: Dataset
    pages: Pages
    spelled: Spelled
    simulation: Simulation | None = None


def load(name: str, path: Path | None, scratch: Path, quick: bool) -> World:
    """The data set made of the log, and its items spelled."""
    simulation = None
    if name == "simulator":
        simulation = Simulation(SimulatorConfig(users=300 if quick else 1500, items=500 if quick else 1000))
        log = page_data.simulated(simulation)
    else:
        log = page_data.SOURCES[name](path or page_data.SAMPLE)
    folder = page_data.written(log, scratch / name)
    dataset = Dataset.load(folder)
    tokenizer = replace(SPELLED[name], iterations=5) if quick else SPELLED[name]
    return World(name, dataset, Pages.of(dataset, folder), build(dataset, tokenizer, seed=0), simulation)


def configured(world: World, form: str, epochs: float, quick: bool) -> TrainConfig:
    """The run of one form; ``epochs`` times as long as the others."""
    numbers = {**TRAINED[world.name], "generator": SHAPE, "patience": 1000, "valid_users": 500, "skip_rate": 0.1}
    numbers["epochs"] = max(1, round((1 if quick else numbers["epochs"]) * epochs))
    numbers["evaluate_every"] = max(1, numbers["epochs"] // 12)
    if form == "next token":
        return recipe("small", numbers)
    contrast = {"exposed": "contrast", "exposed_weight": 0.5} if form.endswith("contrast") else {}
    return recipe("pagewise", {**numbers, "pages": {"targets": form.split(",")[0], **contrast}})


def fresh(world: World, config: TrainConfig, seed: int) -> tuple[Generator, torch.Tensor]:
    """A new model and the tokens of all items."""
    torch.manual_seed(seed)
    catalog = world.spelled.catalog
    generator = Generator(replace(config.generator, level_sizes=catalog.level_sizes, vocab_size=0))
    begin_at_codebooks(generator, list(world.spelled.tokenizer.codes.codebooks), config.codebook_share, seed)
    rows = [catalog.row_of[item] for item in world.dataset.item_ids]
    return generator, torch.from_numpy(generator.vocabulary.item_tokens(catalog.codes)[rows])


def measured(world: World, form: str, seed: int, quick: bool, epochs: float = 1.0) -> dict[str, Any]:
    """Train one model and rank the test pages."""
    config = configured(world, form, epochs, quick)
    generator, tokens = fresh(world, config, seed)
    dataset, catalog = world.dataset, world.spelled.catalog
    rows = np.array([catalog.row_of[item] for item in dataset.item_ids])
    ranker = GeneratorRanker(generator, catalog.trie, catalog.codes, rows, config.max_items, config.valid_beam_width)
    valid = cases_of(dataset, "valid", 100 if quick else config.valid_users, seed=0)
    sampler = Sampler(dataset.train_histories(), config, seed) if form == "next token" else PageSampler(dataset, world.pages, config, seed)
    objective = NextToken(generator, tokens, config) if form == "next token" else PageWise(generator, tokens, config)
    first = sampler.epoch(0)
    batches = [first.batch(index) for index in range(len(first))]
    levels = len(catalog.level_sizes)
    targets = levels * sum(int(objective.counts(batch)[0]) for batch in batches)
    tokens_read = levels * sum(int(batch.lengths_B.sum()) for batch in batches)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        validate = lambda: evaluate(ranker, valid, ks=(10,), num_items=len(rows), exclude_seen=True)  # noqa: E731
        state = Trainer(config, objective, sampler, validate, Listener(time.monotonic), Path(scratch), seed=seed, checkpoint_seconds=1e9).run()
    trained = time.monotonic() - begin
    ranker = GeneratorRanker(generator, catalog.trie, catalog.codes, rows, config.max_items, BEAM_WIDTH)
    cases = test_cases(dataset)[: 100 if quick else None]
    lists = {seen: evaluate(ranker, cases, ks=KS, num_items=len(rows), exclude_seen=seen) for seen in (False, True)}
    sys.stderr.write(
        f"{world.name} {form} seed {seed}: {trained:.0f} s, best epoch {state.best_epoch} of {state.epoch}, HR@10 {lists[True]['hr@10']:.4f} NDCG@10 "
        f"{lists[True]['ndcg@10']:.4f} HR@50 {lists[True]['hr@50']:.4f}\n"
    )
    served = recommender(world, ranker) if world.simulation is not None else None
    return {"form": form, "recommender": served, "seed": seed, "seconds": trained, "epochs": state.epoch, "best_epoch": state.best_epoch, "steps": state.step, "tokens": tokens_read * state.epoch, "targets": targets * state.epoch,
            "figures": {name: {f"{figure}{' filtered' if seen else ''}": values[figure] for seen, values in lists.items() for figure in values if figure.startswith(name)}
                        for name in ("hr@", "ndcg@", "recall@")}}  # fmt: skip


def recommender(world: World, ranker: GeneratorRanker) -> Recommender:
    """The model before simulated people: it reads what they took, as training did, and shows nothing that the visit or they themselves have seen."""
    dataset = world.dataset
    row_of = {item: row for row, item in enumerate(dataset.item_ids)}
    strength = dataset.header["config"]["actions"]

    def recommend(requests: Sequence[Request]) -> list[list[str]]:
        histories = []
        for request in requests:
            taken = [row_of[event.item] for event in request.history if strength[event.action] >= 1 and event.item in row_of]
            histories.append(np.array([row for place, row in enumerate(taken) if not place or taken[place - 1] != row], dtype=np.int64))
        lists: list[list[str]] = []
        for begin in range(0, len(requests), 64):
            part = requests[begin : begin + 64]
            longest = max(request.n + len(request.exclude) for request in part)
            for request, rows in zip(part, ranker.rank(histories[begin : begin + 64], min(longest, 150), exclude_seen=True), strict=True):
                names = [dataset.item_ids[row] for row in rows.tolist() if row >= 0]
                lists.append([name for name in names if name not in request.exclude][: request.n])
        return lists

    return recommend


def satisfaction(world: World, runs: dict[str, list[dict[str, Any]]], quick: bool) -> dict[str, dict[str, Any]]:
    """True clicks and orders of each form over the point-wise one, before the same people, by pages that they leave or stay on."""
    assert world.simulation is not None
    measures: dict[str, dict[str, Any]] = {}
    lifts: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(len(runs["point"])):
        test = ab_test(
            world.simulation,
            {form: many[seed]["recommender"] for form, many in runs.items()},
            users=40 if quick else 1000,
            visits=1 if quick else 3,
            base="point",
        )
        for row in test.rows():
            sys.stderr.write(f"A/B seed {seed}: {json.dumps(row)}\n")
        for form in runs:
            for figure in ("clicks", "orders"):
                change = test.lift(form, figure)
                lifts.setdefault((form, figure), []).append((change.value, (change.high - change.low) / 4))
    for (form, figure), found in lifts.items():
        if form != "point":
            value = statistics.mean(lift for lift, _ in found)
            among = statistics.stdev(lift for lift, _ in found) / len(found) ** 0.5 if len(found) > 1 else found[0][1]
            measures[f"simulator_true_{figure}_{form.replace(', ', '_').replace(' ', '_')}"] = {
                "value": 100 * value, "unit": "% over point", "better": "higher", "baseline": "point-wise, equal prompts, same people", "at_least": 5, "aim": 10,
                "runs": len(found), "standard_error": 100 * among,
            }  # fmt: skip
    return measures


def test_cases(dataset: Dataset) -> list[Case]:
    """Users whose last page has two positives or more."""
    return cases_of(dataset, "test", min_targets=2)


def shared_reading(world: World) -> tuple[list[str], dict[str, Any]]:
    """Whether parallel targets are what plain sequences give, one for each target, and how much faster they are."""
    config = replace(configured(world, "parallel", 1, True), skip_rate=0.0)
    generator, tokens_NL = fresh(world, config, 0)
    generator.eval()
    batch = PageSampler(world.dataset, world.pages, config, 0).epoch(0).batch(0)
    objective = PageWise(generator, tokens_NL, config)
    targets = batch.targets
    assert targets is not None
    prompt_T, offsets_B1 = objective.prompts(batch)
    blocks = TargetBlocks(tokens_NL[targets.items_S].flatten(), targets.offsets_C1 * tokens_NL.shape[1], targets.histories_C, targets.seen_C)
    levels, parts, ends = tokens_NL.shape[1], [], [0]
    for block, (history, seen) in enumerate(zip(targets.histories_C.tolist(), targets.seen_C.tolist(), strict=True)):
        start = int(offsets_B1[history])
        parts.append(torch.cat([prompt_T[start : start + 1 + seen * levels], tokens_NL[targets.items_S[block]]]))
        ends.append(ends[-1] + len(parts[-1]))
    alone_T, alone_B1 = torch.cat(parts), torch.tensor(ends)
    places = (alone_B1[1:].unsqueeze(1) - 1 - torch.arange(levels, 0, -1)).flatten()

    def together() -> torch.Tensor:
        return target_hidden(generator, prompt_T, offsets_B1, blocks)

    def apart() -> torch.Tensor:
        return generator(alone_T, alone_B1)[places]

    wrong = [] if torch.allclose(together(), apart(), rtol=1e-3, atol=1e-4) else ["parallel targets differ from plain sequences"]
    seconds = alternate({"together": lambda: together().sum().backward(), "apart": lambda: apart().sum().backward()}, 3)
    value = seconds["apart"] / seconds["together"]
    about = f"one sequence for each of {len(targets.items_S)} targets of {len(batch)} histories ({len(alone_T)} against {len(prompt_T)} prompt tokens)"
    return wrong, {"value": value, "unit": "ratio", "better": "higher", "baseline": about, "at_least": 2, "aim": 5, "runs": 3}


def attention_of_targets(world: World) -> tuple[list[str], dict[str, Any]]:
    """The attention of one batch's blocks alone, forward and backward, against one product for each block."""
    batch = PageSampler(world.dataset, world.pages, configured(world, "parallel", 1, True), 0).epoch(0).batch(0)
    targets, levels = batch.targets, len(world.spelled.catalog.level_sizes)
    assert targets is not None
    offsets_B1 = batch.items.offsets_B1 * levels + torch.arange(len(batch) + 1)
    begins_C = offsets_B1[targets.histories_C]
    spans = TargetSpans(targets.offsets_C1 * (levels - 1), begins_C, begins_C + 1 + targets.seen_C * levels)
    generator = torch.Generator().manual_seed(0)
    rows, places = int(spans.offsets_C1[-1]), int(offsets_B1[-1])
    leaves = [torch.randn(many, heads, 32, generator=generator).requires_grad_() for many, heads in ((rows, 2), (rows, 1), (rows, 1), (places, 1), (places, 1))]

    def step(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        found = function(*leaves, spans)
        return [found.detach(), *torch.autograd.grad(found.square().sum(), leaves)]

    close = zip(step(target_attention), step(target_attention.reference), strict=True)
    wrong = [] if all(torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3) for mine, theirs in close) else ["target attention differs from its reference"]
    seconds = alternate({"ours": lambda: step(target_attention), "reference": lambda: step(target_attention.reference)}, 3)
    about = f"one product for each of {len(begins_C)} blocks"
    return wrong, {"value": seconds["reference"] / seconds["ours"], "unit": "ratio", "better": "higher", "baseline": about, "at_least": 3, "aim": 10, "runs": 3}


def gain(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str, figure: str) -> dict[str, Any]:
    """Mean ratio over seeds; what it must reach is 1 and twice its standard error."""
    ratios = [mine["figures"][name][figure] / max(other["figures"][name][figure], 1e-9) for mine, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    values = [statistics.mean(run["figures"][name][figure] for run in runs) for runs in (ours, theirs)]
    return {"value": statistics.mean(ratios), "unit": "ratio", "better": "higher", "baseline": f"{theirs[0]['form']}: {values[1]:.4f} against {values[0]:.4f}",
            "at_least": 1 + 2 * error if error == error else 1.0, "aim": 1.1, "runs": len(ratios), "standard_error": error}  # fmt: skip


def main() -> int:
    """Run and print."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--source", choices=sorted(SPELLED), default="simulator")
    parser.add_argument("--path", type=Path, help="folder of the log, where it is neither simulated nor the repository's sample")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of every form but the longer one; left out, as many as TRAINED says")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    options = parser.parse_args()
    if options.path is None and options.source in ("movielens", "kuairand"):
        parser.error(f"--source {options.source} needs --path")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if options.epochs:
            TRAINED[options.source]["epochs"] = options.epochs
        world = load(options.source, options.path, Path(scratch), options.quick)
        wrong, reading = shared_reading(world)
        differ, attention = attention_of_targets(world)
        wrong += differ
        measures = {f"{world.name}_shared_reading": reading, f"{world.name}_target_attention": attention}
        runs: dict[str, list[dict[str, Any]]] = {}
        for seed in range(1 if options.quick else options.seeds):
            for form in options.forms:
                longer = 1.0
                if ", equal " in form and "parallel" in runs and "point" in runs:
                    counted = form.split()[-1]
                    longer = runs["parallel"][0][counted] / runs["point"][0][counted]
                runs.setdefault(form, []).append(measured(world, form, seed, options.quick, longer))
        for other in options.forms:
            if other != "parallel" and "parallel" in runs:
                for name, figure in (("hr@", "hr@10 filtered"), ("ndcg@", "ndcg@10 filtered"), ("hr@", "hr@50 filtered")):
                    measures[f"{world.name}_{figure.split()[0]}_parallel_over_{other.replace(', ', '_').replace(' ', '_')}"] = gain(
                        runs["parallel"], runs[other], name, figure
                    )
        if world.simulation is not None and "point" in runs:
            measures |= satisfaction(world, runs, options.quick)
    if options.json:
        sys.stderr.write(
            json.dumps({form: [{name: value for name, value in run.items() if name != "recommender"} for run in many] for form, many in runs.items()}) + "\n"
        )
    return finish("page_wise", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
