"""When an alignment must end: held-out quality falls beyond noise, or the reward rises while an independent judge falls.

Everything is compared with the start by the same users, so what counts is the mean of differences and its standard error.
Legend: U users of a held-out test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.shared.paired import Interval, difference

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Standing:
    """What a test says of each user.

    Shapes: ``hits_U`` whether a target is among the first 50; ``reward_V`` and ``judge_V`` mean rewards of the policy's own rollouts for some of the users, by the
    reward model that is optimised and by an independent one (None where there is none).
    """

    hits_U: FloatArray
    reward_V: FloatArray
    judge_V: FloatArray | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether to go on, why not, and the changes that it rests on."""

    reason: str
    hits: Interval
    reward: Interval
    judge: Interval | None

    @property
    def stops(self) -> bool:
        """Whether the run must end and go back."""
        return bool(self.reason)


@dataclass(frozen=True)
class Guard:
    """The bounds. ``loss`` is the share of the start's hit rate that may be lost however sure that is."""

    deviations: float
    loss: float = 0.0

    def verdict(self, start: Standing, now: Standing) -> Verdict:
        """Compare a test with the one before the first step.

        Raises: ValueError for tests of different users.
        """
        hits, reward = difference(now.hits_U, start.hits_U), difference(now.reward_V, start.reward_V)
        judge = None if now.judge_V is None or start.judge_V is None else difference(now.judge_V, start.judge_V)
        reason = ""
        if self.falls(hits) and hits.value < -self.loss * float(start.hits_U.mean()):
            reason = (
                f"held-out HR@50 fell from {start.hits_U.mean():.4f} to {now.hits_U.mean():.4f}, {-hits.value / hits.error if hits.error else math.inf:.1f} standard "
                "errors"
            )
        elif judge is not None and self.rises(reward) and self.falls(judge):
            reason = (
                f"the reward rose by {reward.value:.4f} while the independent judge fell by {-judge.value:.4f}: what the policy gains, it gains from the reward "
                "model's faults"
            )
        return Verdict(reason, hits, reward, judge)

    def rises(self, change: Interval) -> bool:
        """Whether it is up beyond noise."""
        return change.value > self.deviations * change.error

    def falls(self, change: Interval) -> bool:
        """Whether it is down beyond noise."""
        return change.value < -self.deviations * change.error
