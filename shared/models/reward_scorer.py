"""Scores rollouts of a data set with a reward model: maps their items and users by id, and takes in items that came after the model by what they are.

Legend: B groups, G items of a group, N items of the data set, S signals.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from semantide.shared.dataset import StoredDataset
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.interest_search import IntArray
from semantide.shared.models.preference import Judged, PreferenceModel
from semantide.shared.models.reward_pairs import Histories
from semantide.shared.rollouts import NO_ITEM, Rollouts, Scores

LEAST_KNOWN = 0.5  # share of a data set's items that a reward model must have been trained with


class RewardScorer:
    """See ``Scorer``. What comes out depends on the reward model, the data set and the rollouts alone."""

    def __init__(self, reward: str, model: PreferenceModel, dataset: str, folder: Path) -> None:
        """``reward`` and ``dataset`` are references, ``folder`` has the data set's files.

        Raises: Conflict for a reward model of another catalog.
        """
        self.reward, self.dataset = reward, dataset
        stored = StoredDataset(folder)
        known = {item: row for row, item in enumerate(model.item_ids)}
        rows_N = np.array([known.get(item, -1) for item in stored.item_ids], dtype=np.int64)
        num_known = int((rows_N >= 0).sum())
        if num_known < LEAST_KNOWN * len(rows_N):
            raise Conflict(
                f"reward model {reward} knows {num_known} of the {len(rows_N)} items of data set {dataset}: it is of another catalog; "
                "train one on this data set (semantide reward), or name the one that was"
            )
        later = np.flatnonzero(rows_N < 0)
        if len(later):
            table = stored.item_table.take(later)
            base = len(model.item_ids)
            model = model.widened(table)
            described = np.linalg.norm(model.spaces.content_NC[base:], axis=1) > 0.5 if model.spaces.content_NC.shape[1] else np.zeros(len(later), bool)
            # Of an item that came later and says nothing of itself, nothing is known at all.
            rows_N[later] = np.where(described, base + np.arange(len(later)), -1)
        self.model, self._rows_N = model, rows_N
        self._users = model.user_rows(pq.read_table(folder / "users.parquet", columns=["user"])["user"].to_pylist())

    def score(self, rollouts: Rollouts) -> Scores:
        """Scores of every item.

        Raises: Conflict for rollouts of another data set, Corrupt for a model whose rewards are no numbers.
        """
        groups, size = rollouts.items_BG.shape
        items_X = self._rows(rollouts.items_BG.reshape(-1))
        judged = self.judge(rollouts, np.repeat(np.arange(groups), size), items_X)
        shape = (groups, size)
        valid_BG = (items_X >= 0).reshape(shape)
        return Scores(judged.preference_X.reshape(shape), judged.relevance_X.reshape(shape), judged.gate_X.reshape(shape), valid_BG)

    def judge(self, rollouts: Rollouts, group_X: IntArray, items_X: IntArray) -> Judged:
        """Probabilities and all, for items that are rows of the model."""
        if rollouts.dataset != self.dataset:
            raise Conflict(f"rollouts of data set {rollouts.dataset} were given to a scorer of {self.dataset}: score them with one of their own")
        place = {name: number for number, name in enumerate(self.model.network.config.actions, 1)}
        number_of = np.array([*(place.get(name, 0) for name in rollouts.actions), 0], dtype=np.int64)  # the last one is that of -1
        histories = Histories(self._rows(rollouts.histories_E), number_of[rollouts.actions_E])
        users_B = np.where(rollouts.users_B >= 0, self._users[rollouts.users_B.clip(0)] if len(self._users) else -1, -1)
        judged = self.model.judge(users_B, histories, rollouts.offsets_B1, group_X, items_X)
        if not np.isfinite(judged.preference_X).all() or not np.isfinite(judged.relevance_X).all():
            raise Corrupt(f"reward model {self.reward} gives rewards that are no numbers: train it again")
        return judged

    def _rows(self, items: IntArray) -> IntArray:
        if len(items) and int(items.max()) >= len(self._rows_N):
            raise Conflict(
                f"rollouts name item row {int(items.max())}, and data set {self.dataset} has {len(self._rows_N)} items: score them with their own data set"
            )
        rows: IntArray = np.where(items > NO_ITEM, self._rows_N[items.clip(0)], -1)
        return rows
