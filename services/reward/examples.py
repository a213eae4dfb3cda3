"""Exposures as examples: what was known at the moment of each, what was done, how much it counts, and when it may be looked at.

What is known of user and item at an exposure are the exposures of training before it, never the exposure itself or what came later.
Legend: X exposures, S signals, A actions, N items, U users, E events of all histories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from semantide.services.reward.recipes import RewardTraining
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback, history_ends
from semantide.shared.models.interest_search import FloatArray, IntArray
from semantide.shared.models.preference import ItemTable, UserTable
from semantide.shared.models.reward import RewardBatch, RewardConfig
from semantide.shared.models.reward_pairs import Histories, item_features, pairs, user_features

TRAIN, HELD_OUT, TEST, UNUSED = range(4)
_PRIOR_SHOWN = 1.0


@dataclass(frozen=True)
class Examples:
    """Examples in the order of the feedback.

    Shapes: all [X] but ``labels_XS``, and ``given_...`` [X, S] the signals that were given before each; ``use_X`` one of TRAIN, HELD_OUT, TEST, UNUSED.
    """

    feedback: Feedback
    signals: tuple[str, ...]
    labels_XS: npt.NDArray[np.bool_]
    weights_X: FloatArray
    use_X: npt.NDArray[np.int8]
    begins_X: IntArray
    ends_X: IntArray
    shown_item_X: IntArray
    given_item_XS: IntArray
    shown_user_X: IntArray
    given_user_XS: IntArray
    usual_S: FloatArray

    def rows(self, use: int) -> IntArray:
        """The examples of one use."""
        return np.flatnonzero(self.use_X == use)

    def weights(self, rows: IntArray) -> FloatArray | None:
        """How much some examples count; None where all count alike."""
        weights_X = self.weights_X[rows]
        return weights_X if len(rows) and weights_X.min() < weights_X.max() else None


def examples(dataset: Dataset, feedback: Feedback, config: RewardTraining) -> Examples:
    """Make examples.

    Raises: BadData where there is no feedback to learn from, and says what is lacking.
    """
    use_X = _uses(dataset, feedback, config)
    train = use_X == TRAIN
    signals = _signals(feedback, train, config)
    labels_XS = feedback.among(signals)
    ends_X = history_ends(dataset, feedback.users, feedback.times)
    known = feedback.users >= 0
    begins_X = np.where(known, dataset.offsets[feedback.users.clip(0)] if len(dataset.offsets) > 1 else 0, 0)
    ends_X = begins_X + ends_X
    shown_item_X, given_item_XS = so_far(feedback.items, feedback.times, train, labels_XS)
    users_X = np.where(known, feedback.users, len(dataset.user_ids))
    shown_user_X, given_user_XS = so_far(users_X, feedback.times, train & known, labels_XS)
    return Examples(
        feedback, signals, labels_XS, _weights(feedback, train, config), use_X, begins_X, ends_X, shown_item_X, given_item_XS, shown_user_X, given_user_XS,
        labels_XS[train].mean(0).astype(np.float32),
    )  # fmt: skip


def so_far(keys_X: npt.NDArray[Any], times_X: IntArray, counted_X: npt.NDArray[np.bool_], given_XS: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """How many counted exposures of the same key were strictly earlier [X], and how often each signal was given in them [X, S]."""
    order = np.lexsort((times_X, keys_X))
    keys, times = keys_X[order], times_X[order]
    new_key = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    new_moment = new_key | np.append(True, times[1:] != times[:-1])[: len(keys)]
    # The running sum before the first exposure of this moment, less the one before the first of this key.
    moment = np.maximum.accumulate(np.where(new_moment, np.arange(len(keys)), 0))
    first = np.maximum.accumulate(np.where(new_key, np.arange(len(keys)), 0))
    columns = []
    for values in (counted_X, *(counted_X & given_XS[:, column] for column in range(given_XS.shape[1]))):
        before = np.concatenate([[0], np.cumsum(values[order], dtype=np.int64)])
        column = np.empty(len(keys), dtype=np.int64)
        column[order] = before[moment] - before[first]
        columns.append(column)
    return columns[0], np.stack(columns[1:], axis=1) if columns[1:] else np.zeros((len(keys), 0), np.int64)


def learned_from(dataset: Dataset, config: RewardTraining) -> npt.NDArray[np.bool_]:
    """Whose events and feedback a model learns from [U]: everybody's, or those of one half of the users, drawn by their names."""
    if config.users == "all":
        return np.ones(len(dataset.user_ids), dtype=np.bool_)
    odd_U = np.array([crc32(user.encode()) % 2 == 1 for user in dataset.user_ids], dtype=np.bool_)
    return odd_U if config.users == "odd" else ~odd_U


def _uses(dataset: Dataset, feedback: Feedback, config: RewardTraining) -> npt.NDArray[np.int8]:
    """What each exposure is for: the parts of a temporal split, else by the time of those that nobody is tested on.

    A split by events holds out what was liked and what lies around it: rates there are not those of what is shown.
    """
    use_X = np.full(len(feedback), UNUSED, dtype=np.int8)
    # Before the first exposure that nobody answered only answers were logged, and rates were not those of what was shown.
    unanswered = feedback.times[~feedback.signals_XS.any(1)]
    told = feedback.times >= (unanswered.min() if len(unanswered) else 0)
    if dataset.header.get("valid_time"):
        for part, use in enumerate((TRAIN, HELD_OUT, TEST)):
            use_X[told & (feedback.parts == part)] = use
    else:
        usable = np.flatnonzero(told & (feedback.parts == 0))
        if len(usable):
            times = feedback.times[usable]
            bounds = np.quantile(times, [1 - config.held_out - config.test, 1 - config.test], method="higher")
            use_X[usable] = np.where(times < bounds[0], TRAIN, np.where((times < bounds[1]) | (config.test == 0), HELD_OUT, TEST))
    if config.users != "all":
        mine = np.zeros(len(feedback), dtype=np.bool_)
        known = feedback.users >= 0
        mine[known] = learned_from(dataset, config)[feedback.users[known]]
        use_X[~mine] = UNUSED
    if config.max_exposures:
        train = np.flatnonzero(use_X == TRAIN)
        use_X[train[np.argsort(feedback.times[train], kind="stable")][: -config.max_exposures]] = UNUSED
    return use_X


def _signals(feedback: Feedback, train: npt.NDArray[np.bool_], config: RewardTraining) -> tuple[str, ...]:
    shown = int(train.sum())
    if not shown:
        raise BadData("there are no exposures to learn from: send what was shown too (action exposure), and what was done with it, then make the data set anew")
    unheard = [name for name in config.signals if name not in feedback.signals]
    if unheard:
        raise BadData(f"signals {', '.join(unheard)} were never given: this data set has {', '.join(feedback.signals) or 'none'}")
    given = dict(zip(feedback.signals, feedback.signals_XS[train].sum(0).tolist(), strict=True))
    wanted = config.signals or feedback.signals
    found = tuple(name for name in wanted if config.min_signals <= given[name] <= shown - config.min_signals)
    if not found:
        counts = ", ".join(f"{name} {given[name]}" for name in wanted) or "no signal"
        raise BadData(
            f"nothing can be told apart in {shown} exposures ({counts}): a signal must have been given, and not given, at least {config.min_signals} times; "
            "send exposures without feedback too, or lower min_signals"
        )
    if config.signals and len(found) < len(config.signals):
        rare = ", ".join(f"{name} ({given[name]})" for name in config.signals if name not in found)
        raise BadData(
            f"signals {rare} were given, or not given, fewer than {config.min_signals} times in {shown} exposures: leave them out, or lower min_signals"
        )
    return found


def _weights(feedback: Feedback, train: npt.NDArray[np.bool_], config: RewardTraining) -> FloatArray:
    """Inverse propensities, mean 1 in training: what was unlikely to be shown stands for more.

    All are on one scale, that of a recommender's own choice: where nobody logged a propensity the recommender is taken to have been sure, as where it logged 1. So what was drawn at
    random is the reference for what was chosen. Estimated propensities tell the chosen ones apart, and leave their mean at 1.
    """
    inverse_X = np.ones(len(feedback), dtype=np.float64)
    if config.debias not in ("propensity", "both"):
        return inverse_X.astype(np.float32)
    logged = ~np.isnan(feedback.propensities)
    if config.propensities == "estimated" and (train & ~logged).any():
        shares_X = shown_shares(feedback, train & ~logged)
        inverse_X[~logged] = (1 / shares_X / (1 / shares_X[train & ~logged]).mean())[~logged]
    inverse_X[logged] = 1 / feedback.propensities[logged].astype(np.float64)
    capped_X = np.minimum(inverse_X, bound_of(inverse_X[train], config.max_weight))
    return np.asarray(capped_X / capped_X[train].mean(), dtype=np.float32)


def bound_of(inverse_X: npt.NDArray[np.float64], max_weight: float) -> float:
    """The bound that is ``max_weight`` times the mean of what it leaves, so that no example counts more and at least 1 / ``max_weight`` of them are left in effect."""
    ordered, num = np.sort(inverse_X), len(inverse_X)
    sums = np.cumsum(ordered)
    # Bounded by each of them in turn: those up to it stay, and the others become as large as it is. What it allows falls below it from some one on.
    allowed = max_weight * (sums + np.arange(num - 1, -1, -1) * ordered) / num
    kept = int(np.flatnonzero(allowed >= ordered * (1 - 1e-12))[-1]) + 1
    return float(ordered[-1] if kept == num else max_weight * sums[kept - 1] / (num - max_weight * (num - kept)))


def shown_shares(feedback: Feedback, counted_X: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """How likely the recommender that wrote the log was to show each exposure's item in its tab [X]: the item's share of the tab's exposures, drawn towards its share of
    all as if each item had been shown there ``_PRIOR_SHOWN`` times more on average, and that towards the share of any item.
    """
    items, tabs, num_items = feedback.items, feedback.tabs.astype(np.int64) + 1, int(feedback.items.max(initial=-1)) + 1
    counts_N = np.bincount(items[counted_X], minlength=num_items) + _PRIOR_SHOWN
    share_N = counts_N / max(counts_N.sum(), 1)
    keys, key_X = np.unique(tabs * max(num_items, 1) + items, return_inverse=True)
    counts_K = np.bincount(key_X[counted_X], minlength=len(keys))
    shown_T = np.bincount(tabs[counted_X], minlength=int(tabs.max(initial=0)) + 1)
    prior = _PRIOR_SHOWN * num_items
    found: npt.NDArray[np.float64] = (counts_K[key_X] + prior * share_N[items]) / (shown_T[tabs] + prior)
    return found


@dataclass(frozen=True)
class Batches:
    """Examples as the network takes them.

    ``vectors_ND`` is what is searched with; for examples of training that is ``crossed_2ND`` where there is one, see ``crossed_search_vectors``.
    """

    examples: Examples
    config: RewardConfig
    histories: Histories
    vectors_ND: FloatArray
    crossed_2ND: FloatArray | None
    debias_position: bool

    @classmethod
    def of(
        cls,
        found: Examples,
        config: RewardConfig,
        dataset: Dataset,
        events: EventActions,
        vectors_ND: FloatArray,
        crossed_2ND: FloatArray | None = None,
        *,
        debias_position: bool = True,
    ) -> Batches:
        """Bring the histories into the network's numbers."""
        actions_E = events.among(config.actions)[events.numbers_E].astype(np.int64)
        odd_E = np.repeat(np.arange(len(dataset.user_ids)), np.diff(dataset.offsets)) % 2
        items_E = dataset.items.astype(np.int64)
        return cls(found, config, Histories(items_E, actions_E, items_E + odd_E * len(vectors_ND)), vectors_ND, crossed_2ND, debias_position)

    def batch(self, rows: IntArray) -> RewardBatch:
        """Some examples, all of one use."""
        found, config = self.examples, self.config
        begins, ends = np.maximum(found.begins_X[rows], found.ends_X[rows] - config.max_history), found.ends_X[rows]
        counts = self.histories.action_counts(len(config.actions), begins, ends)
        user = user_features(found.shown_user_X[rows], found.given_user_XS[rows], found.usual_S, ends - begins, counts)
        item = item_features(found.shown_item_X[rows], found.given_item_XS[rows], found.usual_S)
        feedback = found.feedback
        positions, tabs = (feedback.positions[rows], feedback.tabs[rows]) if self.debias_position else (None, None)
        items = feedback.items[rows].astype(np.int64)
        if self.crossed_2ND is None or not len(rows) or found.use_X[rows[0]] != TRAIN:
            return pairs(config, self.vectors_ND, self._plain, begins, ends, items, user, item, positions, tabs)
        keys = items + (feedback.users[rows] % 2 == 1) * len(self.vectors_ND)
        return pairs(config, self.crossed_2ND, self.histories, begins, ends, items, user, item, positions, tabs, keys)

    @cached_property
    def _plain(self) -> Histories:
        return replace(self.histories, keys_E=None)

    def parts(self, rows: IntArray, size: int) -> Iterator[tuple[IntArray, RewardBatch]]:
        """The examples a batch at a time."""
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            yield part, self.batch(part)


def totals(found: Examples, num_items: int, user_ids: tuple[str, ...]) -> tuple[ItemTable, UserTable]:
    """How all items have fared at the end of training, and what is known of users by then."""
    train = found.use_X == TRAIN
    items, users, labels = found.feedback.items[train], found.feedback.users[train], found.labels_XS[train]
    shown_N = np.bincount(items, minlength=num_items)
    given_NS = np.stack([np.bincount(items[labels[:, column]], minlength=num_items) for column in range(labels.shape[1])], axis=1)
    known = users >= 0
    shown_U = np.bincount(users[known], minlength=len(user_ids))
    given_US = np.stack([np.bincount(users[known & labels[:, column]], minlength=len(user_ids)) for column in range(labels.shape[1])], axis=1)
    return ItemTable(shown_N, given_NS), UserTable({user: row for row, user in enumerate(user_ids)}, shown_U, given_US)
