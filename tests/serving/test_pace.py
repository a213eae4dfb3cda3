import random

import pytest

from semantide.services.serving.pace import Pace


def test_learns_the_fixed_part_and_the_part_of_each_row():
    rng, pace = random.Random(0), Pace()
    for _ in range(500):
        rows = rng.choice([10, 50, 200, 1000])
        pace.learn(rows, 0.004 + rows * 3e-5)
    assert pace.row_seconds == pytest.approx(3e-5, rel=0.05)
    assert pace.seconds(2000, 3) == pytest.approx(3 * 0.004 + 2000 * 3e-5, rel=0.1)


def test_follows_a_change_and_stays_sane_where_rounds_are_all_alike():
    pace = Pace()
    assert pace.seconds(100, 1) > 0
    for _ in range(50):
        pace.learn(10, 0.005)
    assert pace.seconds(10, 1) == pytest.approx(0.005, rel=0.01)
    assert 0 <= pace.row_seconds <= 0.0005
    for _ in range(200):
        pace.learn(10, 0.05)
    assert pace.seconds(10, 1) == pytest.approx(0.05, rel=0.05)
