import pytest
import torch

from semantide.kernels.gating import silu_product


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (130, 257)])
def test_device_functions_equal_the_reference(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(shape, generator=generator, dtype=torch.float64) * 8 for _ in range(2))
    for function in silu_product.registry.values():
        torch.testing.assert_close(function(gate.float(), up.float()), silu_product.reference(gate, up).float(), rtol=1e-5, atol=1e-6)
        turned = function(gate.float().transpose(0, -1), up.float().transpose(0, -1))
        torch.testing.assert_close(turned, silu_product.reference(gate, up).float().transpose(0, -1), rtol=1e-5, atol=1e-6)
        assert torch.autograd.gradcheck(function, (gate.flatten()[:4].requires_grad_(), up.flatten()[:4].requires_grad_()))


def test_extreme_gates_and_what_is_not_a_number() -> None:
    gate = torch.tensor([0.0, -0.0, 90.0, -90.0, 3e38, -3e38, torch.inf, torch.nan])
    y = silu_product(gate, torch.ones(8))
    torch.testing.assert_close(y[:-1], torch.tensor([0.0, 0.0, 90.0, 0.0, 3e38, 0.0, torch.inf]), rtol=1e-6, atol=1e-30)
    assert y[-1].isnan()
    odd = torch.tensor([0x7FC00001, -0x3FFFFF] * 40, dtype=torch.int32).view(torch.float32)  # as damaged weights may have them
    assert bool(silu_product(odd, torch.ones(80)).isnan().all())


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one gate for each"):
        silu_product(torch.ones(2), torch.ones(3))
