import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.narrowing import SHARES, Narrowing, narrowed_width


def test_steps_down_with_the_wait_and_up_again_with_some_delay():
    narrowing = Narrowing(0.1)
    waits = [0.05, 0.1, 0.11, 0.09, 0.06, 0.04, 0.25, 5.0, 0.3, 0.1, 0.01]
    assert [narrowing.decide(wait) for wait in waits] == [1, 1, 0.75, 0.75, 0.75, 1, 0.5, 0.25, 0.25, 0.5, 1]


@given(st.lists(st.floats(0, 100), min_size=1))
def test_the_share_is_one_of_the_steps_and_whole_at_rest(waits):
    narrowing = Narrowing(0.2)
    for wait in waits:
        assert narrowing.decide(wait) in SHARES
    assert narrowing.decide(0.0) == 1.0 == narrowing.share
    assert Narrowing(0).decide(max(waits)) == 1.0


@given(st.integers(1, 5000), st.integers(1, 1000), st.sampled_from(SHARES))
def test_never_fewer_than_n_beams_nor_more_than_asked_for(width, n, share):
    narrowed = narrowed_width(width, n, share)
    assert min(n, width) <= narrowed <= width and narrowed >= width * share
    assert narrowed_width(width, n, 1.0) == width


def test_a_negative_wait_is_refused():
    with pytest.raises(ValueError, match="wait_seconds is -1"):
        Narrowing(-1)
