"""The gate of a feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.dispatch import kernel


@kernel
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``gate`` times its logistic function times ``up``, number by number."""
    return F.silu(gate) * up


@silu_product.register("cpu")
def silu_product_native(gate: Tensor, up: Tensor) -> Tensor:
    """One pass in C++; other types than float32, and gradients, take the torch way."""
    if gate.shape != up.shape:
        raise ValueError(f"gates {tuple(gate.shape)} for {tuple(up.shape)} numbers: give one gate for each")
    library = native.library_for(gate, up)
    if library is None:
        return silu_product.reference(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = gate.new_empty(gate.shape)
    native.call(library, "semantide_gate_rows", native.GATE_ROWS.pack(gate.numel(), gate.data_ptr(), up.data_ptr(), out.data_ptr()))
    return out
