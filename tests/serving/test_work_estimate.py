"""What requests take is learned from what they took."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.serving.work_estimate import WorkEstimate

rates = st.tuples(*[st.floats(0.001, 0.1)] * 3)


def lived(seconds: object, count: int, seed: int = 0, noise: float = 0.0) -> WorkEstimate:
    """An estimate after ``count`` requests that took ``seconds(beams, items, known)``."""
    draw, estimate = random.Random(seed), WorkEstimate()
    for _ in range(count):
        beams, items, known = draw.choice((10, 50, 500)), draw.randint(0, 600), draw.random() < 0.5
        estimate.saw(beams, items, seconds(beams, items, known) * (1 + noise * draw.uniform(-1, 1)), known=known)  # type: ignore[operator]
    return estimate


@given(rates, st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_it_finds_the_rates_by_which_requests_take_their_time(found: tuple[float, float, float], seed: int) -> None:
    own, per_beam, per_item = found

    def seconds(beams: float, items: float, known: bool) -> float:
        return own + per_beam * beams / 50 + per_item * items / 200 * (0.1 if known else 1.0)

    estimate = lived(seconds, 640, seed, noise=0.3)
    for beams, items, known in ((10, 0, True), (50, 300, False), (500, 600, False), (50, 300, True)):
        assert estimate.seconds(beams, items, known=known) == pytest.approx(seconds(beams, items, known), rel=0.25, abs=0.004)


@given(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 10_000), st.floats(0, 100), st.booleans()), max_size=120))
@settings(max_examples=30, deadline=None)
def test_whatever_was_seen_an_estimate_is_a_time(seen: list[tuple[int, int, float, bool]]) -> None:
    estimate = WorkEstimate()
    for beams, items, seconds, known in seen:
        estimate.saw(beams, items, seconds, known=known)
        assert 0 < estimate.seconds(beams, items, known=known) < 1e9


def test_an_unhurried_request_now_and_then_changes_little_and_a_lasting_change_is_followed() -> None:
    def usual(beams: float, items: float, known: bool) -> float:
        return 0.02

    estimate = lived(usual, 320)
    before = estimate.seconds(50, 100, known=False)
    estimate.saw(50, 100, 60.0, known=False)
    for _ in range(31):
        estimate.saw(50, 100, 0.02, known=False)
    assert estimate.seconds(50, 100, known=False) < 1.2 * before
    for _ in range(4000):
        estimate.saw(50, 100, 0.06, known=False)
    assert estimate.seconds(50, 100, known=False) == pytest.approx(0.06, rel=0.1)


def test_before_anything_was_seen_more_work_is_more() -> None:
    estimate = WorkEstimate()
    assert estimate.seconds(500, 0, known=True) > estimate.seconds(50, 0, known=True) > 0
    assert estimate.seconds(50, 400, known=False) > estimate.seconds(50, 400, known=True)
