"""A short causal convolution of each channel by itself over packed (jagged) sequences, and SiLU.

What a token gives to queries, keys and values is mixed with what the few tokens before it gave; the first tokens of a sequence find nothing before them, or
what was kept of an earlier part of it.
Legend: T packed tokens, B sequences, C channels, K taps (the last one is the token's own), Q = K - 1 inputs before a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native
from semantide.kernels.attention import packed_bounds
from semantide.kernels.dispatch import kernel
from semantide.kernels.native_jagged_fusion import native_library


@kernel
def short_convolution(x_TC: Tensor, weight_CK: Tensor, offsets_B1: Tensor, before_BQC: Tensor | None = None) -> Tensor:
    """SiLU of each channel's weighted sum of its last K inputs within the sequence; ``before_BQC`` are those before the sequence's first, oldest first.

    Shapes: [T, C], [C, K], [B + 1] -> [T, C].
    Raises: ValueError when shapes do not fit.
    """
    _check(x_TC, weight_CK, offsets_B1, before_BQC)
    taps, outputs = weight_CK.shape[1], [x_TC[:0]]
    for sequence, (begin, end) in enumerate(pairwise(packed_bounds(offsets_B1, len(x_TC)))):
        before_QC = x_TC.new_zeros(taps - 1, x_TC.shape[1]) if before_BQC is None else before_BQC[sequence]
        inputs = torch.cat([before_QC, x_TC[begin:end]])
        outputs.extend((inputs[place : place + taps] * weight_CK.T).sum(0, keepdim=True) for place in range(end - begin))
    return F.silu(torch.cat(outputs))


@short_convolution.register("cpu")
def short_convolution_native(x_TC: Tensor, weight_CK: Tensor, offsets_B1: Tensor, before_BQC: Tensor | None = None) -> Tensor:
    """One pass in C++, and one back; other types than float32 take the torch way."""
    _check(x_TC, weight_CK, offsets_B1, before_BQC)
    packed_bounds(offsets_B1, len(x_TC))
    if native_library(x_TC, weight_CK, offsets_B1, before_BQC) is None:
        return short_convolution_by_taps(x_TC, weight_CK, offsets_B1, before_BQC)
    y_TC: Tensor = _Convolution.apply(x_TC, weight_CK, before_BQC, offsets_B1)
    return y_TC


@short_convolution.register("cuda")
@short_convolution.register("npu")
def short_convolution_by_taps(x_TC: Tensor, weight_CK: Tensor, offsets_B1: Tensor, before_BQC: Tensor | None = None) -> Tensor:
    """All sequences as one, with room for the inputs before each: a product and a sum for each tap."""
    _check(x_TC, weight_CK, offsets_B1, before_BQC)
    packed_bounds(offsets_B1, len(x_TC))
    taps, sequences, device = weight_CK.shape[1], len(offsets_B1) - 1, x_TC.device
    room = taps - 1
    if not room:
        return F.silu(x_TC * weight_CK[:, 0])
    places_T = torch.arange(len(x_TC), device=device) + room * (1 + torch.arange(sequences, device=device)).repeat_interleave(offsets_B1.diff())
    inputs = x_TC.new_zeros(len(x_TC) + room * sequences, x_TC.shape[1]).index_copy(0, places_T, x_TC)
    if before_BQC is not None:
        first_B1 = (offsets_B1[:-1] + room * torch.arange(sequences, device=device))[:, None]
        inputs = inputs.index_copy(0, (first_B1 + torch.arange(room, device=device)).flatten(), before_BQC.flatten(0, 1).to(x_TC.dtype))
    many = max(len(inputs) - room, 0)
    summed = inputs[room:] * weight_CK[:, room]
    for tap in range(room):
        summed = summed + inputs[tap : tap + many] * weight_CK[:, tap]
    return F.silu(summed[places_T - room])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CK: Tensor, before_BQC: Tensor | None, offsets_B1: Tensor) -> Tensor:
        x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
        before_BQC = before_BQC if before_BQC is None else before_BQC.contiguous()
        given = (x_TC, weight_CK.T.contiguous(), before_BQC, offsets_B1.long().contiguous())
        y_TC = x_TC.new_empty(x_TC.shape)
        _run(given, y_TC)
        ctx.save_for_backward(*given)
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        weight_KC, before_BQC = given[1:3]
        grad_TC = grad_TC.contiguous()
        slope_TC, grad_x, grad_weight = torch.empty_like(grad_TC), torch.empty_like(grad_TC), torch.zeros_like(weight_KC)
        grad_before = None if before_BQC is None else torch.empty_like(before_BQC)
        _run(given, slope_TC, (grad_TC, grad_x, grad_weight, grad_before))
        return grad_x, grad_weight.T, grad_before, None


def _run(given: Sequence[Tensor | None], out_TC: Tensor, gradients: Sequence[Tensor | None] = (None,) * 4) -> None:
    x_TC, weight_KC, before_BQC, offsets_B1 = given
    library = native.library()
    assert library is not None and x_TC is not None and weight_KC is not None and offsets_B1 is not None
    addresses = [0 if x is None else x.data_ptr() for x in (weight_KC, before_BQC, offsets_B1, out_TC, *gradients)]
    arguments = native.SHORT_CONVOLUTION.pack(len(offsets_B1) - 1, x_TC.shape[1], len(weight_KC), x_TC.data_ptr(), x_TC.stride(0), *addresses)
    native.call(library, "semantide_short_convolution", arguments)


def last_inputs(x_TC: Tensor, offsets_B1: Tensor, before_BQC: Tensor) -> Tensor:
    """What a later part of each sequence finds before it: the last Q inputs, older ones out of ``before_BQC`` where a sequence has fewer.

    Shapes: [T, C], [B + 1], [B, Q, C] -> [B, Q, C].
    """
    sequences, room = before_BQC.shape[:2]
    if not len(x_TC):
        return before_BQC
    back_BQ = offsets_B1.diff()[:, None] - room + torch.arange(room, device=x_TC.device)
    new_BQC = x_TC[(offsets_B1[:-1, None] + back_BQ).clamp(min=0)]
    old_BQC = before_BQC[torch.arange(sequences, device=x_TC.device)[:, None], (back_BQ + room).clamp(max=room - 1)]
    return torch.where(back_BQ[:, :, None] >= 0, new_BQC, old_BQC)


def _check(x_TC: Tensor, weight_CK: Tensor, offsets_B1: Tensor, before_BQC: Tensor | None) -> None:
    fits = x_TC.ndim == 2 and weight_CK.ndim == 2 and len(weight_CK) == x_TC.shape[1] and weight_CK.shape[1] >= 1
    if fits and before_BQC is not None:
        fits = before_BQC.shape == (len(offsets_B1) - 1, weight_CK.shape[1] - 1, x_TC.shape[1])
    if not fits:
        before = "nothing" if before_BQC is None else str(tuple(before_BQC.shape))
        raise ValueError(
            f"inputs {tuple(x_TC.shape)}, taps {tuple(weight_CK.shape)}, before them {before}: give [rows, channels], [channels, taps], "
            "and [sequences, taps - 1, channels] or nothing"
        )
