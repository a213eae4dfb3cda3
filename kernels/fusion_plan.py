"""What jagged fused attention is given beside the tensors that have gradients, for every device alike.

Legend: T packed tokens, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

FORMS = {"silu": 0, "softmax": 1, "bias": 2}
"""Their numbers in the C++ and Triton kernels."""


@dataclass(frozen=True)
class FusionPlan:
    """One call. ``bounds`` are the least differences of time of bucket 1, 2, ...; no ``scale`` is one over the length.

    Shapes: ``offsets_B1`` int64, contiguous; ``times_T`` int64.
    """

    offsets_B1: Tensor
    times_T: Tensor | None
    bounds: tuple[int, ...]
    form: Literal["silu", "softmax", "bias"]
    scale: float | None
    heads: int
