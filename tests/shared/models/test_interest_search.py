"""The search finds what looking at every event would find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.models import interest_search
from semantide.shared.models.interest_search import search


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 10**6))
def test_the_events_most_like_the_target_in_the_order_of_time(lengths: list[int], num_found: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-2, 3, (7, 3)).astype(np.float32)
    ends = np.cumsum(lengths)
    items = rng.integers(-1, 7, int(ends[-1]) + 1)
    targets = rng.integers(-1, 7, len(lengths))
    found, alike = search(vectors, items, ends - lengths, ends, targets, num_found)
    for row, (begin, end, target) in enumerate(zip(ends - lengths, ends, targets, strict=True)):
        wanted = vectors[target] if target >= 0 else np.zeros(3)
        scores = {place: float(vectors[items[place]] @ wanted) if items[place] >= 0 else 0.0 for place in range(begin, end)}
        best = sorted(sorted(scores, key=lambda place: (scores[place], place))[-num_found:])
        rest = num_found - len(best)
        assert found[row].tolist() == best + [-1] * rest and alike[row].tolist() == pytest.approx([scores[place] for place in best] + [0] * rest)


def test_parts_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 60, 300)
    ends = np.cumsum(lengths)
    vectors, items, targets = rng.normal(size=(50, 8)).astype(np.float32), rng.integers(0, 50, ends[-1]), rng.integers(0, 50, 300)
    whole = search(vectors, items, ends - lengths, ends, targets, 10)
    monkeypatch.setattr(interest_search, "_PRODUCTS", 64)
    parts = search(vectors, items, ends - lengths, ends, targets, 10)
    assert np.array_equal(whole[0], parts[0]) and np.allclose(whole[1], parts[1])
