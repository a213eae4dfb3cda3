"""From a model's logits to probabilities that come true: Platt scaling and isotonic regression, and how far off predictions are.

Legend: X examples, K knots, B bins.
Source: Platt, Probabilistic outputs for support vector machines, 1999; Zadrozny and Elkan, Transforming classifier scores into accurate probabilities, 2002.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from sklearn.isotonic import IsotonicRegression

FloatArray = npt.NDArray[np.float64]
Method = Literal["auto", "platt", "isotonic", "none"]
METHODS = ("auto", "platt", "isotonic", "none")

_STEPS = 50
_LEAST = 1e-6  # no probability is nearer to 0 or 1


def sigmoid(logits: npt.NDArray[Any]) -> FloatArray:
    """Probabilities of logits, without overflow."""
    half = np.tanh(np.asarray(logits, dtype=np.float64) / 2)
    return np.asarray(0.5 * (1 + half))


class Calibration(Protocol):
    """A non-decreasing map from logits to probabilities."""

    def __call__(self, logits: npt.NDArray[Any]) -> FloatArray:
        """Probabilities in (0, 1)."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """JSON that ``calibration_of`` reads."""
        ...


@dataclass(frozen=True)
class Platt:
    """sigmoid(slope * logit + shift); slope 1 and shift 0 change nothing."""

    slope: float = 1.0
    shift: float = 0.0

    @classmethod
    def fit(cls, logits_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], weights_X: npt.NDArray[Any] | None = None) -> Platt:
        """Newton's method on the log loss, with Platt's softened labels, so that few examples of one kind do not drive it to 0 or 1."""
        x, y = np.asarray(logits_X, dtype=np.float64), np.asarray(labels_X, dtype=np.float64)
        w = np.ones(len(x)) if weights_X is None else np.asarray(weights_X, dtype=np.float64)
        positives, negatives = float((w * y).sum()), float((w * (1 - y)).sum())
        target = np.where(y > 0.5, (positives + 1) / (positives + 2), 1 / (negatives + 2))
        centre, scale = float(np.average(x, weights=w)), max(float(x.std()), 1e-6)
        z = np.stack([(x - centre) / scale, np.ones(len(x))])
        beta = np.array([scale, centre])

        def loss(beta: FloatArray) -> float:
            logits = beta @ z
            return float((w * (np.logaddexp(0, logits) - target * logits)).sum()) + 0.5e-6 * float((beta**2).sum())

        for _ in range(_STEPS):
            p = sigmoid(beta @ z)
            gradient = z @ (w * (p - target)) + 1e-6 * beta
            hessian = (z * (w * p * (1 - p))) @ z.T + 1e-6 * np.eye(2)
            step, before, share = np.linalg.solve(hessian, gradient), loss(beta), 1.0
            while loss(beta - share * step) > before and share > 1e-4:
                share /= 2
            beta = beta - share * step
            if float(np.abs(share * step).max()) < 1e-9:
                break
        if beta[0] <= 0:  # the order of the logits is wrong here: their mean is all that is left to say
            rate = min(max(positives / max(positives + negatives, 1.0), _LEAST), 1 - _LEAST)
            return cls(0.0, float(np.log(rate / (1 - rate))))
        return cls(float(beta[0] / scale), float(beta[1] - beta[0] * centre / scale))

    def __call__(self, logits: npt.NDArray[Any]) -> FloatArray:
        """See ``Calibration``."""
        return np.clip(sigmoid(self.slope * np.asarray(logits, dtype=np.float64) + self.shift), _LEAST, 1 - _LEAST)

    def as_dict(self) -> dict[str, Any]:
        """See ``Calibration``."""
        return {"kind": "platt", "slope": self.slope, "shift": self.shift}


@dataclass(frozen=True)
class Isotonic:
    """Straight lines between knots, level outside them.

    Shapes: ``logits``, ``probabilities`` [K], both ascending.
    """

    logits: tuple[float, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def fit(cls, logits_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], weights_X: npt.NDArray[Any] | None = None) -> Isotonic:
        """Pool adjacent violators."""
        fitted = IsotonicRegression(y_min=_LEAST, y_max=1 - _LEAST, out_of_bounds="clip")
        fitted.fit(np.asarray(logits_X, dtype=np.float64), np.asarray(labels_X, dtype=np.float64), sample_weight=weights_X)
        return cls(tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist()))

    def __call__(self, logits: npt.NDArray[Any]) -> FloatArray:
        """See ``Calibration``."""
        return np.interp(np.asarray(logits, dtype=np.float64), self.logits, self.probabilities)

    def as_dict(self) -> dict[str, Any]:
        """See ``Calibration``."""
        return {"kind": "isotonic", "logits": list(self.logits), "probabilities": list(self.probabilities)}


def calibration_of(values: Mapping[str, Any]) -> Calibration:
    """Read what ``as_dict`` wrote."""
    if values["kind"] == "isotonic":
        return Isotonic(tuple(values["logits"]), tuple(values["probabilities"]))
    return Platt(float(values["slope"]), float(values["shift"]))


def fit_calibration(
    logits_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], method: Method = "auto", *, weights_X: npt.NDArray[Any] | None = None, seed: int = 0
) -> Calibration:
    """Fit a calibration; ``auto`` takes the one with the least log loss on the halves that it was not fitted on, all by the same weights.

    Without examples of both kinds nothing can be learned, and logits stay as they are.
    Raises: ValueError for an unknown method, or labels and logits that are not one for one, or not finite.
    """
    logits_X, labels_X = np.asarray(logits_X, dtype=np.float64), np.asarray(labels_X, dtype=np.float64)
    if method not in METHODS:
        raise ValueError(f"calibration is {method!r}: give one of {', '.join(METHODS)}")
    if logits_X.shape != labels_X.shape or logits_X.ndim != 1:
        raise ValueError(f"logits {logits_X.shape} and labels {labels_X.shape}: give one label for each logit")
    if not np.isfinite(logits_X).all():
        raise ValueError("some logits are not finite: the model has diverged, train it with a smaller learning rate")
    if method == "none" or not 0 < float(labels_X.mean() if len(labels_X) else 0) < 1:
        return Platt()
    if method == "auto":
        half = np.random.default_rng(seed).permutation(len(logits_X)) % 2 == 0
        losses = {}
        own = [None if weights_X is None else np.asarray(weights_X)[fit] for fit in (half, ~half)]
        for name in ("platt", "isotonic"):
            losses[name] = sum(
                log_loss(fit_calibration(logits_X[fit], labels_X[fit], name, weights_X=mine)(logits_X[~fit]), labels_X[~fit], theirs)
                for fit, mine, theirs in ((half, *own), (~half, *own[::-1]))
            )
        method = "isotonic" if losses["isotonic"] < losses["platt"] else "platt"
    return (Isotonic if method == "isotonic" else Platt).fit(logits_X, labels_X, weights_X)


def mean_of(values_X: npt.NDArray[Any], weights_X: npt.NDArray[Any] | None = None) -> float:
    """Mean, by weights where there are any; 0 of nothing."""
    return float(np.average(values_X, weights=weights_X)) if len(values_X) else 0.0


def log_loss(probabilities_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], weights_X: npt.NDArray[Any] | None = None) -> float:
    """Mean negative log likelihood; 0 of nothing."""
    p, y = np.clip(np.asarray(probabilities_X, dtype=np.float64), _LEAST, 1 - _LEAST), np.asarray(labels_X, dtype=np.float64)
    return mean_of(-(y * np.log(p) + (1 - y) * np.log1p(-p)), weights_X)


def reliability(
    probabilities_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], num_bins: int = 20, weights_X: npt.NDArray[Any] | None = None
) -> list[tuple[float, float, float]]:
    """(mean prediction, rate, weight) of bins that weigh about the same, in the order of predictions; without weights each example weighs 1."""
    p, y = np.asarray(probabilities_X, dtype=np.float64), np.asarray(labels_X, dtype=np.float64)
    order, most = np.argsort(p, kind="stable"), min(num_bins, max(len(p), 1))
    if weights_X is None:
        return [(float(p[part].mean()), float(y[part].mean()), len(part)) for part in np.array_split(order, most) if len(part)]
    w = np.asarray(weights_X, dtype=np.float64)
    passed = np.cumsum(w[order])
    # Where the middle of an example's weight lies says whose it is.
    bin_of = np.minimum((passed - w[order] / 2) / max(float(passed[-1]) if len(passed) else 0.0, 1e-300) * most, most - 1).astype(np.int64)
    bins = [order[bin_of == number] for number in np.unique(bin_of)]
    return [(mean_of(p[part], w[part]), mean_of(y[part], w[part]), float(w[part].sum())) for part in bins]


def calibration_error(probabilities_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], num_bins: int = 20, weights_X: npt.NDArray[Any] | None = None) -> float:
    """Expected calibration error: how far mean prediction and rate of a bin are apart, over bins that weigh about the same. In [0, 1]."""
    bins = reliability(probabilities_X, labels_X, num_bins, weights_X)
    total = sum(weight for *_, weight in bins)
    return sum(abs(mean - rate) * weight for mean, rate, weight in bins) / total if total else 0.0


def area_under_curve(scores_X: npt.NDArray[Any], labels_X: npt.NDArray[Any], weights_X: npt.NDArray[Any] | None = None) -> float:
    """The probability that a positive example has the higher score of a random pair, drawn by weights where there are any, ties counting half; NaN without both kinds."""
    scores, positive = np.asarray(scores_X, dtype=np.float64), np.asarray(labels_X) > 0.5
    if weights_X is not None:
        w = np.asarray(weights_X, dtype=np.float64)
        group = np.unique(scores, return_inverse=True)[1]
        ours, theirs = (np.bincount(group, w * kind) for kind in (positive, ~positive))
        total = float(ours.sum() * theirs.sum())
        return float((ours * (np.cumsum(theirs) - theirs / 2)).sum() / total) if total else float("nan")
    num_positives = int(positive.sum())
    pairs = num_positives * (len(scores) - num_positives)
    if not pairs:
        return float("nan")
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
    return float((ranks[positive].sum() - num_positives * (num_positives + 1) / 2) / pairs)
