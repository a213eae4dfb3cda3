"""Rotary positions: pairs of features turn by an angle that grows with the position.

Queries and keys are normalised just before, so that the two are one kernel too.
Legend: T rows, H heads, d head size; feature i pairs with feature i + d / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native
from semantide.kernels.dispatch import kernel
from semantide.kernels.normalisation import rms_norm


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


@kernel
def norm_rotate(x_THd: Tensor, weight_d: Tensor | None, cos_T1d: Tensor, sin_T1d: Tensor, eps: float = 1e-6) -> Tensor:
    """Each head divided by its root mean square, times a factor per feature (nothing where there is no ``weight_d``), and then turned.

    Shapes: [T, H, d], cosine and sine [T, 1, d / 2] -> [T, H, d].
    """
    return rotate(x_THd if weight_d is None else rms_norm(x_THd, weight_d, eps), cos_T1d, sin_T1d)


@norm_rotate.register("cpu")
def norm_rotate_native(x_THd: Tensor, weight_d: Tensor | None, cos_T1d: Tensor, sin_T1d: Tensor, eps: float = 1e-6) -> Tensor:
    """Both in one pass in C++; other types than float32, and gradients, take the torch way.

    Raises: ValueError when shapes do not fit.
    """
    rows, _, size = x_THd.shape
    if size % 2 or not cos_T1d.shape == sin_T1d.shape == (rows, 1, size // 2) or (weight_d is not None and weight_d.shape != (size,)):
        factors = "no factors" if weight_d is None else f"factors {tuple(weight_d.shape)}"
        raise ValueError(
            f"rows {tuple(x_THd.shape)}, cosines {tuple(cos_T1d.shape)}, sines {tuple(sin_T1d.shape)}, {factors}: give heads of an even size, "
            "for each row the cosine and sine of half as many angles, and one factor for each feature"
        )
    library = native.library_for(x_THd, cos_T1d, sin_T1d, *(() if weight_d is None else (weight_d,)))
    if library is None:
        return norm_rotate.reference(x_THd, weight_d, cos_T1d, sin_T1d, eps)
    x_THd = x_THd if x_THd.stride(2) == 1 else x_THd.contiguous()
    cos_T1d, sin_T1d, out_THd = cos_T1d.contiguous(), sin_T1d.contiguous(), x_THd.new_empty(x_THd.shape)
    weight_d = weight_d if weight_d is None else weight_d.contiguous()
    addresses = (x_THd.data_ptr(), 0 if weight_d is None else weight_d.data_ptr(), cos_T1d.data_ptr(), sin_T1d.data_ptr(), out_THd.data_ptr())
    native.call(library, "semantide_turn_rows", native.TURN_ROWS.pack(*x_THd.shape, *x_THd.stride()[:2], *addresses, eps))
    return out_THd


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
