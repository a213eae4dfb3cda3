import pytest
import torch

from semantide.kernels.dropout import dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_and_the_mean_are_right_and_gradients_pass_where_values_do(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(200_003, requires_grad=True)
    y = dropout(x, rate, True)
    assert abs((y == 0).float().mean().item() - rate) < 0.005
    assert abs(y.mean().item() - 1) < 0.03
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]


def test_it_follows_the_seed_and_rests_outside_training() -> None:
    x = torch.ones(1001)
    torch.manual_seed(3)
    one = dropout(x, 0.3, True)
    state = torch.get_rng_state()
    two = dropout(x, 0.3, True)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x, 0.3, True), two)
    assert not torch.equal(one, two)
    assert dropout(x, 0.3, False) is x
    assert dropout(x[:0], 0.3, True).shape == (0,)
