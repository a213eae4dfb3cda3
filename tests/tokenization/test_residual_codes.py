from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.errors import BadData
from semantide.shared.models.residual_codes import ResidualCodes

RANDOM = np.random.default_rng(0)
CODES = ResidualCodes(tuple((RANDOM.normal(size=(size, 5)) / (1 + level)).astype(np.float32) for level, size in enumerate((3, 4, 4))))
ALL = np.array(list(product(range(3), range(4), range(4))))


def test_the_nearest_code_of_a_codeword_is_itself() -> None:
    separate = ResidualCodes((np.eye(5, dtype=np.float32) * 100, np.eye(5, dtype=np.float32)))
    codes = np.array(list(product(range(5), range(5))))
    assert np.array_equal(separate.nearest(separate.decode(codes)), codes)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 47), st.integers(0, 47), st.booleans(), st.integers(0, 1000))
def test_placed_ids_are_free_and_distinct(num_taken: int, num_new: int, optimal: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    taken = ALL[random.permutation(48)[:num_taken]]
    vectors = random.normal(size=(num_new, 5)).astype(np.float32)
    if num_taken + num_new > CODES.capacity:
        with pytest.raises(BadData, match="spell only 48"):
            CODES.place(vectors, taken, optimal=optimal)
        return
    placed = CODES.place(vectors, taken, optimal=optimal)
    everything = {tuple(code) for code in np.concatenate([taken, placed]).tolist()}
    assert len(everything) == num_taken + num_new
    assert np.array_equal(placed, CODES.place(vectors, taken, optimal=optimal))


def test_all_ids_can_be_given_out() -> None:
    placed = CODES.place(RANDOM.normal(size=(48, 5)).astype(np.float32))
    assert np.array_equal(np.unique(placed, axis=0), ALL)


def test_optimal_is_no_worse_than_greedy_within_a_prefix() -> None:
    codes = ResidualCodes((np.zeros((1, 5), np.float32), RANDOM.normal(size=(24, 5)).astype(np.float32)))
    vectors = RANDOM.normal(size=(20, 5)).astype(np.float32)
    cost = {kind: ((codes.decode(codes.place(vectors, optimal=kind)) - vectors) ** 2).sum() for kind in (True, False)}
    assert cost[True] <= cost[False] + 1e-4


def test_who_would_lose_most_keeps_the_code() -> None:
    codes = ResidualCodes((np.zeros((2, 1), np.float32), np.array([[0.0], [1.0], [10.0]], np.float32)))
    placed = codes.place(np.array([[0.4], [-5.0]], np.float32), optimal=False)
    assert placed[:, 1].tolist() == [1, 0]


def test_a_full_prefix_spills_to_the_next_nearest() -> None:
    codes = ResidualCodes((np.array([[0.0], [10.0], [100.0]], np.float32), np.zeros((2, 1), np.float32)))
    placed = codes.place(np.array([[0.0], [1.0], [2.0], [3.0], [4.0]], np.float32))
    assert np.bincount(placed[:, 0]).tolist() == [2, 2, 1]
