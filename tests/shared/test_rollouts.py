"""Rollouts and scores come back as they were written, and contradictions are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.errors import Corrupt
from semantide.shared.rollouts import NO_ITEM, Rollouts, Scores, rollouts_of


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=5), st.integers(1, 4), st.integers(0, 100))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, histories: list[list[int]], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = rng.integers(NO_ITEM, 100, (len(histories), size))
    rows = [np.array(history, dtype=np.int64) for history in histories]
    times = [history * 1000 for history in rows]
    rollouts = rollouts_of("datasets/sha256-0", range(len(rows)), rows, times, items, [history % 2 for history in rows], ("click", "like"))
    folder = tmp_path_factory.mktemp("rollouts")
    rollouts.save(folder)
    back = Rollouts.load(folder)
    assert (back.dataset, back.actions, back.group_size, len(back)) == ("datasets/sha256-0", ("click", "like"), size, len(rows))
    assert all(np.array_equal(back.history(group), history) for group, history in enumerate(rows))
    assert np.array_equal(back.items_BG, items) and np.array_equal(back.times_E, rollouts.times_E) and np.array_equal(back.actions_E, rollouts.actions_E)
    scores = Scores(rng.random(items.shape, dtype=np.float32), rng.random(items.shape, dtype=np.float32), items > 50, items >= 0)
    scores.save(folder)
    again = Scores.load(folder)
    assert np.array_equal(again.preference_BG, scores.preference_BG) and np.array_equal(again.gate_BG, scores.gate_BG)


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="give each group one user"):
        Rollouts("d", one, np.array([0, 1, 1]), one, one, one, np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="do not cover 1 events"):
        Rollouts("d", one, np.array([0, 2]), one, one, one, np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="0 times and 1 actions"):
        Rollouts("d", one, np.array([0, 1]), one, one[:0], one, np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="same groups and items"):
        Scores(np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32), np.zeros((1, 2), bool), np.zeros((1, 2), bool))
    (tmp_path / "rollouts.json").write_text("{}")
    for kind in (Rollouts, Scores):
        with pytest.raises(Corrupt, match="again"):
            kind.load(tmp_path)
