"""Alignment: rollouts a second beside Hugging Face's ``generate``, seconds of a step, and what GRPO-SR does to held-out quality, with and without its safeguards.

speed     64 prompts of equal length x 16 rollouts of the tiny recipe's shape, the same weights; both draw from the same trie-constrained policy with replacement.
          Hugging Face gets the constraint as a ``prefix_allowed_tokens_fn`` over a dictionary of prefixes. Its rollouts' log-probabilities are compared with ours first.
step      draw, score, learn: 64 prompts x 16 rollouts, known positives and the divergence from the start included.
quality   leave-one-out, full ranking, 50 beams, seen items left out, every variant from the same supervised generator: GRPO-SR; and with a reward that knows items
          but no user, GRPO-SR, without the gate, and without gate and regulariser, where the reward must rise, recall fall, and the guard stop it.
Usage: python tests/benchmarks/alignment.py [--only speed step quality] [--dataset ml-100k --data u.data | --dataset beauty --data DIR] [--seeds 3] [--quick] [--json]
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
from alignment_world import IntArray, PopularityTeacher, RankTeacher, World, ease, load, popularity_of, transitions, truncated_svd
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
from semantide.shared.decoding.search_trie import SearchTrie
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
    seconds = alternate({"ours": ours, "generate": theirs}, runs)
    many = prompts * GROUP
    return {
        "rollouts_per_second": {"value": many / seconds["ours"], "unit": "rollouts/s", "better": "higher", "runs": runs},
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
    config = align_recipe("grpo-sr", {"steps": steps, "prompts": PROMPTS, "group": GROUP, "evaluate_every": steps, "held_out_users": 8, "probes": 4})
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
    rollouter = Rollouter(model, world.trie, tokens_NL, rows, world.dataset, "benchmark", config, world.max_items)
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
            config, model, rollouter, Prompts(world.dataset, config, seed), PolicyTerms(world.trie, torch.from_numpy(tokens_NL), config.temperature), source,
            test("valid", config.held_out_users), Listener(time.monotonic, metric=metric), Path(scratch), seed=seed, popularity_N=popularity_of(world.dataset), checkpoint_seconds=1e9,
        ).run()  # fmt: skip
    return state, before, final()


def quality(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every variant over all seeds."""
    world = World.of(options.dataset, load(options.dataset, options.data, options.quick), options.quick)
    short: dict[str, Any] = (
        {"steps": 4, "prompts": 16, "evaluate_every": 2, "held_out_users": 100, "probes": 32} if options.quick else {"held_out_users": 0, "probes": 500}
    )
    gains: dict[str, list[float]] = {}
    stopped = {"no_gate": 0, "neither": 0}
    teacher, judge = RankTeacher([ease(world.dataset), transitions(world.dataset)], world.dataset), RankTeacher([truncated_svd(world.dataset)], world.dataset)
    items_only = PopularityTeacher(popularity_of(world.dataset), teacher)
    for seed in range(1 if options.quick else options.seeds):
        supervised = world.generator(seed)
        for name, reward, base, changes in (
            ("grpo_sr", teacher, "grpo-sr", {}),
            ("items_only", items_only, "grpo-sr", {}),
            ("no_gate", items_only, "grpo-sr", {"gate": False}),
            ("neither", items_only, "grpo", {"gate": False, "learning_rate": 1e-3}),
        ):
            state, before, after = aligned(world, supervised, align_recipe(base, {**changes, **short}), reward, judge, seed)
            last, first = state.tests[-1], state.tests[0]
            sys.stderr.write(
                f"seed {seed} {name}: step {state.best_step} of {state.step} kept, {state.stopped or 'not stopped'}; test before {before.figures} after {after.figures}\n"
            )
            sys.stderr.write(f"  validation first {first} last {last}\n")
            gains.setdefault(f"{name}_hr50", []).append(after.figures["hr@50"] / max(before.figures["hr@50"], 1e-9) - 1)
            gains.setdefault(f"{name}_ndcg50", []).append(after.figures["ndcg@50"] / max(before.figures["ndcg@50"], 1e-9) - 1)
            gains.setdefault(f"{name}_invalid", []).append(after.figures["invalid_share"] / max(before.figures["invalid_share"], 1e-9) - 1)
            gains.setdefault(f"{name}_last_reward", []).append(last["reward"] - first["reward"])
            gains.setdefault(f"{name}_last_hr50", []).append(last["hr@50"] / max(first["hr@50"], 1e-9) - 1)
            if name in stopped:
                stopped[name] += bool(state.stopped)
    runs = len(next(iter(gains.values())))

    def entry(name: str, **more: Any) -> dict[str, Any]:
        return {"value": statistics.mean(gains[name]), "unit": "share", "better": "higher", "runs": runs, "spread": statistics.pstdev(gains[name]), **more}

    return {
        "grpo_sr_hr50_gain": entry("grpo_sr_hr50", baseline="supervised, test users", at_least=0.02, aim=0.05),
        "grpo_sr_ndcg50_gain": entry("grpo_sr_ndcg50", baseline="supervised, test users"),
        "grpo_sr_invalid_change": {**entry("grpo_sr_invalid", baseline="supervised, free beams", at_least=-0.4), "better": "lower"},
        "items_only_hr50_gain": entry("items_only_hr50", baseline="supervised, test users"),
        **{f"{name}_reward_rise": entry(f"{name}_last_reward", baseline="start, validation") for name in stopped},
        **{f"{name}_hr50_when_ended": entry(f"{name}_last_hr50", baseline="start, validation") for name in stopped},
        **{f"{name}_stopped": {"value": count / runs, "unit": "share", "better": "higher", "runs": runs, "at_least": 1} for name, count in stopped.items()},
    }


def main() -> int:
    """Run, check, print."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=("speed", "step", "quality"), default=["speed", "step", "quality"])
    parser.add_argument("--dataset", choices=("ml-100k", "beauty"), default="ml-100k")
    parser.add_argument(
        "--data", type=Path, help="u.data or ml-100k.inter of MovieLens 100K, or the folder of beauty.seq; without it nothing of quality is measured"
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wrong: list[str] = []
    measures: dict[str, dict[str, Any]] = {}
    if "speed" in options.only:
        measures |= speed(options.quick, wrong)
    if "step" in options.only:
        measures |= step(options.quick, wrong)
    if "quality" in options.only and options.data is not None:
        measures |= quality(options)
    return finish("alignment", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
