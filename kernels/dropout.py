"""Dropout that draws eight random bytes at a time, since drawing numbers costs a CPU more than the layers they regularise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.dispatch import kernel


@kernel
def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zero a share of the values and scale up the rest; nothing happens outside training."""
    return F.dropout(x, rate, training)


@dropout.register("cpu")
def dropout_bytes(x: Tensor, rate: float, training: bool) -> Tensor:
    """One random byte per value: the rate is rounded to a multiple of 1/256, and the scale fits the rounded rate."""
    steps = round(rate * 256)
    if not training or steps == 0 or not x.numel():
        return x
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= steps
    return x * keep.to(x.dtype).mul_(256 / (256 - steps))
