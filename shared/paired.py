"""Means, differences and ratios over people or cases, with intervals.

Every case counts once and independently of the others, so figures of the same person are added up before they come here.
Legend: C cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure, and the bounds that hold the true one in ``confidence`` of all such samples; infinite ones where too few cases are there to tell."""

    value: float
    low: float
    high: float
    cases: int
    confidence: float = 0.95

    @property
    def beyond_noise(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0

    @property
    def error(self) -> float:
        """Its standard error."""
        return (self.high - self.low) / 2 / normal_quantile((1 + self.confidence) / 2)

    def as_dict(self) -> dict[str, float | None]:
        """Value and bounds for JSON, which has no infinite numbers: None."""
        return {name: number if math.isfinite(number) else None for name, number in (("value", self.value), ("low", self.low), ("high", self.high))}


def normal_quantile(share: float) -> float:
    """The number below which this share of standard normal draws lies.

    Raises: ValueError for a share outside of 0 to 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}: give one between 0 and 1")
    return NormalDist().inv_cdf(share)


def interval(value: float, variance: float, cases: int, confidence: float = 0.95) -> Interval:
    """The normal interval of an estimate with this variance."""
    if cases < 2 or not math.isfinite(variance):
        return Interval(value, -math.inf, math.inf, cases, confidence)
    reach = normal_quantile((1 + confidence) / 2) * math.sqrt(max(variance, 0.0))
    return Interval(value, value - reach, value + reach, cases, confidence)


def mean(values_C: Floats, confidence: float = 0.95) -> Interval:
    """Mean over cases."""
    cases = len(values_C)
    if not cases:
        return Interval(math.nan, -math.inf, math.inf, 0, confidence)
    return interval(float(values_C.mean()), float(values_C.var(ddof=1)) / cases if cases > 1 else math.inf, cases, confidence)


def difference(new_C: Floats, old_C: Floats, confidence: float = 0.95) -> Interval:
    """Mean of the differences of each case.

    Raises: ValueError for other cases.
    """
    return mean(_matched(new_C, old_C), confidence)


def ratio(sums_C: Floats, counts_C: Floats, confidence: float = 0.95) -> Interval:
    """One total over another, such as clicks over requests, where both vary by case (delta method)."""
    # Who has nothing of either tells nothing: a variant that one person met is known no better for all that did not.
    cases, total = int(np.count_nonzero((counts_C != 0) | (sums_C != 0))), float(counts_C.sum())
    if total == 0:
        return Interval(math.nan, -math.inf, math.inf, cases, confidence)
    value = float(sums_C.sum()) / total
    rest_C = sums_C - value * counts_C
    variance = float((rest_C**2).sum()) * cases / max(cases - 1, 1) / total**2
    return interval(value, variance if cases > 1 else math.inf, cases, confidence)


def lift(new_C: Floats, old_C: Floats, confidence: float = 0.95) -> Interval:
    """The new total over the old one of the same cases, less 1 (delta method).

    Raises: ValueError for other cases.
    """
    _matched(new_C, old_C)
    found = ratio(np.asarray(new_C, dtype=np.float64), np.asarray(old_C, dtype=np.float64), confidence)
    return Interval(found.value - 1, found.low - 1, found.high - 1, found.cases, confidence)


def _matched(new_C: Floats, old_C: Floats) -> Floats:
    if len(new_C) != len(old_C):
        raise ValueError(f"{len(new_C)} new figures for {len(old_C)} old ones: give both for the same cases, in one order")
    return np.asarray(new_C, dtype=np.float64) - np.asarray(old_C, dtype=np.float64)
