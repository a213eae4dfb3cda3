"""An alignment by several ranks, each a fork as in ``world_run.py``: rollouts are the policy's best beams, so that the number of ranks draws nothing else."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from semantide.services.training.aligner import Aligner
from semantide.services.training.alignment_job import Probe
from semantide.services.training.alignment_recipes import align_recipe
from semantide.services.training.evaluate import cases_of
from semantide.services.training.held_out import HeldOutTest
from semantide.services.training.policy_terms import PolicyTerms
from semantide.services.training.prompt_share import PromptShare
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.rollout import Prompts, Rollouter, ScoredHere
from semantide.services.training.trainer import Listener
from semantide.services.training.world import World
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.rollouts import Rollouts, Scores
from semantide.shared.trie import Trie

ITEMS, USERS = 48, 30
CONFIG = replace(
    align_recipe("grpo-sr"), steps=6, prompts=7, group=6, beams=6, evaluate_every=3, learning_rate=3e-3, warmup_steps=0, dropout=False, probes=9, kl_weight=0.01,
    guard_deviations=50.0, positives=2,
)  # fmt: skip


class Even:
    """Everybody likes even rows; from some rank on a reward is no number."""

    def __init__(self, spoils: bool) -> None:
        self._spoils = spoils

    def score(self, rollouts: Rollouts) -> Scores:
        valid = rollouts.items_BG >= 0
        preference = np.where(valid, 0.1 + 0.8 * (rollouts.items_BG % 2 == 0), 0).astype(np.float32)
        return Scores(preference * np.float32("nan") if self._spoils else preference, preference, valid, valid)


def aligned(world: World, folder: Path, argument: str) -> None:
    """``RANK:STEP:`` is killed there; ``nan`` and the last rank has rewards that are no numbers; ``stale`` at the end draws two steps ahead. Without an argument the run goes on to its end."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(4, 12, USERS)
    dataset = Dataset(
        tuple(map(str, range(USERS))),
        tuple(map(str, range(ITEMS))),
        rng.integers(0, ITEMS, lengths.sum()).astype(np.int32),
        np.concatenate([np.arange(length) for length in lengths]),
        np.concatenate([[0], np.cumsum(lengths)]),
        (lengths - 2).astype(np.int32),
        (lengths - 1).astype(np.int32),
        pa.table({"item": list(map(str, range(ITEMS)))}),
        {},
    )
    codes = np.stack([np.arange(ITEMS) // 8, np.arange(ITEMS) % 8], 1).astype(np.int64)
    torch.manual_seed(1)
    generator = Generator(GeneratorConfig((6, 8), num_layers=1, hidden_size=32, intermediate_size=32)).eval()
    tokens_NL, trie, rows = generator.vocabulary.item_tokens(codes), Trie.build(codes), np.arange(ITEMS)
    search, share = SearchTrie.build(trie), PromptShare(world)
    config = replace(CONFIG, staleness=2) if argument.endswith("stale") else CONFIG
    rollouter = Rollouter(generator, search, tokens_NL, rows, dataset, "datasets/sha256-0", config, 8)
    source = ScoredHere(Even(argument == "nan" and world.rank == world.size - 1))
    cases = cases_of(dataset, "valid")
    probe = Probe(config, generator, search, rollouter, cases[: config.probes], 3, source, None, "rewards/sha256-7", share)
    test = HeldOutTest(
        GeneratorRanker(generator, trie, codes, rows, 8, 50),
        cases,
        np.bincount(dataset.items, minlength=ITEMS),
        exclude_seen=True,
        judge=probe.judged,
        share=share,
    )
    heard: list[dict[str, float]] = []
    whom, when = [*argument.split(":"), "", ""][:2]

    def check() -> None:
        if when and (world.rank, aligner.state.step) == (int(whom), int(when)):
            os.kill(os.getpid(), signal.SIGKILL)

    aligner = Aligner(
        config,
        generator,
        rollouter,
        Prompts(dataset, config, 3),
        PolicyTerms(search, torch.from_numpy(tokens_NL), config.temperature),
        source,
        test.run,
        Listener(lambda: 0.0, check_cancelled=check, metric=lambda step, values: heard.append({"step": step, **values})),
        folder / "checkpoints",
        seed=3,
        popularity_N=np.linspace(0, 1, ITEMS),
        reward_name="rewards/sha256-7",
        checkpoint_seconds=0,
        share=share,
    )
    try:
        state = aligner.run()
    except PermanentError as error:
        assert argument == "nan" and "outside [0, 1]" in str(error), error
        os._exit(3)
    (folder / f"state-{world.rank}.json").write_text(json.dumps({"tests": state.tests, "heard": heard, "skipped": state.skipped, "best": state.best_step}))
    save_file({name: value.contiguous() for name, value in generator.state_dict().items()}, str(folder / f"weights-{world.rank}.safetensors"))
