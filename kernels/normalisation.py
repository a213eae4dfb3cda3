"""Division of each row by its root mean square.

Legend: D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native
from semantide.kernels.dispatch import kernel


@kernel
def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of the last dimension divided by its root mean square, times a factor per feature; computed in float32 for shorter types.

    Shapes: [..., D], [D] -> [..., D].
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normal = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight_D * normal.to(x.dtype)


@rms_norm.register("cpu")
def rms_norm_cpu(x: Tensor, weight_D: Tensor, eps: float = 1e-6) -> Tensor:
    """The same in C++, or where a gradient is asked for with a backward pass of its own: about half the passes over memory."""
    if weight_D.shape != x.shape[-1:]:
        raise ValueError(f"factors {tuple(weight_D.shape)} for rows of {tuple(x.shape)}: give one factor for each feature")
    library = native.library_for(x, weight_D)
    if library is not None:
        rows, size = x.numel() // max(x.shape[-1], 1), x.shape[-1]
        # Rows may lie apart, as a part of each row of something wider does.
        x, weight_D = x if x.ndim == 2 and x.stride(1) == 1 else x.contiguous(), weight_D.contiguous()
        out = x.new_empty(x.shape)
        apart = x.stride(0) if x.ndim == 2 else size
        native.call(library, "semantide_normalise_rows", native.NORMALISE_ROWS.pack(rows, size, apart, x.data_ptr(), weight_D.data_ptr(), out.data_ptr(), eps))
        return out
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != weight_D.dtype:
        return rms_norm.reference(x, weight_D, eps)
    y: Tensor = _RmsNorm.apply(x, weight_D, eps)
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight_D)
        y: Tensor = normal * weight_D
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, scale, weight_D = ctx.saved_tensors
        weighted = grad * normal
        inner = (weighted @ weight_D).unsqueeze(-1).div_(normal.shape[-1])
        return torch.addcmul(grad * weight_D, normal, inner, value=-1).mul_(scale), weighted.flatten(0, -2).sum(0), None
