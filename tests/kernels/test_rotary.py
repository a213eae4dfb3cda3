import pytest
import torch

from semantide.kernels.rotary import norm_rotate, rotate


def inputs(rows: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.arange(rows, dtype=torch.float64).view(-1, 1, 1) * torch.linspace(0.1, 1, size // 2, dtype=torch.float64)
    x = torch.randn(rows, heads, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_(), angles.cos(), angles.sin()


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 2), (5, 3, 6)])
def test_device_functions_equal_the_reference_in_values_and_gradients(shape: tuple[int, int, int]) -> None:
    for function in rotate.registry.values():
        results = []
        for turn in (rotate.reference, function):
            x, cos, sin = inputs(*shape)
            y = turn(x, cos, sin)
            (y * y.detach().exp()).sum().backward()
            results.append((y, x.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_gradcheck_and_lengths_stay() -> None:
    x, cos, sin = inputs(4, 2, 6)
    assert torch.autograd.gradcheck(lambda x: rotate.reference(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 2), (5, 3, 6), (4, 2, 32), (130, 8, 40), (3, 2, 128)])
@pytest.mark.parametrize("weighted", [True, False])
def test_normalising_and_turning_at_once_equals_one_after_the_other(shape: tuple[int, int, int], weighted: bool) -> None:
    x, cos, sin = inputs(*shape)
    weight = torch.linspace(0.5, 2, shape[2], dtype=torch.float64).requires_grad_() if weighted else None
    for function in norm_rotate.registry.values():
        results = []
        for turn in (norm_rotate.reference, function):
            x.grad = None
            y = turn(x, weight, cos, sin)
            (y * y.detach().exp()).sum().backward()
            results.append((y, x.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            wide = torch.stack([x, x], 1).float()[:, 0]  # rows with a gap between them
            short = None if weight is None else weight.float()
            torch.testing.assert_close(function(wide, short, cos.float(), sin.float()), results[0][0].float(), rtol=1e-5, atol=1e-5)
