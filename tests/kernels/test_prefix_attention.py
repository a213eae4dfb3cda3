import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels.attention import jagged_attention
from semantide.kernels.prefix_attention import prefix_attention


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=5), st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 2)]), st.integers(0, 99))
def test_the_last_places_attend_as_in_the_whole_sequence(lengths: list[tuple[int, int]], heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole, new = [old + fresh for old, fresh in lengths], [fresh for _, fresh in lengths]
    offsets = offsets_of(whole)
    q, k, v = (torch.randn(sum(whole), h, 8, generator=generator, dtype=torch.float64) for h in (heads[0], heads[1], heads[1]))
    last = torch.cat([torch.arange(0), *(torch.arange(end - fresh, end) for end, fresh in zip(offsets[1:].tolist(), new, strict=True))])
    expected = jagged_attention(q, k, v, offsets)[last]
    for function in (prefix_attention.reference, *prefix_attention.registry.values()):
        torch.testing.assert_close(function(q[last], offsets_of(new), k, v, offsets), expected)


def test_gradcheck_of_the_reference() -> None:
    q, k, v = (torch.randn(rows, heads, 3, dtype=torch.float64, requires_grad=True) for rows, heads in ((3, 4), (7, 2), (7, 2)))
    assert torch.autograd.gradcheck(lambda q, k, v: prefix_attention.reference(q, offsets_of([1, 2]), k, v, offsets_of([4, 3])), (q, k, v))


@pytest.mark.parametrize(("new", "whole"), [([2], [1]), ([1], [1, 1])])
def test_more_queries_than_keys_are_refused(new: list[int], whole: list[int]) -> None:
    q, k = torch.ones(sum(new), 2, 4), torch.ones(sum(whole), 2, 4)
    for function in (prefix_attention.reference, prefix_attention):
        with pytest.raises(ValueError, match="at most as many queries"):
            function(q, offsets_of(new), k, k, offsets_of(whole))
