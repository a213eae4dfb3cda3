"""Rows of items against the policy spelled out item by item."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.models.item_rows import ItemRows, TableGrowth, name_hash

NAMES = [f"item {number}" for number in range(30)]
ITEMS = st.lists(st.sampled_from(NAMES), unique=True, max_size=20)
GROWTH = st.one_of(
    st.just(TableGrowth()),
    st.builds(TableGrowth, st.just("hash"), st.integers(1, 8)),
    st.builds(TableGrowth, st.just("admission"), st.integers(1, 8), st.integers(1, 5)),
)


def reference(growth: TableGrowth, items: list[str], counts: dict[str, int], admitted: set[str]) -> list[int]:
    """Each item's row, one after another."""
    rows, fresh = [], growth.shared_rows
    for item in items:
        if growth.rows == "own" or (growth.rows == "admission" and (counts[item] >= growth.admit_events or item in admitted)):
            rows.append(fresh)
            fresh += 1
        else:
            rows.append(name_hash(item) % growth.shared_rows)
    return rows


@given(GROWTH, ITEMS, st.lists(st.integers(0, 9), min_size=30, max_size=30), st.sets(st.sampled_from(NAMES)))
def test_rows_are_those_of_the_policy_and_collisions_are_counted(growth: TableGrowth, items: list[str], numbers: list[int], admitted: set[str]) -> None:
    counts = dict(zip(NAMES, numbers, strict=True))
    counts_N = np.array([counts[item] for item in items], dtype=np.int64)
    found = ItemRows.of(growth, items, counts_N, sorted(admitted))
    expected = reference(growth, items, counts, admitted)
    assert found.rows_N.tolist() == expected
    assert found.num_rows == growth.shared_rows + int(found.own_N.sum())
    assert all(0 <= row < found.num_rows for row in expected)
    assert len({row for row, own in zip(expected, found.own_N, strict=True) if own}) == found.own_N.sum()
    together = [expected.count(row) > 1 for row in expected]
    figures = found.figures(counts_N)
    assert (figures["rows"], figures["items"], figures["colliding_items"]) == (found.num_rows, len(items), sum(together))
    events = sum(counts_N.tolist())
    assert figures["colliding_events_share"] == pytest.approx(float(counts_N[together].sum()) / events if events else 0.0)
    assert found.plain == (growth.shared_rows == 0)
    assert not found.plain or expected == list(range(len(items)))


@given(ITEMS, ITEMS, st.integers(1, 8), st.integers(1, 5))
def test_an_item_keeps_its_shared_row_and_its_admission_in_another_data_set(first: list[str], second: list[str], shared: int, events: int) -> None:
    growth = TableGrowth("admission", shared, events)
    often = np.array([len(item) % 7 for item in first], dtype=np.int64)
    before = ItemRows.of(growth, first, often)
    admitted = {item for item, own in zip(first, before.own_N, strict=True) if own}
    after = ItemRows.of(growth, second, np.zeros(len(second), dtype=np.int64), admitted)
    assert {item for item, own in zip(second, after.own_N, strict=True) if own} == admitted & set(second)
    shared_row = dict(zip(first, before.rows_N.tolist(), strict=True))
    for item, row in zip(second, after.rows_N.tolist(), strict=True):
        if item in shared_row and item not in admitted:
            assert row == shared_row[item]


def test_names_have_the_same_hash_for_ever() -> None:
    assert name_hash("item 1") == 6144745251313264031
    with pytest.raises(ValueError, match="at least 1 with hash"):
        TableGrowth("hash")
    with pytest.raises(ValueError, match="give 0 with own"):
        TableGrowth("own", 5)
