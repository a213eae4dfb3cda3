"""Whether a candidate is not worse than the live model: case by case, on the same held-out users.

For each metric the mean of the differences has a lower bound that the true one lies above in 95 of 100 such tests. The candidate is not worse where that bound is no further below 0 than the
deployment allows. Too few users make the bound low: what cannot be shown is not promoted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from semantide.shared.paired import Floats, difference

_BOTH_SIDES = 0.9  # an interval whose lower end alone is looked at: 95 % one-sided


@dataclass(frozen=True)
class Judgement:
    """What came out. ``figures`` of each metric: ``live``, ``candidate``, ``difference``, ``low`` (its lower bound) and ``bound`` (what that was held against)."""

    not_worse: bool
    reason: str = ""
    cases: int = 0
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def noting(self, words: str) -> Judgement:
        """With something to know beside the reason."""
        return replace(self, reason="; ".join(filter(None, [self.reason, words])))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"not_worse": self.not_worse, "reason": self.reason, "cases": self.cases, "figures": {name: dict(own) for name, own in self.figures.items()}}


def judge(candidate: Mapping[str, Floats], live: Mapping[str, Floats], bounds: Mapping[str, float]) -> Judgement:
    """Compare two models' figures of the same cases; ``bounds`` says for each metric which share of the live model's figure may be lost.

    Raises: ValueError for figures of other cases.
    """
    figures: dict[str, dict[str, float]] = {}
    failed: list[str] = []
    cases = 0
    for metric, share in bounds.items():
        found = difference(candidate[metric], live[metric], _BOTH_SIDES)
        cases, mean = found.cases, float(live[metric].mean()) if found.cases else 0.0
        bound = -share * mean
        # Infinite bounds are no JSON.
        low = found.low if found.cases > 1 else -1.0
        figures[metric] = {
            "live": mean,
            "candidate": float(candidate[metric].mean()) if cases else 0.0,
            "difference": found.value if cases else 0.0,
            "low": low,
            "bound": bound,
        }
        if low < bound:
            failed.append(
                f"{metric} may have lost {-low:.4f} of {mean:.4f} (the mean of {cases} users changed by {found.value:+.4f}), more than the {share:.2%} allowed"
            )
    return Judgement(not failed, "; ".join(failed), cases, figures)
