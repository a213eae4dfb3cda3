import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .sorted_lists import best_by_heap, best_by_threshold


def everything(before, lists, width):
    """Sort all candidates: scores, beams, places."""
    entries = [(-(before[b].item() + float(x)), b, p) for b, row in enumerate(lists.tolist()) for p, x in enumerate(row)]
    entries = sorted(entries)[:width]
    return [-e[0] for e in entries], [e[1] for e in entries], [e[2] for e in entries]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    beams=st.integers(1, 12),
    length=st.integers(0, 20),
    width=st.integers(1, 60),
    probe=st.integers(1, 9),
    rounded=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_both_equal_a_sort_of_everything(seed, beams, length, width, probe, rounded, spread):
    rng = np.random.default_rng(seed)
    lists = torch.from_numpy(rng.normal(size=(beams, length)) * spread).float().sort(1, descending=True).values
    before = torch.from_numpy(-rng.exponential(2.0, beams))
    if rounded:  # many ties
        lists, before = lists.round(), before.round()
    expected = everything(before, lists, width)
    for chosen in (best_by_heap(before, lists, width), best_by_threshold(before, lists, width, probe)):
        assert chosen.scores_N.tolist() == expected[0]
        assert chosen.beams_N.tolist() == expected[1]
        assert chosen.places_N.tolist() == expected[2]
        assert chosen.visited <= beams * length


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_wide_beams_look_at_a_few_percent(spread):
    generator = torch.Generator().manual_seed(0)
    lists = torch.log_softmax(torch.randn(256, 256, generator=generator) * spread, 1).sort(1, descending=True).values
    before = -torch.rand(256, generator=generator, dtype=torch.float64) * 4
    assert best_by_heap(before, lists, 256).visited < 0.03 * lists.numel()
    assert best_by_threshold(before, lists, 256, probe=4).visited < 0.03 * lists.numel()


def test_wrong_arguments_are_refused():
    lists, before = torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64)
    for function in (best_by_heap, best_by_threshold):
        with pytest.raises(ValueError, match="width is 0"):
            function(before, lists, 0)
        with pytest.raises(ValueError, match="one sorted list per beam"):
            function(before[:1], lists, 1)
    with pytest.raises(ValueError, match="probe is 0"):
        best_by_threshold(before, lists, 1, probe=0)
