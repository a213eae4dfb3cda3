import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.kernels.short_convolution import last_inputs, short_convolution


def inputs(lengths, channels=3, taps=4, before=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(lengths))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    return draw(sum(lengths), channels), draw(channels, taps), offsets, draw(len(lengths), taps - 1, channels) if before else None


def results(function, x, weight, offsets, before):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, before)]
    y = function(leaves[0], leaves[1], offsets, leaves[2])
    (y * torch.arange(y.numel(), dtype=torch.float64).view(y.shape).sin().to(y.dtype)).sum().backward()
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves if t is not None)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from([1, 3, 16, 37]), st.integers(1, 5), st.booleans())
def test_values_and_gradients_are_those_of_the_reference(lengths, channels, taps, before):
    tensors = inputs(lengths, channels, taps, before)
    for found, expected in zip(results(short_convolution, *tensors), results(short_convolution.reference, *tensors), strict=True):
        torch.testing.assert_close(found, expected)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from([1, 3, 16, 37, 64, 70, 140]), st.integers(1, 5), st.booleans())
def test_every_instruction_set_gives_the_values_and_gradients_of_the_reference(instructions, lengths, channels, taps, before):
    tensors = inputs(lengths, channels, taps, before, torch.float32)
    exact = [x if x is None or not x.is_floating_point() else x.double() for x in tensors]
    for found, expected in zip(results(short_convolution, *tensors), results(short_convolution.reference, *exact), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_bit_and_views_are_read_where_they_lie(instructions):
    x, weight, offsets, before = (t.detach() for t in inputs([40, 0, 3], 200, dtype=torch.float32))
    wide = torch.cat([x, x], 1)
    count, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [results(short_convolution, y, weight, offsets, before) for y in (x, wide[:, 200:])]
    finally:
        torch.set_num_threads(count)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_gradcheck_of_the_reference() -> None:
    x, weight, offsets, before = inputs([3, 0, 5])
    assert torch.autograd.gradcheck(lambda *leaves: short_convolution.reference(leaves[0], leaves[1], offsets, leaves[2]), (x, weight, before))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), st.integers(2, 5))
def test_a_sequence_goes_on_from_its_last_inputs(parts, taps):
    x, weight, offsets, before = inputs([a + b for a, b in parts], taps=taps)
    whole = short_convolution(x, weight, offsets, before)
    firsts = torch.cat([torch.arange(begin, begin + a) for begin, (a, _) in zip(offsets.tolist(), parts, strict=False)])
    rest = torch.ones(len(x), dtype=torch.bool).index_fill(0, firsts, False).nonzero().squeeze(1)
    cut, later = (torch.tensor([0, *itertools.accumulate(part[i] for part in parts)]) for i in (0, 1))
    kept = last_inputs(x[firsts], cut, before)
    found = torch.cat([short_convolution(x[firsts], weight, cut, before), short_convolution(x[rest], weight, later, kept)])
    torch.testing.assert_close(found[torch.cat([firsts, rest]).argsort()], whole)
    torch.testing.assert_close(last_inputs(x[rest], later, kept), last_inputs(x, offsets, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_a_number_stays_in_its_sequence(dtype: torch.dtype) -> None:
    x, weight, offsets, _ = inputs([4, 5], before=False, dtype=dtype)
    expected = results(short_convolution, x, weight, offsets, None)
    with torch.no_grad():
        x[3] = math.nan
    found = results(short_convolution, x, weight, offsets, None)
    for place in (0, 1):
        torch.testing.assert_close(found[place][4:], expected[place][4:])
    assert bool(found[0][3].isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    x, weight, offsets, before = inputs([3])
    for wrong in ((x[:, :2], weight, offsets, before), (x, weight[:, :0], offsets, None), (x, weight, offsets, before[:, :2])):
        for function in (short_convolution, short_convolution.reference):
            with pytest.raises(ValueError, match="taps"):
                function(*wrong)
    with pytest.raises(ValueError, match="offsets"):
        short_convolution(x, weight, offsets + 1, before)
