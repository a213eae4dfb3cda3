import pytest
import torch

from semantide.kernels.dispatch import kernel


def test_the_reference_runs_where_nothing_is_registered_and_the_registered_one_where_it_is() -> None:
    @kernel
    def double(scale: float, x: torch.Tensor) -> str:
        """Say who ran."""
        return "reference"

    @double.register("meta")
    def _(scale: float, x: torch.Tensor) -> str:
        return "meta"

    assert double(2.0, torch.ones(1)) == "reference"
    assert double(2.0, x=torch.ones(1, device="meta")) == "meta"
    assert double.reference(2.0, torch.ones(1, device="meta")) == "reference"
    assert set(double.registry) == {"meta"}
    assert double.__doc__ == "Say who ran."
    with pytest.raises(ValueError, match="no tensor"):
        double(1.0, 2.0)  # type: ignore[arg-type]
