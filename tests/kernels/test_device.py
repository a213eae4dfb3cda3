"""Where models compute."""

from pathlib import Path

import pytest
import torch

from semantide.kernels.device import best_device

SERVICES = Path(__file__).resolve().parents[2] / "services"


@pytest.mark.parametrize(("there", "chosen"), [("cuda", "cuda"), ("npu", "npu"), ("mps", "cpu"), ("", "cpu")])
def test_gpus_and_npus_are_taken_where_there_are_any(there: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        type = there

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(there))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: Found() if there else None)
    assert best_device().type == chosen


def test_every_room_takes_that_device() -> None:
    """A room that asked for CUDA by itself would hold NPUs and compute on the CPU."""
    asking = [path for path in SERVICES.rglob("*.py") if "cuda.is_available" in path.read_text()]
    assert not asking, "take kernels.device.best_device"
