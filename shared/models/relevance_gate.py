"""Whether an item has anything to do with a user: relevance from what items are and from who likes them together, and a threshold that most positives pass.

A reward model alone draws a generator to what everybody likes. The gate lets only those items be rewarded that are like something in the user's history; its
threshold is a quantile of the relevance of held-out items that users did like, so the share of good items that it shuts out is chosen and known.
Legend: X pairs, E events, N items, C content and G collaborative width, K found events, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression

from semantide.shared.models.calibration import area_under_curve, mean_of
from semantide.shared.models.interest_search import FloatArray, IntArray
from semantide.shared.models.linear_map import unit_rows

FEATURES = ("content best", "content mean", "content profile", "collaborative best", "collaborative mean", "collaborative profile")
PROFILE_EVENTS = 50  # the latest, whose mean is a user's profile
_PAIRS = 4096


def relevance_features(
    spaces: tuple[FloatArray, FloatArray], items_E: IntArray, begins_X: IntArray, ends_X: IntArray, items_X: IntArray, events_XK: IntArray
) -> FloatArray:
    """How alike item and history are in both spaces [X, F]: the most alike of the found events, their mean, and the mean of the latest events.

    Shapes: ``spaces`` unit vectors [N, C] and [N, G]; ``events_XK`` items that the search found, -1 for none. Unknown items have likeness 0.
    """
    features = np.zeros((len(items_X), len(FEATURES)), dtype=np.float32)
    for begin in range(0, len(items_X), _PAIRS):
        part = slice(begin, begin + _PAIRS)
        target, events, ends = items_X[part], events_XK[part], ends_X[part]
        recent = ends[:, None] - PROFILE_EVENTS + np.arange(PROFILE_EVENTS)
        inside = recent >= begins_X[part, None]
        latest = np.where(inside, items_E[np.where(inside, recent, 0)], -1) if len(items_E) else np.full(recent.shape, -1)
        for number, vectors in enumerate(spaces):
            if not vectors.shape[1] or not len(vectors):
                continue
            wanted = np.where((target >= 0)[:, None], vectors[target.clip(0)], 0)
            alike = np.where(events >= 0, np.einsum("xkd,xd->xk", vectors[events.clip(0)], wanted, optimize=True), 0)
            profile = unit_rows(np.where((latest >= 0)[:, :, None], vectors[latest.clip(0)], 0).sum(1))
            found = (events >= 0).sum(1)
            features[part, 3 * number] = np.where(found > 0, np.where(events >= 0, alike, -np.inf).max(1, initial=-1), 0)
            features[part, 3 * number + 1] = alike.sum(1) / np.maximum(found, 1)
            features[part, 3 * number + 2] = np.einsum("xd,xd->x", profile, wanted)
    return features


@dataclass(frozen=True)
class RelevanceGate:
    """Relevance is ``features @ weights + bias``, and an item passes above the threshold.

    Shapes: ``weights`` [F].
    """

    weights: tuple[float, ...]
    bias: float
    threshold: float
    quantile: float

    @classmethod
    def fit(
        cls, positives_XF: FloatArray, others_XF: FloatArray, held_out_XF: FloatArray, quantile: float, counts: tuple[FloatArray, FloatArray] | None = None
    ) -> RelevanceGate:
        """Learn to tell positives from other items, and set the threshold so that ``quantile`` of the held-out positives stay below it; ``counts`` say how much each of
        both counts, None: all alike.

        Without positives everything is relevant.
        Raises: ValueError for a quantile outside [0, 1).
        """
        if not 0 <= quantile < 1:
            raise ValueError(f"gate quantile is {quantile}: give the share of positives that may be shut out, from 0 to below 1")
        if not len(positives_XF) or not len(others_XF) or not len(held_out_XF):
            return cls((0.0,) * len(FEATURES), 0.0, -1.0, quantile)
        inputs = np.concatenate([positives_XF, others_XF]).astype(np.float64)
        labels = np.arange(len(inputs)) < len(positives_XF)
        centre, scale = inputs.mean(0), np.maximum(inputs.std(0), 1e-6)
        counts_X = None if counts is None else np.concatenate([counts[0] / counts[0].mean(), np.ones(len(others_XF))])
        fitted = LogisticRegression(C=1.0, class_weight="balanced", max_iter=500).fit((inputs - centre) / scale, labels, sample_weight=counts_X)
        # Being more alike never makes an item less relevant, however the features go together.
        slopes = np.maximum(fitted.coef_[0] / scale, 0.0)
        if not slopes.any():
            slopes = 1 / scale
        weights, bias = tuple(slopes.tolist()), float(fitted.intercept_[0] - slopes @ centre)
        free = cls(weights, bias, -np.inf, quantile)
        # Just below, so that the positive that sets it passes.
        lowest = _quantile(free.relevance(held_out_XF), quantile, None if counts is None else counts[1])
        threshold = float(np.nextafter(lowest, np.float32(-np.inf)))
        return cls(weights, bias, threshold, quantile)

    def relevance(self, features_XF: FloatArray) -> FloatArray:
        """Relevance of each pair [X]."""
        return np.asarray(features_XF.astype(np.float64) @ np.asarray(self.weights) + self.bias, dtype=np.float32)

    def passes(self, relevance_X: FloatArray, valid_X: npt.NDArray[np.bool_], known_X: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which items may be rewarded: never an invalid one; and any valid one of a user of whom nothing is known, for nothing speaks against it."""
        return valid_X & ((relevance_X > self.threshold) | ~known_X)

    def as_dict(self) -> dict[str, Any]:
        """JSON that ``of`` reads."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RelevanceGate:
        """Read what ``as_dict`` wrote."""
        return cls(tuple(values["weights"]), values["bias"], values["threshold"], values["quantile"])

    def report(self, held_out_XF: FloatArray, others_XF: FloatArray, counts_X: FloatArray | None = None) -> dict[str, float]:
        """How many held-out positives and how many other items pass, and how well relevance tells them apart; ``counts_X`` say how much each positive counts."""
        positives, others = self.relevance(held_out_XF), self.relevance(others_XF)
        labels = np.arange(len(positives) + len(others)) < len(positives)
        pairs_X = None if counts_X is None else np.concatenate([counts_X, np.ones(len(others))])
        return {
            "positives_pass": mean_of(positives > self.threshold, counts_X) if len(positives) else 1.0,
            "others_pass": float((others > self.threshold).mean()) if len(others) else 1.0,
            "auc": area_under_curve(np.concatenate([positives, others]), labels, pairs_X),
        }


def _quantile(values_X: FloatArray, quantile: float, weights_X: FloatArray | None) -> np.float32:
    """The largest value that leaves at most this share of the weight below it."""
    if weights_X is None:
        return np.float32(np.quantile(values_X, quantile, method="lower"))
    order = np.argsort(values_X, kind="stable")
    weights = weights_X[order].astype(np.float64)
    below = np.cumsum(weights) - weights
    return np.float32(values_X[order][np.flatnonzero(below <= quantile * weights.sum())[-1]])
