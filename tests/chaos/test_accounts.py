"""What shakes a stack has to count right before its figures say anything."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .ledger import balance, histories_that_differ

EVENTS = [(f"u{n % 3}", f"i{n}", n, "click") for n in range(12)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports one of the scripts here, which import each other by their names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 3))
def test_every_event_is_accounted_for(times: list[int], strange: int) -> None:
    stored = [event for event, count in zip(EVENTS, times, strict=True) for _ in range(count)]
    found = balance(EVENTS, [*stored, *[("u", "x", 99 + n, "click") for n in range(strange)]])
    assert found.accepted == 12 and found.lost == times.count(0) and found.strange == strange
    assert found.doubled == sum(max(0, count - 1) for count in times)


def test_a_history_that_lost_or_doubled_something_is_found() -> None:
    right = {user: [(item, time, action) for name, item, time, action in EVENTS if name == user][-3:] for user in ("u0", "u1", "u2")}
    assert histories_that_differ(EVENTS, right, 3) == []
    lost, doubled = {**right, "u0": right["u0"][1:]}, {**right, "u1": [right["u1"][1], *right["u1"][1:]]}
    assert "1 missing" in histories_that_differ(EVENTS, lost, 3)[0] and "1 twice" in histories_that_differ(EVENTS, doubled, 3)[0]
    seen = ("u0", "i9", 100, "exposure")
    assert histories_that_differ([*EVENTS, seen], right, 3) == []


def test_a_run_follows_from_seed_and_number(module: Any) -> None:
    faults = module("faults")
    cards = faults.deck(7)
    assert cards == faults.deck(7) != faults.deck(8)
    assert set(cards) == set(faults.KINDS) and len(cards) == sum(weight for weight, _ in faults.KINDS.values())
    for _, make in faults.KINDS.values():
        assert isinstance(make(), faults.Fault)


def test_damage_is_mended_to_the_byte(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    damage = module("faults").Damage(path, random.Random(1))
    assert path.read_bytes() != bytes(range(200)) and path.stat().st_size == 200
    damage.mend()
    assert path.read_bytes() == bytes(range(200))


def test_the_time_of_day_can_be_set_for_one_process_and_nobody_else(module: Any, tmp_path: Path) -> None:
    clock = module("clock").Clock(tmp_path)
    if clock.missing:
        pytest.skip(clock.missing)
    said = "import time; print(int(time.time()), int(time.monotonic()))"
    clock.set(-86_400)
    shifted = subprocess.run([sys.executable, "-c", said], env={**os.environ, **clock.environment}, capture_output=True, text=True, check=True).stdout.split()
    plain = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.split()
    assert 86_000 < int(plain[0]) - int(shifted[0]) < 90_000 and abs(int(plain[1]) - int(shifted[1])) < 3_600


def test_a_slope_is_that_of_the_line(module: Any) -> None:
    slope = module("soak").slope
    times = [float(second) for second in range(0, 3600, 10)]
    grows = slope(times, [100 + 10 * second / 3600 for second in times])
    assert grows.percent_an_hour == pytest.approx(10 / (100 + 10 * 0.625) * 100, rel=1e-2) and not grows.flat
    chance = random.Random(2)
    assert slope(times, [100 + chance.gauss(0, 1) for _ in times]).flat
    # What grows while the run is young does not count.
    assert slope(times, [min(100.0, second / 9) for second in times]).flat
