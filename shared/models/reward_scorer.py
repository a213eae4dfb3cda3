"""Scores rollouts of a data set with a reward model: maps their items and users by id, and takes in items that came after the model by what they are.

Legend: B groups, G items of a group, X all of them, N items of the data set, E events of all histories.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from semantide.shared.dataset import StoredDataset
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.feedback import PARTS, Feedback
from semantide.shared.models.interest_search import IntArray
from semantide.shared.models.preference import Past, PreferenceModel
from semantide.shared.models.reward_pairs import Histories
from semantide.shared.own_feedback import OwnFeedback
from semantide.shared.rollouts import NO_ITEM, Rollouts, Scores

LEAST_KNOWN = 0.5
"""Share of a data set's items that a reward model must have been trained with, and of those whose description must be what it was."""
_SAME = 0.9  # likeness of an item's content to what it was, from which on it is the same
_COMPARED = 10_000  # items whose content is looked at


def matched(reward: str, model: PreferenceModel, dataset: str, stored: StoredDataset) -> tuple[PreferenceModel, IntArray]:
    """A reward model with a data set's later items, and the row of each of its items [N], -1 where nothing is known.

    Raises: Conflict for a reward model of another catalog: of other items, or of the same names for other things.
    """
    known = {item: row for row, item in enumerate(model.item_ids)}
    rows_N = np.array([known.get(item, -1) for item in stored.item_ids], dtype=np.int64)
    anew = "train one on this data set (semantide reward), or name the one that was"
    num_known = int((rows_N >= 0).sum())
    if num_known < LEAST_KNOWN * len(rows_N):
        raise Conflict(f"reward model {reward} knows {num_known} of the {len(rows_N)} items of data set {dataset}: it is of another catalog; {anew}")
    same, compared = _same_content(model, stored, rows_N)
    if same < LEAST_KNOWN * compared:
        raise Conflict(
            f"reward model {reward} was trained with items of the same names, and {compared - same} of {compared} that were compared are described otherwise in data set "
            f"{dataset}: it is of another catalog; {anew}"
        )
    later = np.flatnonzero(rows_N < 0)
    if len(later):
        base = len(model.item_ids)
        model = model.widened(stored.item_table.take(later))
        described = np.linalg.norm(model.spaces.content_NC[base:], axis=1) > 0.5 if model.spaces.content_NC.shape[1] else np.zeros(len(later), bool)
        # Of an item that came later and says nothing of itself, nothing is known at all.
        rows_N[later] = np.where(described, base + np.arange(len(later)), -1)
    return model, rows_N


class RewardScorer:
    """See ``Scorer``. What comes out depends on the reward model, the data set and the rollouts alone.

    A group is judged as of its history's last event: of its user counts what came before, and what he did since counts for nothing.
    """

    def __init__(self, reward: str, model: PreferenceModel, dataset: str, folder: Path) -> None:
        """``reward`` and ``dataset`` are references, ``folder`` has the data set's files.

        Raises: Conflict for a reward model of another catalog: of other items, or of the same names for other things.
        """
        self.reward, self.dataset = reward, dataset
        self.model, self._rows_N = matched(reward, model, dataset, StoredDataset(folder))
        self._own = _own_feedback(model, folder, len(self._rows_N))
        self._users = model.user_rows(pq.read_table(folder / "users.parquet", columns=["user"])["user"].to_pylist())

    def score(self, rollouts: Rollouts) -> Scores:
        """Scores of every item.

        Raises: Conflict for rollouts of another data set, Corrupt for a model whose rewards are no numbers.
        """
        if rollouts.dataset != self.dataset:
            raise Conflict(f"rollouts of data set {rollouts.dataset} were given to a scorer of {self.dataset}: score them with one of their own")
        shape = rollouts.items_BG.shape
        group_X, items_X = np.repeat(np.arange(shape[0]), shape[1]), self._rows(rollouts.items_BG.reshape(-1))
        place = {name: number for number, name in enumerate(self.model.network.config.actions, 1)}
        number_of = np.array([*(place.get(name, 0) for name in rollouts.actions), 0], dtype=np.int64)  # the last one is that of -1
        histories = Histories(self._rows(rollouts.histories_E), number_of[rollouts.actions_E])
        users_B = np.where(rollouts.users_B >= 0, self._users[rollouts.users_B.clip(0)] if len(self._users) else -1, -1)
        judged = self.model.judge(users_B, histories, rollouts.offsets_B1, group_X, items_X, past=self._past(rollouts, users_B, group_X))
        if not np.isfinite(judged.preference_X).all() or not np.isfinite(judged.relevance_X).all():
            raise Corrupt(f"reward model {self.reward} gives rewards that are no numbers: train it again")
        return Scores(judged.preference_X.reshape(shape), judged.relevance_X.reshape(shape), judged.gate_X.reshape(shape), (items_X >= 0).reshape(shape))

    def _past(self, rollouts: Rollouts, users_B: IntArray, group_X: IntArray) -> Past:
        """What was known when each group's history ended."""
        last_B = rollouts.offsets_B1[1:] - 1
        there_B = last_B >= rollouts.offsets_B1[:-1]
        times_B = np.where(there_B, rollouts.times_E[np.where(there_B, last_B, 0)] if len(rollouts.times_E) else 0, 0)
        # Of whom the model has learned nothing, nothing is in its totals.
        learned_B = (users_B >= 0) & (self.model.users.shown_U[users_B.clip(0)] > 0 if len(self.model.users.shown_U) else False)
        own_B = np.where(learned_B, rollouts.users_B, -1)
        return Past(*self._own.before(own_B, times_B), *self._own.since(own_B[group_X], rollouts.items_BG.reshape(-1), times_B[group_X]))

    def _rows(self, items: IntArray) -> IntArray:
        if len(items) and int(items.max()) >= len(self._rows_N):
            raise Conflict(
                f"rollouts name item row {int(items.max())}, and data set {self.dataset} has {len(self._rows_N)} items: score them with their own data set"
            )
        rows: IntArray = np.where(items > NO_ITEM, self._rows_N[items.clip(0)], -1)
        return rows


def _same_content(model: PreferenceModel, stored: StoredDataset, rows_N: IntArray) -> tuple[int, int]:
    """How many of the items that both describe are described as they were when the model was trained, and how many were compared."""
    both = np.flatnonzero(rows_N >= 0)
    both = both[:: max(1, -(-len(both) // _COMPARED))]
    before = model.spaces.content_NC[rows_N[both]]
    now = model.spaces.of_later(stored.item_table.take(both))
    described = (np.linalg.norm(before, axis=1) > 0.5) & (np.linalg.norm(now, axis=1) > 0.5)
    return int(((before * now).sum(1)[described] > _SAME).sum()), int(described.sum())


def _own_feedback(model: PreferenceModel, folder: Path, num_items: int) -> OwnFeedback:
    """The users' exposures that are in the totals of the model's training."""
    feedback = Feedback.load(folder)
    counted = model.header["counted"]
    return OwnFeedback.of(
        feedback,
        model.signals,
        num_items,
        (feedback.parts == PARTS.index("train")) & (feedback.times >= counted["from"]) & (feedback.times <= counted["until"]),
    )
