"""Rotary positions: pairs of features turn by an angle that grows with the position.

Legend: T rows, H heads, d head size; feature i pairs with feature i + d / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels.dispatch import kernel


@kernel
def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Turn each pair of features.

    Shapes: [T, H, d], cosine and sine [T, 1, d / 2] -> [T, H, d].
    """
    first, second = x_THd.chunk(2, -1)
    return torch.cat([first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d], -1)


@rotate.register("cpu")
def rotate_cpu(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """The same written in place, and turned back by the negative angle for the gradient."""
    y: Tensor = _Rotate.apply(x_THd, cos_T1d, sin_T1d)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1d, sin_T1d)
        return _turn(x_THd, cos_T1d, sin_T1d, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor, None, None]:
        cos_T1d, sin_T1d = ctx.saved_tensors
        return _turn(grad_THd, cos_T1d, sin_T1d, -1), None, None


def _turn(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, sign: int) -> Tensor:
    y_THd = torch.empty_like(x_THd, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x_THd.chunk(2, -1), y_THd.chunk(2, -1)
    torch.mul(first, cos_T1d, out=out_first).addcmul_(second, sin_T1d, value=-sign)
    torch.mul(second, cos_T1d, out=out_second).addcmul_(first, sin_T1d, value=sign)
    return y_THd
