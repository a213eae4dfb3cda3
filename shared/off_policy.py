"""What a policy would have earned, from what another one did and with which chance.

A log has decisions: what was chosen, with which chance (propensity), and what came of it (reward). The policy to be judged would have made the same choice with a chance of its own (target). Where
the log's policy gives every choice that the other one makes a chance, these estimates are unbiased or become so with many decisions; ``mean_weight`` is then 1 but for noise, and another one says that it does not.

    ips              mean of weight x reward, where a decision's weight is target / propensity
    snips            the same, divided by the mean weight: a little biased, far steadier where weights vary
    doubly_robust    what a model of rewards expects of the policy, plus the weighted error of that model where it can be seen: right if either is, and steady where the model is good

Decisions of one group (a person) may depend on each other; groups do not.
Source: Dudik, Langford, Li, Doubly Robust Policy Evaluation and Learning, ICML 2011; Swaminathan, Joachims, The Self-Normalized Estimator for Counterfactual Learning, NeurIPS 2015.
Legend: C decisions, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from semantide.shared.paired import Floats, Interval, interval, ratio

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """What was logged of each decision, and the chance of the same choice under the policy to be judged.

    Shapes: all [C]. ``groups`` label whose decision it was; without them each is by itself.
    """

    rewards: Floats
    propensities: Floats
    targets: Floats
    groups: Labels | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.rewards), len(self.propensities), len(self.targets), *(() if self.groups is None else (len(self.groups),))}
        if len(sizes) != 1:
            raise ValueError(f"rewards, propensities, targets and groups have {sorted(sizes)} entries: give one of each for every decision")
        if not np.isfinite(self.rewards).all():
            raise ValueError(f"{int((~np.isfinite(self.rewards)).sum())} rewards are not numbers: leave these decisions out, or correct them")
        if len(self.propensities) and not (self.propensities.min() > 0 and self.propensities.max() <= 1):
            wrong = self.propensities[~((self.propensities > 0) & (self.propensities <= 1))][0]
            raise ValueError(f"a propensity is {wrong}: what was chosen had a chance above 0 and up to 1; leave decisions out whose chance is not known")
        if len(self.targets) and not (self.targets.min() >= 0 and self.targets.max() <= 1):
            raise ValueError(f"targets reach from {self.targets.min()} to {self.targets.max()}: give chances from 0 to 1")

    @property
    def weights(self) -> Floats:
        """How much more, or less, likely each choice is under the policy to be judged."""
        weights: Floats = self.targets / self.propensities
        return weights


@dataclass(frozen=True)
class Estimate:
    """A mean reward per decision. ``effective`` is how many decisions of the policy itself would tell as much; ``clipped`` the share whose weight was cut.

    Shapes: ``influences_G`` how far each group moves the estimate, together 0.
    """

    interval: Interval
    mean_weight: Interval
    effective: float
    clipped: float = 0.0
    influences_G: Floats = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)


def ips(decisions: Decisions, clip: float | None = None, confidence: float = 0.95) -> Estimate:
    """Inverse propensity scores; ``clip`` cuts larger weights, which makes the estimate steadier and, where rewards are positive, too low."""
    return _estimate(decisions, clip, confidence, lambda weights: (weights * decisions.rewards, np.ones_like(weights)))


def snips(decisions: Decisions, clip: float | None = None, confidence: float = 0.95) -> Estimate:
    """Self-normalised inverse propensity scores."""
    return _estimate(decisions, clip, confidence, lambda weights: (weights * decisions.rewards, weights))


def doubly_robust(decisions: Decisions, predicted_C: Floats, expected_C: Floats, clip: float | None = None, confidence: float = 0.95) -> Estimate:
    """With a model of rewards: ``predicted_C`` of the logged choices, ``expected_C`` on average over the choices of the policy to be judged.

    The model must not have been fitted on the same groups' rewards (``halves`` parts them).

    Raises: ValueError for predictions of other decisions.
    """
    if len(predicted_C) != len(decisions.rewards) or len(expected_C) != len(decisions.rewards):
        raise ValueError(
            f"{len(predicted_C)} predicted and {len(expected_C)} expected rewards for {len(decisions.rewards)} decisions: give one of each for every decision"
        )
    return _estimate(decisions, clip, confidence, lambda weights: (expected_C + weights * (decisions.rewards - predicted_C), np.ones_like(weights)))


def lift(new: Estimate, old: Estimate) -> Interval:
    """The new estimate over the old one, less 1, of the same decisions (delta method): whoever moves the one may move the other, as a person whom chance gave to one side is missing on the other.

    Raises: ValueError for estimates of other groups.
    """
    if new.influences_G.shape != old.influences_G.shape:
        raise ValueError(f"{len(new.influences_G)} groups in the new estimate and {len(old.influences_G)} in the old one: give both for the same decisions")
    one, other = new.interval, old.interval
    cases = min(one.cases, other.cases)
    if not other.value > 0 or not math.isfinite(one.value) or cases < 2:
        return interval(math.nan, math.inf, cases, one.confidence)
    times = one.value / other.value
    moved_G = (new.influences_G - times * old.influences_G) / other.value
    return interval(times - 1, float((moved_G**2).sum()) * cases / (cases - 1), cases, one.confidence)


def halves(groups_C: Labels, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Two halves of the groups, by chance: a model for one is fitted on the other."""
    names_G, place_C = np.unique(groups_C, return_inverse=True)
    half_G = np.random.default_rng([seed, 5]).permutation(len(names_G)) % 2 == 0
    return np.asarray(half_G[place_C], dtype=np.bool_)


def cascade_weights(weights_C: Floats, pages_C: Labels) -> Floats:
    """Weights of the places of pages whose rewards depend on the places before them: the product of all up to each. Rows of a page are together, in the order of their places."""
    result = np.asarray(weights_C, dtype=np.float64).copy()
    for place in range(1, len(result)):
        if pages_C[place] == pages_C[place - 1]:
            result[place] *= result[place - 1]
    return result


def _estimate(decisions: Decisions, clip: float | None, confidence: float, parts: Callable[[Floats], tuple[Floats, Floats]]) -> Estimate:
    weights = decisions.weights
    cut = weights if clip is None else np.minimum(weights, clip)
    groups = np.arange(len(weights)) if decisions.groups is None else decisions.groups
    _, place_C = np.unique(groups, return_inverse=True)
    count = int(place_C.max(initial=-1)) + 1

    def by_group(values_C: Floats) -> Floats:
        return np.bincount(place_C, values_C, minlength=count).astype(np.float64)

    sums, counts = (by_group(part) for part in parts(cut))
    square = float((cut**2).sum())
    found = ratio(sums, counts, confidence)
    return Estimate(
        found,
        ratio(by_group(weights), by_group(np.ones_like(weights)), confidence),
        float(cut.sum()) ** 2 / square if square else 0.0,
        float((cut < weights).mean()) if len(weights) else 0.0,
        (sums - found.value * counts) / counts.sum() if counts.sum() else np.zeros(count),
    )
