import pytest
import torch

from semantide.kernels.normalisation import rms_norm


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 4, 6)])
def test_device_functions_equal_the_reference_in_values_and_gradients(shape: tuple[int, ...]) -> None:
    for function in rms_norm.registry.values():
        results = []
        for norm in (rms_norm.reference, function):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
            weight = torch.linspace(0.5, 2, shape[-1], dtype=torch.float64).requires_grad_()
            y = norm(x, weight, 1e-6)
            (y * y.detach().cos()).sum().backward()
            results.append((y, x.grad, weight.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_gradcheck() -> None:
    inputs = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.rand(4, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(rms_norm.reference, inputs)
    assert torch.autograd.gradcheck(rms_norm, inputs)


def test_a_row_of_zeros_stays_finite_and_short_types_are_computed_wide() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    rms_norm(x, torch.ones(4)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    big = torch.full((1, 4), 300.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(big, torch.ones(4, dtype=torch.float16)), torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 4, 16), (70, 33), (300, 256)])
def test_rows_without_gradients_equal_the_reference_too(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(0.5, 2, shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))
    apart = torch.stack([x, x + 1], -2)[..., 0, :]
    torch.testing.assert_close(rms_norm(apart, weight), rms_norm.reference(x, weight))
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    torch.testing.assert_close(rms_norm(turned, weight), rms_norm.reference(x, weight))
