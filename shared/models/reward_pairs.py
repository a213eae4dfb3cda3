"""What the reward network is told of a user and an item: the events that the search finds, and how both have fared so far.

Training and scoring go through the same functions, so that they cannot drift apart.
Legend: X pairs, E events of all histories, N items, S signals, A actions, K found and R recent events.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from semantide.shared.models.interest_search import FloatArray, IntArray, search
from semantide.shared.models.reward import AGE_BUCKETS, RewardBatch, RewardConfig

PRIOR_EXPOSURES = 10.0  # how many exposures of usual success everybody and everything begins with
_EXTREME = 4.0


@dataclass(frozen=True)
class Histories:
    """Histories one after another, as item rows (-1 for an item that nothing is known of) and action numbers + 1 (0 for another action).

    ``keys_E`` are the items' rows among the vectors of the search, where these are others.
    """

    items_E: IntArray
    actions_E: IntArray
    keys_E: IntArray | None = None

    @cached_property
    def _before(self) -> dict[int, npt.NDArray[np.int32]]:
        return {}

    def action_counts(self, num_actions: int, begins_X: IntArray, ends_X: IntArray) -> IntArray:
        """How often each action stands in some stretches [X, A]."""
        counts = np.empty((len(begins_X), num_actions), dtype=np.int64)
        for action in range(num_actions):
            before = self._before.get(action)
            if before is None:
                before = self._before[action] = np.concatenate([[0], np.cumsum(self.actions_E == action + 1)]).astype(np.int32)
            counts[:, action] = before[ends_X] - before[begins_X]
        return counts


def successes(shown_X: npt.NDArray[Any], given_XS: npt.NDArray[Any], usual_S: FloatArray) -> FloatArray:
    """How far each signal's rate is from usual, in logits [X, S]; near 0 where little was shown."""
    usual = np.clip(usual_S.astype(np.float64), 1e-5, 1 - 1e-5)
    given = given_XS + PRIOR_EXPOSURES * usual
    missed = shown_X[:, None] - given_XS + PRIOR_EXPOSURES * (1 - usual)
    return np.asarray(np.clip(np.log(given / missed) - np.log(usual / (1 - usual)), -_EXTREME, _EXTREME), dtype=np.float32)


def item_features(shown_N: npt.NDArray[Any], given_NS: npt.NDArray[Any], usual_S: FloatArray) -> FloatArray:
    """How items have fared [N, 1 + S]."""
    return np.concatenate([np.log1p(shown_N)[:, None].astype(np.float32) / 5, successes(shown_N, given_NS, usual_S)], axis=1)


def user_features(shown_X: npt.NDArray[Any], given_XS: npt.NDArray[Any], usual_S: FloatArray, lengths_X: IntArray, actions_XA: IntArray) -> FloatArray:
    """What is known of users at a moment [X, 2 + S + A]: from what they were shown, and from what is in their histories."""
    shares = actions_XA / np.maximum(lengths_X, 1)[:, None]
    sizes = np.stack([np.log1p(shown_X) / 5, np.log1p(lengths_X) / 5], axis=1)
    return np.concatenate([sizes, successes(shown_X, given_XS, usual_S), shares], axis=1).astype(np.float32)


def pairs(
    config: RewardConfig,
    vectors_ND: FloatArray,
    histories: Histories,
    begins_X: IntArray,
    ends_X: IntArray,
    items_X: IntArray,
    user_XU: FloatArray,
    item_XI: FloatArray,
    positions_X: npt.NDArray[Any] | None = None,
    tabs_X: npt.NDArray[Any] | None = None,
    keys_X: IntArray | None = None,
) -> RewardBatch:
    """Pairs of a user, whose history is a stretch of events, and an item; ``vectors_ND`` is what the search compares, ``keys_X`` the items' rows there."""
    keys_X = items_X if keys_X is None else keys_X
    keys_E = histories.items_E if histories.keys_E is None else histories.keys_E
    begins_X = np.maximum(begins_X, ends_X - config.max_history)
    places_XK, alike_XK = search(vectors_ND, keys_E, begins_X, ends_X, keys_X, config.num_found)
    recent_XR = ends_X[:, None] - config.num_recent + np.arange(config.num_recent)
    recent_XR = np.where(recent_XR >= begins_X[:, None], recent_XR, -1)
    places_XM = np.concatenate([places_XK, recent_XR], axis=1)
    there_XM = places_XM >= 0
    safe_XM = np.where(there_XM, places_XM, 0)
    empty = not len(histories.items_E)
    events_XM = np.where(there_XM, 0 if empty else histories.items_E[safe_XM], -1)
    actions_XM = np.where(there_XM, 0 if empty else histories.actions_E[safe_XM], 0)
    ages_XM = np.where(there_XM, np.minimum(np.log2(np.maximum(ends_X[:, None] - safe_XM, 1)), AGE_BUCKETS - 1), 0).astype(np.int64)
    recent = slice(config.num_found, None)
    keys_XR = np.where(there_XM, 0 if empty else keys_E[safe_XM], -1)[:, recent]
    alike_XR = np.einsum("xrd,xd->xr", vectors_ND[keys_XR], vectors_ND[keys_X], optimize=True)
    known_XR = (events_XM[:, recent] >= 0) & (items_X >= 0)[:, None]
    alike_XM = np.concatenate([alike_XK, np.where(known_XR, alike_XR, 0)], axis=1).astype(np.float32)

    def tensor(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    return RewardBatch(
        items_X=tensor(items_X.astype(np.int64)),
        events_XM=tensor(events_XM),
        actions_XM=tensor(actions_XM),
        ages_XM=tensor(ages_XM),
        there_XM=tensor(there_XM),
        alike_XM=tensor(alike_XM),
        user_XU=tensor(user_XU),
        item_XI=tensor(item_XI),
        positions_X=None if positions_X is None else tensor(positions_X.astype(np.int64)),
        tabs_X=None if tabs_X is None else tensor(tabs_X.astype(np.int64)),
    )
