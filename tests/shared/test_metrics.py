import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.metrics import RankingMetrics


def one(row: list[int], targets: list[int], ks: tuple[int, ...] = (1, 2, 5), num_items: int = 10) -> dict[str, float]:
    metrics = RankingMetrics(ks, num_items)
    metrics.add(np.array([row]), [np.array(targets)])
    return metrics.result()


def test_one_target_by_hand() -> None:
    result = one([7, 3, 9, -1, -1], [9])
    assert (result["hr@2"], result["recall@5"], result["coverage@2"], result["coverage@5"]) == (0, 1, 0.2, 0.3)
    assert result["ndcg@5"] == pytest.approx(1 / math.log2(4))
    assert result["mrr@5"] == pytest.approx(1 / 3)
    assert result["short_share"] == 1


def test_several_targets_by_hand() -> None:
    result = one([7, 3, 9, 1, 2], [3, 1, 8])
    assert (result["hr@2"], result["recall@2"], result["recall@5"]) == (1, pytest.approx(1 / 3), pytest.approx(2 / 3))
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert result["ndcg@5"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(5)) / ideal)


@given(st.permutations(range(10)), st.integers(0, 9), st.integers(1, 10))
def test_with_one_target_recall_is_the_hit_rate_and_ndcg_lies_between_mrr_and_it(row: list[int], target: int, k: int) -> None:
    result = one(list(row), [target], (k,))
    rank = list(row).index(target)
    assert result[f"hr@{k}"] == result[f"recall@{k}"] == float(rank < k)
    assert result[f"mrr@{k}"] <= result[f"ndcg@{k}"] <= result[f"hr@{k}"]


def test_repeats_are_counted_and_cases_without_a_target_are_not() -> None:
    metrics = RankingMetrics((2,), 5)
    metrics.add(np.array([[1, 2], [3, 4], [0, 1]]), [np.array([1]), np.array([3]), np.array([], dtype=int)], [np.array([1]), np.array([2]), np.array([4])])
    assert metrics.result()["cases"] == 2
    assert metrics.result()["repeat_share"] == 0.5


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="ks"):
        RankingMetrics((), 5)
    with pytest.raises(ValueError, match="one list per case"):
        RankingMetrics((1,), 5).add(np.array([[1]]), [])
