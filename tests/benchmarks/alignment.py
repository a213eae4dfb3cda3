"""Alignment: rollouts a second beside Hugging Face's ``generate``, seconds of a step, and what GRPO-SR does to held-out quality, with and without its parts.

speed     64 prompts of equal length x 16 rollouts of the tiny recipe's shape, the same weights; both draw from the same trie-constrained policy with replacement.
          Hugging Face gets the constraint as a ``prefix_allowed_tokens_fn`` over a dictionary of prefixes. Its rollouts' log-probabilities are compared with ours first. Ours are
          measured at the recipe's way of drawing too (beams and draws without replacement, seen items left out).
step      draw, score, learn at the recipe's numbers: 64 prompts x 16 rollouts, known positives and the divergence from the start included.
quality   leave-one-out, full ranking, 50 beams, seen items left out, every arm from the same supervised generator by the same prompts for as many steps:
            grpo_sr         the recipe
            supervised      its regulariser alone: no rollout counts
            no_regulariser, no_gate, no_validity    the recipe without one of its parts
            items_only, items_only_no_gate, items_only_neither    a reward that knows items but no user: with the recipe, without gate, without gate and regulariser, where the
                            reward must rise, recall fall, and the guard stop it
          The data are the simulator's, with reward models of its feedback; with --dataset ml-100k or beauty and --data those of another kind. The first two arms are run with
          --seeds seeds, the others with --ablation-seeds. One arm and seed takes 2 to 4 minutes of a core.
Usage: python tests/benchmarks/alignment.py [--only speed step quality] [--arms grpo_sr supervised] [--dataset ml-100k|beauty --data DIR] [--seeds 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from alignment_world import DATASET, IntArray, PopularityTeacher, World, load, popularity_of
from stopwatch import alternate, arguments_parser, finish  # type: ignore[import-not-found]

from semantide.services.training.aligner import Aligner, AlignState
from semantide.services.training.alignment_job import Probe
from semantide.services.training.alignment_recipes import AlignConfig, align_recipe
from semantide.services.training.evaluate import cases_of
from semantide.services.training.held_out import HeldOut, HeldOutTest
from semantide.services.training.policy_terms import Items, PolicyTerms
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.recipes import recipe
from semantide.services.training.rollout import Prompts, Rollouter, ScoredHere
from semantide.services.training.trainer import Listener
from semantide.shared.dataset import Dataset, Part
from semantide.shared.decoding.sampling import Sampling, sample_groups
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.rollouts import Rollouts, Scorer, Scores
from semantide.shared.trie import Trie

PROMPTS, GROUP, LENGTH = 64, 16, 50


@dataclass(frozen=True)
class Shop:
    """Random items and histories for what is measured in seconds."""

    generator: Generator
    codes: IntArray
    trie: SearchTrie
    dataset: Dataset

    @classmethod
    def of(cls, items: int, levels: tuple[int, ...], users: int) -> Shop:
        """The tiny recipe's shape, without what Hugging Face's models do not have."""
        rng = np.random.default_rng(0)
        codes = np.unique(rng.integers(0, levels, (3 * items, len(levels))), axis=0)
        codes = codes[rng.permutation(len(codes))[:items]].astype(np.int64)
        torch.manual_seed(0)
        generator = Generator(replace(recipe("tiny").generator, level_sizes=levels, vocab_size=0, seen_bias=False, initializer_range=0.3)).eval()
        from public_data import leave_one_out  # type: ignore[import-not-found]

        sequences = [rng.integers(0, len(codes), LENGTH + 3).tolist() for _ in range(users)]
        dataset = leave_one_out(sequences, {"item": [str(row) for row in range(len(codes))]})
        return cls(generator, codes, SearchTrie.build(Trie.build(codes)), dataset)


def speed(quick: bool, wrong: list[str]) -> dict[str, dict[str, Any]]:
    """Rollouts a second, ours and ``generate``'s."""
    from transformers import Qwen3ForCausalLM

    prompts, runs = (8, 2) if quick else (PROMPTS, 5)
    shop = Shop.of(8000, (256, 256, 256), prompts)
    vocabulary = shop.generator.vocabulary
    tokens_NL = vocabulary.item_tokens(shop.codes)
    histories = [shop.dataset.history(user)[:LENGTH] for user in range(prompts)]
    packed = Jagged.from_sequences(vocabulary.history_tokens(tokens_NL[history]) for history in histories)
    with tempfile.TemporaryDirectory() as scratch:
        shop.generator.save_pretrained(Path(scratch))
        peer = Qwen3ForCausalLM.from_pretrained(scratch).eval()
    decoder, table_RT = GeneratorDecoder(shop.generator), packed.values.view(prompts, -1)
    children: dict[tuple[int, ...], list[int]] = {}
    for row in tokens_NL.tolist():
        for level in range(len(row)):
            found = children.setdefault(tuple(row[:level]), [])
            if row[level] not in found:
                found.append(row[level])
    begin = table_RT.shape[1]

    def allowed(batch: int, sentence: torch.Tensor) -> list[int]:
        return children[tuple(sentence[begin:].tolist())]

    @torch.inference_mode()
    def theirs() -> Any:
        return peer.generate(
            table_RT, attention_mask=torch.ones_like(table_RT), do_sample=True, num_return_sequences=GROUP, max_new_tokens=vocabulary.levels, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=None, pad_token_id=0, prefix_allowed_tokens_fn=allowed, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip

    noise = torch.Generator().manual_seed(1)

    def ours() -> Any:
        return sample_groups(decoder, shop.trie, packed.values, packed.offsets_B1, Sampling(GROUP, 0, 1.0, distinct=False), noise)

    answer = theirs()
    drawn_CL = answer.sequences[:, begin:]
    row_of = {tuple(row): number for number, row in enumerate(tokens_NL.tolist())}
    rows_C = torch.tensor([row_of.get(tuple(row), -1) for row in drawn_CL.tolist()])
    if int(rows_C.min()) < 0:
        wrong.append("generate returned codes that spell no item")
    said_CL = peer.compute_transition_scores(answer.sequences, answer.scores, normalize_logits=True)
    terms = PolicyTerms(shop.trie, torch.from_numpy(tokens_NL), 1.0)
    with torch.no_grad():
        items = Items(rows_C.clamp_min(0), torch.arange(prompts).repeat_interleave(GROUP))
        own_CL = terms.of(shop.generator, terms.places(shop.generator, packed, items)).policy_CL
    if not torch.allclose(own_CL, said_CL, atol=2e-3):
        wrong.append(f"log-probabilities of generate's rollouts differ by up to {float((own_CL - said_CL).abs().max()):.2g}")
    mine = ours().log_probs_RGL.sum(2).flatten()
    gap = abs(float(mine.mean() - said_CL.sum(1).mean())) / float((mine.var() / len(mine) + said_CL.sum(1).var() / len(mine)).sqrt())
    if gap > 5:
        wrong.append(f"mean log-probabilities of the two samples are {gap:.1f} standard errors apart")
    chosen = align_recipe("grpo-sr").sampling
    rules = ItemFilter.build(shop.trie, [shop.trie.prefix_counts(np.ones(len(shop.trie), np.bool_))], [0] * prompts, histories)

    def by_recipe() -> Any:
        return sample_groups(decoder, shop.trie, packed.values, packed.offsets_B1, chosen, noise, node_filter=rules)

    seconds = alternate({"ours": ours, "by_recipe": by_recipe, "generate": theirs}, runs)
    many = prompts * GROUP
    return {
        "rollouts_per_second": {"value": many / seconds["ours"], "unit": "rollouts/s", "better": "higher", "runs": runs},
        "rollouts_per_second_by_recipe": {"value": prompts * chosen.group / seconds["by_recipe"], "unit": "rollouts/s", "better": "higher", "runs": runs},
        "rollouts_speedup": {
            "value": seconds["generate"] / seconds["ours"], "unit": "ratio", "better": "higher", "baseline": f"transformers generate, {many / seconds['generate']:.0f} rollouts/s",
            "at_least": 10, "aim": 30, "runs": runs,
        },
    }  # fmt: skip


class Numbers:
    """Any preferences: what a step costs beside the reward model."""

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``."""
        valid = rollouts.items_BG >= 0
        preference = (np.where(valid, rollouts.items_BG, 0) * 7919 % 1000 / 1000).astype(np.float32)
        return Scores(preference, preference, valid, valid)


def step(quick: bool, wrong: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds of one step."""
    steps = 4 if quick else 12
    shop = Shop.of(8000, (256, 256, 256), 200)
    config = align_recipe("grpo-sr", {"steps": steps, "evaluate_every": steps, "held_out_users": 8, "probes": 4})
    assert (config.prompts, config.group) == (PROMPTS, GROUP)
    seconds: list[float] = []

    def metric(number: int, values: dict[str, float]) -> None:
        if "seconds" in values:
            seconds.append(values["seconds"])

    world = World("random", shop.dataset, catalog_of(shop), shop.trie, {"generator": replace(recipe("tiny"), max_items=LENGTH)}, [])
    state, _, _ = aligned(world, shop.generator, config, Numbers(), None, 0, metric)
    if state.step != steps:
        wrong.append(f"the run ended after {state.step} of {steps} steps: {state.stopped}")
    return {"step_seconds": {"value": statistics.median(seconds[1:]), "unit": "s", "better": "lower", "at_least": 2, "runs": len(seconds) - 1}}


def catalog_of(shop: Shop) -> Any:
    """The shop's catalog; its tokenizer is nobody's."""
    from semantide.shared.catalog import Catalog

    return Catalog(shop.dataset.item_ids, shop.codes, shop.generator.config.level_sizes, "0" * 64)


def aligned(
    world: World,
    generator: Generator,
    config: AlignConfig,
    reward: Scorer,
    judge: Scorer | None,
    seed: int,
    metric: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> tuple[AlignState, HeldOut, HeldOut]:
    """Align a copy of a generator; the run, and the test of its test users before and after."""
    model = copy.deepcopy(generator)
    tokens_NL, rows = model.vocabulary.item_tokens(world.catalog.codes), np.arange(len(world.catalog))
    counts_N = np.bincount(np.concatenate([*world.dataset.train_histories()]), minlength=len(rows))
    rollouter = Rollouter(model, world.trie, tokens_NL, rows, world.dataset, DATASET, config, world.max_items, world.events)
    source = ScoredHere(reward)

    def test(part: Part, users: int) -> Callable[[], HeldOut]:
        cases = cases_of(world.dataset, part, users or None, seed)
        probe = Probe(config, model, world.trie, rollouter, cases[: config.probes], seed, source, judge, "the benchmark's")
        ranker = GeneratorRanker(model, world.catalog.trie, world.catalog.codes, rows, world.max_items, config.beam_width)
        return HeldOutTest(ranker, cases, counts_N, exclude_seen=config.exclude_seen, judge=probe.judged).run

    final = test("test", config.held_out_users)
    before = final()
    with tempfile.TemporaryDirectory() as scratch:
        state = Aligner(
            config, model, rollouter, Prompts(world.dataset, config, seed, world.pages), PolicyTerms(world.trie, torch.from_numpy(tokens_NL), config.temperature), source,
            test("valid", config.held_out_users), Listener(time.monotonic, metric=metric), Path(scratch), seed=seed, popularity_N=popularity_of(world.dataset), checkpoint_seconds=1e9,
        ).run()  # fmt: skip
    return state, before, final()


@dataclass(frozen=True)
class Arm:
    """One way to align; ``items_only``: by a reward that knows no user."""

    recipe: str
    changes: dict[str, Any]
    items_only: bool = False


ARMS = {
    "grpo_sr": Arm("grpo-sr", {}),
    "supervised": Arm("grpo-sr", {"least_spread": 1000.0, "constant_steps": 1 << 30}),
    "no_regulariser": Arm("grpo-sr", {"supervised_weight": 0.0}),
    "no_gate": Arm("grpo-sr", {"gate": False}),
    "no_validity": Arm("grpo-sr", {"validity_weight": 0.0}),
    "items_only": Arm("grpo-sr", {}, True),
    "items_only_no_gate": Arm("grpo-sr", {"gate": False}, True),
    "items_only_neither": Arm("grpo", {"gate": False}, True),
}
MAIN, STOPPED = ("grpo_sr", "supervised"), ("items_only_no_gate", "items_only_neither")


def quality(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every arm over its seeds."""
    with tempfile.TemporaryDirectory() as scratch:
        dataset, folder = load(options.dataset, options.data, Path(scratch), options.quick)
        return _quality(options, World.of(options.dataset, dataset, options.quick, folder))


def _quality(options: argparse.Namespace, world: World) -> dict[str, dict[str, Any]]:
    short: dict[str, Any] = (
        {"steps": 4, "prompts": 16, "evaluate_every": 2, "held_out_users": 100, "probes": 32} if options.quick else {"held_out_users": 0, "probes": 200}
    )
    found: dict[str, list[dict[str, float]]] = {}
    reward, judge = world.rewards(options.quick)
    items_only = PopularityTeacher(popularity_of(world.dataset), reward)
    for seed in range(1 if options.quick else options.seeds):
        supervised = world.generator(seed)
        for name in options.arms:
            if seed and name not in MAIN and seed >= options.ablation_seeds:
                continue
            arm, begin = ARMS[name], time.monotonic()
            state, before, after = aligned(
                world, supervised, align_recipe(arm.recipe, {**arm.changes, **short}), items_only if arm.items_only else reward, judge, seed
            )
            first, last = state.tests[0], state.tests[-1]
            sys.stderr.write(
                f"seed {seed} {name}: {time.monotonic() - begin:.0f} s, step {state.best_step} of {state.step} kept, {state.stopped or 'not stopped'}; test before "
                f"{before.figures} after {after.figures}\n  validation first {first} last {last}\n"
            )
            gained = {figure: _gain(before.figures[figure], after.figures[figure]) for figure in ("hr@10", "hr@50", "ndcg@50", "invalid_share")}
            gained |= {"last_reward": last["reward"] - first["reward"], "last_judge": last["judge"] - first["judge"]}
            gained |= {"last_hr50": _gain(first["hr@50"], last["hr@50"]), "stopped": float(bool(state.stopped))}
            found.setdefault(name, []).append(gained)

    def entry(name: str, figure: str, baseline: str, **more: Any) -> dict[str, Any]:
        values = [gained[figure] for gained in found[name]]
        return {
            "value": statistics.mean(values),
            "unit": "share",
            "better": "higher",
            "baseline": baseline,
            "runs": len(values),
            "spread": statistics.pstdev(values),
            **more,
        }

    measures: dict[str, dict[str, Any]] = {}
    for name in found:
        measures[f"{name}_hr50_gain"] = entry(name, "hr@50", "supervised, test users", **({"at_least": 0.02, "aim": 0.05} if name == "grpo_sr" else {}))
        measures[f"{name}_ndcg50_gain"] = entry(name, "ndcg@50", "supervised, test users")
        measures[f"{name}_invalid_change"] = entry(name, "invalid_share", "supervised, free beams", **({"at_least": -0.4} if name == "grpo_sr" else {})) | {
            "better": "lower"
        }
        measures[f"{name}_reward_rise"] = entry(name, "last_reward", "start, validation")
        measures[f"{name}_judge_rise"] = entry(name, "last_judge", "start, validation")
        measures[f"{name}_hr50_when_ended"] = entry(name, "last_hr50", "start, validation")
        if name in STOPPED:
            measures[f"{name}_stopped"] = entry(name, "stopped", "the guard", at_least=1)
    return measures


def _gain(before: float, after: float) -> float:
    """As a share of what was before; 0 where there was and is nothing."""
    return after / before - 1 if before else float(after > 0)


def main() -> int:
    """Run, check, print."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=("speed", "step", "quality"), default=["speed", "step", "quality"])
    parser.add_argument("--dataset", choices=("simulator", "ml-100k", "beauty"), default="simulator")
    parser.add_argument("--data", type=Path, help="folder of u.data or ml-100k.inter of MovieLens 100K, or of beauty.seq")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ablation-seeds", type=int, default=1)
    options = parser.parse_args()
    if options.dataset != "simulator" and options.data is None:
        parser.error(f"--dataset {options.dataset} is read from files: give --data")
    torch.set_num_threads(options.threads)
    wrong: list[str] = []
    measures: dict[str, dict[str, Any]] = {}
    if "speed" in options.only:
        measures |= speed(options.quick, wrong)
    if "step" in options.only:
        measures |= step(options.quick, wrong)
    if "quality" in options.only:
        measures |= quality(options)
    return finish("alignment", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
