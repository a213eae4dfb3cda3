import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.kernels.beam_convolution import beam_convolution
from semantide.kernels.short_convolution import short_convolution


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 12), st.sampled_from([1, 3, 16, 37]), st.integers(0, 99))
def test_each_beam_sees_what_a_sequence_of_its_tokens_sees(instructions, taps, prompts, nodes, channels, seed) -> None:
    """A tree in one call, and the same tree depth by depth: nodes of every depth behind prompts of every length."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, taps, generator=random)
    inputs = [torch.randn(length, channels, generator=random) for length in prompts]
    before = torch.stack([torch.cat([torch.zeros(taps - 1, channels), x])[len(x) :] for x in inputs])
    x = torch.randn(nodes, channels, generator=random)
    requests = torch.randint(len(prompts), (nodes,), generator=random)
    paths: list[list[int]] = []
    for node in range(nodes):
        candidates = [[], *(path for path in paths if requests[path[-1]] == requests[node])]
        paths.append([*candidates[int(torch.randint(len(candidates), (1,), generator=random))], node])
    depth = max(map(len, paths), default=1)
    rows = torch.tensor([[-1] * (depth - len(path)) + path for path in paths], dtype=torch.long).view(nodes, depth)
    expected = torch.stack(
        [torch.zeros(channels)]
        + [short_convolution(all_x := torch.cat([inputs[requests[path[-1]]], x[path]]), weight, torch.tensor([0, len(all_x)]))[-1] for path in paths]
    )[1:]
    for function in (beam_convolution, beam_convolution.reference):
        own = torch.full((nodes, channels), torch.nan)
        torch.testing.assert_close(function(x, weight, before, requests, own, rows), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(own, x)
        own = torch.full((nodes, channels), torch.nan)
        for level in range(1, depth + 1):
            chosen = torch.tensor([node for node, path in enumerate(paths) if len(path) == level], dtype=torch.long)
            y = function(x[chosen], weight, before, requests[chosen], own, rows[chosen][:, depth - level :])
            torch.testing.assert_close(y, expected[chosen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_kept_may_be_shorter(instructions, dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, before = torch.randn(5, 21, generator=random), torch.randn(21, 4, generator=random), torch.randn(1, 3, 21, generator=random)
    rows = torch.tensor([[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [-1, 0, 3], [0, 3, 4]])
    answers = []
    for function in (beam_convolution, beam_convolution.reference):
        own = torch.zeros(5, 21, dtype=dtype)
        answers.append(function(x, weight, before, torch.zeros(5, dtype=torch.long), own, rows))
        assert torch.equal(own, x.to(dtype))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_what_nobody_follows_is_not_kept(instructions) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, before = torch.randn(4, 21, generator=random), torch.randn(21, 4, generator=random), torch.randn(1, 3, 21, generator=random)
    rows = torch.tensor([[-1, -1, 0], [-1, 0, 1], [0, 1, -1], [-1, -1, -1]])
    expected = beam_convolution(
        x, weight, before, torch.zeros(4, dtype=torch.long), torch.zeros(4, 21), torch.tensor([[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [-1, -1, 3]])
    )
    for function in (beam_convolution, beam_convolution.reference):
        own = torch.full((2, 21), torch.nan)
        torch.testing.assert_close(function(x, weight, before, torch.zeros(4, dtype=torch.long), own, rows), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(own, x[:2])


def test_rows_and_requests_that_do_not_exist_are_refused(instructions) -> None:
    zeros = torch.zeros
    for requests, rows in (([0, 1], [[0], [1]]), ([-1, 0], [[0], [1]]), ([0, 0], [[0], [2]]), ([0, 0], [[0, -1, 0], [-1, 0, 1]])):
        with pytest.raises(ValueError, match="name what is there"):
            beam_convolution(zeros(2, 3), zeros(3, 4), zeros(1, 3, 3), torch.tensor(requests), zeros(2, 3), torch.tensor(rows))


def test_wrong_shapes_are_refused() -> None:
    zeros = torch.zeros
    right = [zeros(2, 3), zeros(3, 4), zeros(1, 3, 3), zeros(2, dtype=torch.long), zeros(2, 3), torch.arange(2)[:, None]]
    beam_convolution(*right)
    for place, wrong in ((0, zeros(2, 4)), (1, zeros(3, 5)), (2, zeros(1, 3, 2)), (4, zeros(2, 2)), (5, torch.arange(3)[:, None])):
        with pytest.raises(ValueError, match="one list of rows per beam"):
            beam_convolution(*right[:place], wrong, *right[place + 1 :])
