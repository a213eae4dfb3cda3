import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.load_balancing import CostModel, StepTimes, assign, imbalance
from semantide.services.training.world import World

lengths_of = st.lists(st.integers(1, 300), max_size=60).map(lambda values: np.array(values, dtype=np.int64))


@given(lengths_of, st.integers(1, 9), st.sampled_from([0.0, 0.001, 0.3]))
def test_every_piece_has_one_rank_and_no_rank_has_more_than_the_bound_of_the_rule(lengths, ranks, alpha) -> None:  # type: ignore[no-untyped-def]
    costs = CostModel(alpha).costs(lengths)
    parts = assign(costs, ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    if len(lengths):
        # Graham: at most 4/3 - 1/(3R) of the best; the best is at least the mean and at least the dearest piece.
        least = max(costs.sum() / ranks, costs.max())
        if len(lengths) > ranks:
            least = max(least, np.sort(costs)[-ranks - 1] + np.sort(costs)[-ranks])
        assert max(costs[part].sum() for part in parts) <= least * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@given(lengths_of, st.integers(1, 9))
def test_the_order_of_equal_pieces_does_not_matter_to_the_loads(lengths, ranks) -> None:  # type: ignore[no-untyped-def]
    costs = CostModel(0.01).costs(lengths)
    loads, reversed_loads = (sorted(costs_[part].sum() for part in assign(costs_, ranks)) for costs_ in (costs, costs[::-1]))
    assert loads == pytest.approx(reversed_loads)


def test_skewed_lengths_are_shared_out_evenly() -> None:
    rng = np.random.default_rng(0)
    for ranks in (8, 32, 128):
        costs = CostModel(1 / 6144).costs((400 * rng.lognormal(0, 0.8, 32 * ranks)).astype(np.int64).clip(1, 4096))
        assert imbalance(costs, assign(costs, ranks)) < 2e-3 < 0.1 < imbalance(costs, np.array_split(np.arange(len(costs)), ranks))


def test_ranks_without_pieces_and_wrong_numbers() -> None:
    assert [part.tolist() for part in assign(np.array([5.0]), 3)] == [[0], [], []]
    assert [part.tolist() for part in assign(np.zeros(0), 2)] == [[], []]
    assert imbalance(np.zeros(0), [np.zeros(0, np.int64)] * 2) == 0
    with pytest.raises(ValueError, match="0 ranks"):
        assign(np.ones(2), 0)
    with pytest.raises(ValueError, match="alpha is -1"):
        CostModel(-1)


@settings(derandomize=True, deadline=None)
@given(st.floats(1e-5, 1e-2), st.floats(1e-7, 1e-5), st.floats(0, 1), st.integers(0, 1000))
def test_a_fit_finds_the_costs_that_made_the_times(alpha: float, per_item: float, fixed: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 1000, rng.integers(2, 40)) for _ in range(60)]
    items, squares = (np.array([float((length**power).sum()) for length in lengths]) for power in (1, 2))
    seconds = fixed * 0.001 + per_item * (items + alpha * squares)
    disturbed = seconds * np.where(rng.random(60) < 0.1, 3.0, 1.0)  # something else ran on the machine
    found = CostModel(0.0).fitted(items, squares, disturbed)
    # What balancing needs: how much dearer a long history is than a short one. A disturbed run cannot tell the last percents of alpha.
    ends = np.array([50, 1000])
    dearer, true = (model.costs(ends)[1] / model.costs(ends)[0] for model in (found, CostModel(alpha)))
    assert dearer == pytest.approx(true, rel=0.2)


def test_a_fit_without_evidence_leaves_the_model_as_it_is() -> None:
    model, same = CostModel(0.25), np.full(20, 8.0)
    assert model.fitted(same[:3], same[:3], same[:3]) is model  # too few
    assert model.fitted(same, same * 8, same) is model  # one length: items and squares cannot be told apart
    assert model.fitted(same, same, np.zeros(20)) is model  # no clock
    times = StepTimes(most=2)
    assert times.wanted and times.fit(World.single(), model) is model
