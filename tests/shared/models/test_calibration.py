"""Calibrated probabilities come true, keep the order of the logits, and survive what is odd."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from semantide.shared.models.calibration import (
    Platt,
    area_under_curve,
    calibration_error,
    calibration_of,
    fit_calibration,
    log_loss,
    mean_of,
    reliability,
    sigmoid,
)


def drawn(seed: int, slope: float = 0.5, shift: float = -1.0, num: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, num)
    return logits, rng.random(num) < sigmoid(slope * logits + shift)


@pytest.mark.parametrize("method", ["platt", "isotonic", "auto"])
def test_overconfident_logits_come_true_on_what_was_not_seen(method: str) -> None:
    fitted = fit_calibration(*drawn(0), method)  # type: ignore[arg-type]
    logits, labels = drawn(1)
    assert calibration_error(sigmoid(logits), labels) > 0.1 > 0.02 > calibration_error(fitted(logits), labels)
    assert area_under_curve(fitted(logits), labels) == pytest.approx(area_under_curve(logits, labels), abs=2e-3)


def test_platt_finds_the_line_that_made_the_labels() -> None:
    fitted = Platt.fit(*drawn(2, num=200_000))
    assert (fitted.slope, fitted.shift) == (pytest.approx(0.5, abs=0.02), pytest.approx(-1, abs=0.03))


@given(st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=1, max_size=40), st.sampled_from(["platt", "isotonic", "none"]))
def test_any_calibration_is_a_non_decreasing_map_into_probabilities(rows: list[tuple[float, bool]], method: str) -> None:
    logits, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    fitted = fit_calibration(logits, labels, method)  # type: ignore[arg-type]
    again = calibration_of(json.loads(json.dumps(fitted.as_dict())))
    grid = np.linspace(-60, 60, 200)
    found = fitted(grid)
    assert np.isfinite(found).all() and (found >= 0).all() and (found <= 1).all() and (np.diff(found) >= -1e-12).all()
    assert np.array_equal(found, again(grid))


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40).filter(lambda rows: len({label for _, label in rows}) == 2))
def test_area_under_curve_is_that_of_the_textbook(rows: list[tuple[int, bool]]) -> None:
    scores, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_logits_in_the_wrong_order_are_not_turned_around() -> None:
    logits, labels = drawn(3)
    fitted = Platt.fit(-logits, labels)
    assert fitted.slope == 0 and fitted(np.zeros(1))[0] == pytest.approx(labels.mean())


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(1, 4)), min_size=2, max_size=30).filter(
        lambda rows: len({label for _, label, _ in rows}) == 2
    )
)
def test_an_example_of_weight_n_is_n_examples(rows: list[tuple[int, bool, int]]) -> None:
    scores, labels, weights = (np.array([row[column] for row in rows]) for column in range(3))
    p, many = sigmoid(scores), [np.repeat(each, weights) for each in (scores, labels)]
    assert area_under_curve(scores, labels, weights) == pytest.approx(area_under_curve(*many))
    assert log_loss(p, labels, weights) == pytest.approx(log_loss(sigmoid(many[0]), many[1]))
    assert mean_of(labels, weights) == pytest.approx(many[1].mean())
    assert calibration_error(p, labels, 1, weights) == pytest.approx(calibration_error(sigmoid(many[0]), many[1], 1))
    assert calibration_error(p, labels, 5, np.full(len(p), 2.0)) == pytest.approx(calibration_error(p, labels, 5, np.full(len(p), 0.5)))
    found = reliability(p, labels, 4, weights)
    assert sum(weight for *_, weight in found) == pytest.approx(weights.sum()) and (np.diff([mean for mean, *_ in found]) > -1e-12).all()


def test_fit_choice_and_error_go_by_the_same_weights() -> None:
    """A tenth of the examples follows a curve of its own and counts a hundred times: what is fitted and chosen is right for it, and the error by the same weights says so."""
    (logits, labels), rng = drawn(4), np.random.default_rng(6)
    few = rng.random(len(logits)) < 0.1
    labels = np.where(few, rng.random(len(logits)) < np.where(logits > 0, 0.6, 0.1), labels)  # a step, which no line is like
    weights = np.where(few, 100.0, 1.0)
    plain, weighed = fit_calibration(logits, labels), fit_calibration(logits, labels, weights_X=weights)
    assert calibration_error(weighed(logits), labels, weights_X=weights) < 0.02 < calibration_error(weighed(logits), labels)
    assert calibration_error(plain(logits), labels) < 0.04 < calibration_error(plain(logits), labels, weights_X=weights)
    # Chosen by weights: the many, whose line the first one is, do not outvote the few.
    line, steps = (fit_calibration(logits, labels, method, weights_X=weights) for method in ("platt", "isotonic"))
    assert log_loss(steps(logits), labels, weights) < log_loss(line(logits), labels, weights) and weighed.as_dict()["kind"] == "isotonic"


def test_errors_and_bins() -> None:
    p, y = np.array([0.2] * 50 + [0.8] * 50), np.array([0] * 40 + [1] * 10 + [0] * 30 + [1] * 20)
    assert calibration_error(p, y, 2) == pytest.approx(0.2) and [count for *_, count in reliability(p, y, 2)] == [50, 50]
    assert calibration_error(np.zeros(0), np.zeros(0)) == 0 == log_loss(np.zeros(0), np.zeros(0)) and np.isnan(area_under_curve(p, np.ones(100)))
    assert fit_calibration(p, np.ones(100)) == Platt()
    with pytest.raises(ValueError, match="give one of auto, platt"):
        fit_calibration(p, y, "magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has diverged"):
        fit_calibration(np.array([np.nan]), np.ones(1))
    with pytest.raises(ValueError, match="one label for each logit"):
        fit_calibration(p, y[:3])
