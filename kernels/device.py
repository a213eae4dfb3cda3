"""Which of this machine's devices models compute on."""

from __future__ import annotations

import torch

DEVICE_KINDS = ("cuda", "npu")


def best_device() -> torch.device:
    """A GPU or NPU that torch sees here, else the CPU; kinds of accelerators that nobody has tried are left alone."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found if found is not None and found.type in DEVICE_KINDS else torch.device("cpu")
