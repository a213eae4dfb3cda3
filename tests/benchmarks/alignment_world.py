"""What the benchmark of alignment stands on: histories, a generator trained on them, and who says what users would prefer.

The simulator's people leave exposures with all their feedback, so the reward is what a deployment has: a reward model of one half of the users, and that of the other half judges. MovieLens and Amazon have no
feedback but what was taken, so preference comes from models of another kind there, fitted to the same training part in closed form: the reward from EASE and from a linear map of the
recent past to what comes next, the judge from a truncated SVD. How far an item is from the top of their rankings is what a rollout is worth.
Legend: N items, U users, R histories, B groups of G rollouts.
Source: Steck, Embarrassingly Shallow Autoencoders (WWW 2019); Choi et al., Session-aware Linear Item-Item Models (WWW 2021); Cremonesi et al., PureSVD (RecSys 2010).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import page_data
import public_data
import pyarrow.compute as pc
import torch
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

from semantide.services.reward.building import build as reward_model
from semantide.services.reward.recipes import recipe as reward_recipe
from semantide.services.tokenization.spelling import build
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.held_out import popularity_percentiles
from semantide.services.training.initialisation import begin_at_codebooks
from semantide.services.training.objective import NextToken, Objective
from semantide.services.training.rankers import GeneratorRanker, Ranker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.catalog import Catalog
from semantide.shared.config import Settings
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback
from semantide.shared.models.generator import Generator
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.pages import Pages
from semantide.shared.rollouts import Rollouts, Scorer, Scores
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.users import SimulatorConfig

IntArray = npt.NDArray[np.int64]
DATASET = "the benchmark's"
Logits = Callable[[list[IntArray]], torch.Tensor]
"""Scores [R, N] of all items after each history."""

_SHAPE = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 128}
_SMALL = {"generator": {**_SHAPE, "seen_bias": True, "dropout": 0.2, "embedding_dropout": 0.1}, "max_items": 50, "crop": "cover", "items_per_batch": 1024, "learning_rate": 3e-3,
          "warmup_steps": 50, "evaluate_every": 2, "valid_beam_width": 50}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "simulator": {
        "tokenizer": TokenizerConfig(level_sizes=(64, 64), content_weight=0.0, window=5),
        "generator": {**_SMALL, "epochs": 20, "patience": 3, "valid_users": 500},
    },
    "ml-100k": {
        "tokenizer": TokenizerConfig(level_sizes=(64, 64), content_weight=0.0, window=5),
        "generator": {**_SMALL, "epochs": 40, "patience": 4, "valid_users": 0},
    },
    "beauty": {
        "tokenizer": TokenizerConfig(level_sizes=(256, 256), content_weight=0.7),
        "generator": {
            "generator": {**_SHAPE, "seen_bias": True, "dropout": 0.2, "embedding_dropout": 0.1, "tie_word_embeddings": False, "initializer_range": 0.06}, "max_items": 30,
            "items_per_batch": 768, "learning_rate": 3e-3, "label_smoothing": 0.02, "codebook_share": 0.7, "skip_rate": 0.2, "epochs": 26, "patience": 3, "evaluate_every": 2,
            "valid_users": 3000, "warmup_steps": 200,
        },
    },
}  # fmt: skip


def ml_100k(path: Path, folder: Path, max_users: int | None = None) -> Path:
    """MovieLens 100K from the folder of ``u.data``, or of the wheel's ``ml-100k.inter``: all ratings by time; what was rated within one second was one page."""
    ratings, films = page_data.movielens_100k(path if path.is_dir() else path.parent)
    if max_users is not None:
        ratings = ratings.filter(pc.is_in(ratings["user"], pc.unique(ratings["user"]).slice(0, max_users)))
    return page_data.written((ratings, films), folder, split="leave-one-out")


def simulated(folder: Path, quick: bool) -> Path:
    """The log of a simulated world as a data set: the last click of each user is the test."""
    world = SimulatorConfig(users=150, items=120, topics=8, sessions=4) if quick else SimulatorConfig(users=1500, items=800)
    return page_data.written(page_data.simulated(Simulation(world)), folder, split="leave-one-out")


def load(name: str, path: Path | None, scratch: Path, quick: bool) -> tuple[Dataset, Path | None]:
    """A data set by its name, and its folder where it has one."""
    if name == "beauty":
        assert path is not None
        return public_data.beauty(path, 1500 if quick else None), None
    assert path is not None or name == "simulator"
    folder = simulated(scratch, quick) if path is None or name == "simulator" else ml_100k(path, scratch, 150 if quick else None)
    return Dataset.load(folder), folder


@dataclass(frozen=True)
class World:
    """A data set with its catalog, and configurations of what is trained on it."""

    name: str
    dataset: Dataset
    catalog: Catalog
    trie: SearchTrie
    configs: dict[str, TrainConfig]
    codebooks: list[Any]
    folder: Path | None = None

    @classmethod
    def of(cls, name: str, dataset: Dataset, quick: bool, folder: Path | None = None) -> World:
        """Spell the items; ``folder`` has the data set's files, where there are any."""
        settings = SETTINGS[name]
        short: dict[str, Any] = {"epochs": 3, "valid_users": 100, "evaluate_every": 1} if quick else {}
        configs = {"generator": recipe("tiny", {**settings["generator"], **short})}
        spelled = build(dataset, replace(settings["tokenizer"], iterations=5) if quick else settings["tokenizer"], seed=0)
        return cls(name, dataset, spelled.catalog, SearchTrie.build(spelled.catalog.trie), configs, list(spelled.tokenizer.codes.codebooks), folder)

    @cached_property
    def pages(self) -> Pages | None:
        """What users saw together, where that is known."""
        return None if self.folder is None else Pages.of(self.dataset, self.folder)

    @cached_property
    def events(self) -> EventActions | None:
        """What was done in each event, where that is known."""
        return None if self.folder is None else EventActions.load(self.folder)

    def rewards(self, quick: bool) -> tuple[Scorer, Scorer]:
        """Who rewards, and an independent judge."""
        if self.name != "simulator" or self.folder is None:
            return RankTeacher([ease(self.dataset), transitions(self.dataset)], self.dataset), RankTeacher([truncated_svd(self.dataset)], self.dataset)
        reward, judge = (self._reward(self.folder, half, quick) for half in ("even", "odd"))
        return reward, judge

    def _reward(self, folder: Path, users: str, quick: bool) -> Scorer:
        begin, config = time.monotonic(), reward_recipe("tiny" if quick else "standard", {"users": users, "epochs": 1 if quick else 6})
        with tempfile.TemporaryDirectory() as scratch:
            weights = Settings.model_fields["actions"].default
            model = reward_model(self.dataset, Feedback.load(folder), EventActions.load(folder), config, weights, 0, Path(scratch))
        told = {name: (round(found["auc"] or 0, 4), round(found["calibration_error"], 4)) for name, found in model.header["metrics"]["signals"].items()}
        sys.stderr.write(f"reward model of {users} users: {time.monotonic() - begin:.0f} s, AUC and calibration error {told}\n")
        return RewardScorer(users, model, DATASET, folder)

    @property
    def max_items(self) -> int:
        """The longest history that the generator reads."""
        return self.configs["generator"].max_items

    def generator(self, seed: int) -> Generator:
        """Trained by the next token, the best epoch by validation."""
        torch.manual_seed(seed)
        config = self.configs["generator"]
        model = Generator(replace(config.generator, level_sizes=self.catalog.level_sizes, vocab_size=0))
        if config.codebook_share:
            begin_at_codebooks(model, self.codebooks, config.codebook_share, seed)
        tokens = torch.from_numpy(model.vocabulary.item_tokens(self.catalog.codes))
        ranker = GeneratorRanker(model, self.catalog.trie, self.catalog.codes, np.arange(len(self.catalog)), config.max_items, config.valid_beam_width)
        self._train(config, NextToken(model, tokens, config), ranker, seed)
        return model

    def _train(self, config: TrainConfig, objective: Objective, ranker: Ranker, seed: int) -> None:
        valid, begin = cases_of(self.dataset, "valid", config.valid_users or None, seed=0), time.monotonic()

        def validate() -> dict[str, float]:
            figures = evaluate(ranker, valid, ks=(10,), num_items=len(self.catalog), exclude_seen=True)
            sys.stderr.write(
                f"{config.recipe}: {time.monotonic() - begin:.0f} s, validation HR@10 {figures['hr@10']:.4f} NDCG@10 {figures['ndcg@10']:.4f}, seen items left out\n"
            )
            return figures

        with tempfile.TemporaryDirectory() as scratch:
            Trainer(
                config,
                objective,
                Sampler(self.dataset.train_histories(), config, seed),
                validate,
                Listener(time.monotonic),
                Path(scratch),
                seed=seed,
                checkpoint_seconds=1e9,
            ).run()


def taken(dataset: Dataset) -> sparse.csr_matrix:
    """Whether a user took an item in the training part: [U, N]."""
    histories = [np.unique(history) for history in dataset.train_histories()]
    rows, columns = np.repeat(np.arange(len(histories)), [len(history) for history in histories]), np.concatenate(histories)
    return sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(histories), len(dataset.item_ids)))


def ease(dataset: Dataset, penalty: float = 300.0) -> Logits:
    """Every item of a history votes for every item, whatever its place."""
    num_items, table_UN = len(dataset.item_ids), taken(dataset)
    gram_NN = (table_UN.T @ table_UN).toarray().astype(np.float64)
    gram_NN[np.diag_indices(num_items)] += penalty
    inverse_NN = np.linalg.inv(gram_NN)
    weights_NN = (-inverse_NN / np.diag(inverse_NN)).astype(np.float32)
    weights_NN[np.diag_indices(num_items)] = 0
    return lambda histories: torch.from_numpy(np.stack([weights_NN[history].sum(0) for history in histories]))


def transitions(dataset: Dataset, *, past: int = 50, ahead: int = 5, decay: float = 10.0, penalty: float = 30.0) -> Logits:
    """What comes next, linear in what came before, the more recent the heavier."""
    num_items = len(dataset.item_ids)
    gram_NN, cross_NN = np.zeros((num_items, num_items)), np.zeros((num_items, num_items))
    for history in dataset.train_histories():
        apart_TT = np.arange(len(history))[:, None] - np.arange(len(history))
        before_TT = np.where((apart_TT > 0) & (apart_TT <= past), np.exp(-(apart_TT - 1) / decay), 0)
        after_TT = np.where((apart_TT <= 0) & (apart_TT > -ahead), np.exp(apart_TT * 2 / ahead), 0)
        np.add.at(gram_NN, np.ix_(history, history), before_TT.T @ before_TT)
        np.add.at(cross_NN, np.ix_(history, history), before_TT.T @ after_TT)
    gram_NN[np.diag_indices(num_items)] += penalty
    weights_NN = np.linalg.solve(gram_NN, cross_NN).astype(np.float32)

    def logits(histories: list[IntArray]) -> torch.Tensor:
        recent = [history[-past:] for history in histories]
        return torch.from_numpy(np.stack([np.exp(-np.arange(len(own))[::-1] / decay).astype(np.float32) @ weights_NN[own] for own in recent]))

    return logits


def truncated_svd(dataset: Dataset, size: int = 32) -> Logits:
    """Items that lie near a history in the space of the largest singular vectors."""
    right_KN = randomized_svd(taken(dataset), size, random_state=0)[2].astype(np.float32)
    return lambda histories: torch.from_numpy(np.stack([right_KN[:, history].sum(1) @ right_KN for history in histories]))


class RankTeacher:
    """Prefers what its models rank high: 1 for what all of them have first, 0 for what they have last, by the logarithm of the rank. The gate is open for what ranks, in the mean,
    before all but a twentieth of the items that ended the training histories."""

    def __init__(self, models: list[Logits], dataset: Dataset) -> None:
        self._models = models
        histories = [history.astype(np.int64) for history in dataset.train_histories() if len(history) > 1]
        last = np.concatenate([self._closeness([history[:-1]], history[-1:, None])[0] for history in histories[:500]])
        self._open = float(np.quantile(last, 0.05))

    def _closeness(self, histories: list[IntArray], items_BG: IntArray) -> npt.NDArray[np.float32]:
        parts = []
        for model in self._models:
            logits_RN = model(histories).float()
            own = torch.from_numpy(items_BG)
            ranks = torch.searchsorted(-logits_RN.sort(1, descending=True).values, -logits_RN.gather(1, own))
            parts.append(1 - torch.log1p(ranks.float()) / np.log1p(logits_RN.shape[1]))
        return torch.stack(parts).mean(0).clamp(0, 1).numpy()

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``."""
        valid = rollouts.items_BG >= 0
        closeness = self._closeness([rollouts.history(group) for group in range(len(rollouts))], np.where(valid, rollouts.items_BG, 0))
        return Scores((closeness * valid).astype(np.float32), closeness, valid & (closeness >= self._open), valid)


class PopularityTeacher:
    """A reward model that knows items and no user, as one trained on clicks alone tends to: preference is how popular an item is. Its gate is that of another model."""

    def __init__(self, popularity_N: npt.NDArray[np.float64], relevance: Scorer) -> None:
        self._popularity_N, self._relevance = popularity_N, relevance

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``."""
        true = self._relevance.score(rollouts)
        preference = np.where(true.valid_BG, self._popularity_N[np.maximum(rollouts.items_BG, 0)], 0.0).astype(np.float32)
        return replace(true, preference_BG=preference)


def popularity_of(dataset: Dataset) -> npt.NDArray[np.float64]:
    """Each item's popularity percentile in the training part."""
    return popularity_percentiles(np.bincount(np.concatenate([*dataset.train_histories()]), minlength=len(dataset.item_ids)))
