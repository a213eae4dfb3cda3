"""Alignment on the ring: what is rewarded comes more often, runs repeat and resume bit for bit, and the guard stops what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semantide.services.training import aligner as aligner_module
from semantide.services.training.aligner import Aligner, AlignState
from semantide.services.training.alignment_guard import Standing
from semantide.services.training.alignment_recipes import AlignConfig, align_recipe
from semantide.services.training.grpo import policy_loss
from semantide.services.training.held_out import HeldOut
from semantide.services.training.policy_terms import PolicyTerms
from semantide.services.training.rollout import Prompts, Rollouter, ScoredHere
from semantide.services.training.row_matching import rows_of
from semantide.services.training.trainer import Listener
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import Conflict, JobCancelled, PermanentError
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.rollouts import Rollouts, Scores

from .conftest import ring_catalog

CONFIG = replace(
    align_recipe("grpo-sr"),
    steps=6,
    prompts=8,
    group=6,
    beams=2,
    evaluate_every=3,
    learning_rate=5e-3,
    warmup_steps=0,
    supervised_weight=0.0,
    validity_weight=0.1,
    dropout=False,
)


class TasteScorer:
    """Everybody likes items of some rows; ``change`` spoils what it says."""

    def __init__(self, liked: Callable[[np.ndarray], np.ndarray], change: Callable[[Scores], Scores] = lambda scores: scores) -> None:
        self.liked, self.change, self.seen = liked, change, []  # type: ignore[var-annotated]

    def score(self, rollouts: Rollouts) -> Scores:
        self.seen.append(rollouts)
        valid = rollouts.items_BG >= 0
        preference = np.where(valid, self.liked(rollouts.items_BG), 0.0).astype(np.float32)
        return self.change(Scores(preference, preference, valid, valid))


def even(rows: np.ndarray) -> np.ndarray:
    return 0.1 + 0.8 * (rows % 2 == 0)


class World:
    """A small untrained generator over the ring."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder = dataset, folder
        self.catalog: Catalog = ring_catalog()
        self.rows = rows_of(dataset.item_ids, self.catalog.row_of, "catalog", "")
        self.trie = SearchTrie.build(self.catalog.trie)

    def aligner(
        self,
        config: AlignConfig,
        scorer: Any,
        name: str = "run",
        *,
        tests: list[float] | None = None,
        cancel_at: int = -1,
        checkpoint_seconds: float = 0.0,
        **shape: Any,
    ) -> Aligner:
        torch.manual_seed(1)
        shape = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "seen_bias": True, **shape}
        self.generator = Generator(GeneratorConfig(self.catalog.level_sizes, **shape)).eval()
        tokens_NL = self.generator.vocabulary.item_tokens(self.catalog.codes)
        rollouter = Rollouter(self.generator, self.trie, tokens_NL, self.rows, self.dataset, "datasets/sha256-0", config, 8)
        hits, calls = list(tests or [0.5] * 100), [0]

        def test() -> HeldOut:
            share = hits.pop(0)
            reward = np.full(40, 0.5 if not hits else share)
            return HeldOut({"hr@50": share, "ndcg@50": 0.0}, Standing((np.arange(100) < share * 100).astype(float), reward))

        def check() -> None:
            calls[0] += 1
            if calls[0] == cancel_at:
                raise JobCancelled("asked to stop")

        return Aligner(
            config,
            self.generator,
            rollouter,
            Prompts(self.dataset, config, 3),
            PolicyTerms(self.trie, torch.from_numpy(tokens_NL), config.temperature),
            ScoredHere(scorer),
            test,
            Listener(lambda: 0.0, check_cancelled=check, metric=lambda step, values: self.heard.append((step, values))),
            self.folder / name,
            seed=3,
            popularity_N=np.linspace(0, 1, len(self.catalog)),
            reward_name="rewards/sha256-7",
            checkpoint_seconds=checkpoint_seconds,
        )

    @property
    def heard(self) -> list[tuple[int, dict[str, float]]]:
        return self.__dict__.setdefault("_heard", [])


@pytest.fixture
def world(ring: Dataset, tmp_path: Path) -> World:
    return World(ring, tmp_path)


def tensors(world: World) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in world.generator.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"distinct": False, "temperature": 1.5, "exclude_seen": False},
        {"weighing": "policy", "updates": 2},
        {"baseline": "prefix", "staleness": 2, "updates": 2, "clip": 0.2, "kl_weight": 0.01, "supervised_weight": 0.1, "positives": 3},
    ],
)
def test_what_is_rewarded_comes_more_often(world: World, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, steps=20, evaluate_every=20, learning_rate=1e-2, **changes)
    scorer = TasteScorer(even)
    world.aligner(config, scorer, tests=[0.5, 0.6]).run()
    rates = [float((rollouts.items_BG[rollouts.items_BG >= 0] % 2 == 0).mean()) for rollouts in scorer.seen]
    assert np.mean(rates[-5:]) > np.mean(rates[:5]) + 0.15
    steps = [values for _, values in world.heard if "reward" in values]
    assert {"reward", "reward_spread", "gate_rate", "kl", "entropy", "diversity", "popularity", "supervised_loss", "staleness", "skipped_share"} <= set(
        steps[-1]
    )
    assert (
        steps[0]["kl"] == pytest.approx(0, abs=1e-5 if config.updates == 1 else 0.2) and steps[-1]["kl"] > 0.01 and steps[-1]["entropy"] < steps[0]["entropy"]
    )
    # Of the last update of a step, which is the furthest from the policy that drew; the first rollouts are all drawn at once.
    assert [each["staleness"] for each in steps] == [min(step, config.staleness) * config.updates + config.updates - 1 for step in range(len(steps))]


@pytest.mark.parametrize("merger", [MergerConfig(), MergerConfig(True, "kept", ("gaps",))], ids=["tokens", "merged"])
@pytest.mark.parametrize("types", [("full_attention",), ("linear_attention", "full_attention"), ("kda", "mamba2"), ("gla",)], ids="-".join)
def test_rollouts_of_a_policy_of_any_kind_have_the_probabilities_that_training_gives_them(
    world: World, types: tuple[str, ...], merger: MergerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With small weights, whatever a layer reads would hardly be seen in the probabilities.
    shape = {"num_layers": len(types), "layer_types": types, "linear": LinearConfig(1, 2, 8, 8), "merger": merger, "initializer_range": 0.2}
    seen = []

    def compared(own_RGL: torch.Tensor, drawn_RGL: torch.Tensor | None, *others: Any) -> Any:
        if drawn_RGL is not None:
            seen.append((own_RGL.detach().clone(), drawn_RGL.clone(), others[1]))
        return policy_loss(own_RGL, drawn_RGL, *others)

    monkeypatch.setattr(aligner_module, "policy_loss", compared)
    world.aligner(replace(CONFIG, steps=1, updates=2, learning_rate=1e-12), TasteScorer(even), tests=[0.5, 0.6], **shape).run()
    ((own_RGL, drawn_RGL, present_RG),) = seen
    assert bool(present_RG.any())
    torch.testing.assert_close(own_RGL[present_RG], drawn_RGL[present_RG].to(own_RGL.dtype), atol=1e-4, rtol=1e-4)


def run_of(world: World, config: AlignConfig, name: str, cancel_at: int = -1) -> tuple[AlignState, dict[str, torch.Tensor]]:
    tests = [0.5, 0.55, 0.6]
    if cancel_at > 0:
        with pytest.raises(JobCancelled):
            world.aligner(config, TasteScorer(even), name, tests=tests, cancel_at=cancel_at, dropout=0.2).run()
        tests = tests[1 + (cancel_at - 1) // config.evaluate_every :]
    return world.aligner(config, TasteScorer(even), name, tests=tests, dropout=0.2).run(), tensors(world)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_was_cut_off_ends_where_the_whole_one_does(world: World, staleness: int) -> None:
    config = replace(CONFIG, staleness=staleness, dropout=not staleness, ema=0.5)
    whole, weights = run_of(world, config, "whole")
    for cancel_at in (1, 3, 6):
        again, same = run_of(world, config, f"cut-{cancel_at}", cancel_at)
        assert again == whole
        assert all(torch.equal(value, same[name]) for name, value in weights.items())
    with pytest.raises(Conflict, match="another configuration"):
        world.aligner(replace(config, clip=0.1), TasteScorer(even), "whole").run()


def test_the_guard_ends_the_run_and_the_best_weights_come_back(world: World) -> None:
    state = world.aligner(CONFIG, TasteScorer(even), tests=[0.5, 0.2]).run()
    assert (state.step, state.best_step) == (3, 0) and "HR@50 fell from 0.5000 to 0.2000" in state.stopped
    started = world.aligner(CONFIG, TasteScorer(even), "other")
    begin = tensors(world)
    started.run()
    world.aligner(CONFIG, TasteScorer(even), "third", tests=[0.5, 0.2]).run()
    assert all(torch.equal(value, begin[name]) for name, value in tensors(world).items())


def test_rewards_that_cannot_be_learned_from_are_refused_by_name(world: World) -> None:
    def spoiled(scores: Scores) -> Scores:
        return replace(scores, preference_BG=np.where(np.arange(scores.preference_BG.shape[1]) == 1, np.nan, scores.preference_BG).astype(np.float32))

    with pytest.raises(PermanentError, match=r"rewards/sha256-7.* a preference outside \[0, 1\] \(nan"):
        world.aligner(CONFIG, TasteScorer(even, spoiled)).run()
    constant = TasteScorer(lambda rows: np.full(rows.shape, 0.4))
    with pytest.raises(PermanentError, match="for 2 steps the rewards of no group differed"):
        world.aligner(replace(CONFIG, constant_steps=2, positive_reward=0.4), constant, "constant").run()
    # With known positives among the rollouts some groups have a spread: the run goes on and counts the others.
    state = world.aligner(replace(CONFIG, prompts=32), constant, "positives").run()
    assert state.step == CONFIG.steps and state.skipped > 0
