"""Intervals: they hold the truth as often as they say."""

import math

import numpy as np
import pytest

from semantide.shared.paired import difference, lift, mean, ratio


@pytest.mark.parametrize("estimate", ["mean", "difference", "ratio", "lift"])
def test_intervals_hold_the_truth_as_often_as_they_say(estimate: str) -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(600):
        people = rng.gamma(2.0, 1.0, 150)  # some people do more of everything
        old, new = rng.poisson(3 * people), rng.poisson(3.3 * people)
        if estimate == "mean":
            found, truth = mean(new.astype(float)), 6.6
        elif estimate == "difference":
            found, truth = difference(new.astype(float), old.astype(float)), 0.6
        elif estimate == "ratio":
            found, truth = ratio(new.astype(float), old.astype(float)), 1.1
        else:
            found, truth = lift(new.astype(float), old.astype(float)), 0.1
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 600 <= 0.98


def test_too_few_cases_say_nothing() -> None:
    for found in (mean(np.zeros(0)), mean(np.ones(1)), ratio(np.ones(1), np.ones(1)), ratio(np.ones(3), np.zeros(3))):
        assert (found.low, found.high) == (-math.inf, math.inf) and not found.beyond_noise
        told = found.as_dict()
        assert told["low"] is None and told["high"] is None and (told["value"] is None) == math.isnan(found.value)
    with pytest.raises(ValueError, match="same cases"):
        difference(np.ones(2), np.ones(3))
