import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels.beam_convolution import beam_convolution
from semantide.kernels.short_convolution import short_convolution


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 12), st.sampled_from([1, 3, 16, 37]), st.integers(0, 99))
def test_each_beam_sees_what_a_sequence_of_its_tokens_sees(taps: int, prompts: list[int], nodes: int, channels: int, seed: int) -> None:
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


def test_wrong_shapes_are_refused() -> None:
    zeros = torch.zeros
    right = [zeros(2, 3), zeros(3, 4), zeros(1, 3, 3), zeros(2, dtype=torch.long), zeros(2, 3), torch.arange(2)[:, None]]
    beam_convolution(*right)
    for place, wrong in ((0, zeros(2, 4)), (1, zeros(3, 5)), (2, zeros(1, 3, 2)), (4, zeros(2, 2)), (5, torch.arange(3)[:, None])):
        with pytest.raises(ValueError, match="one list of rows per beam"):
            beam_convolution(*right[:place], wrong, *right[place + 1 :])
