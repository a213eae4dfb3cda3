"""The short convolution of a linear-attention layer for beams: each finds its last few inputs by the index that leads to its other records.

Legend: B beams (or nodes of trees) of all requests, C channels, K taps (the last one is the token's own), Q = K - 1 inputs before, R requests, N kept inputs,
S tokens behind and with the new one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.beam_linear_attention import RECORD_KINDS, as_record
from semantide.kernels.dispatch import kernel


@kernel
def beam_convolution(x_BC: Tensor, weight_CK: Tensor, before_RQC: Tensor, requests_B: Tensor, own_NC: Tensor, rows_BS: Tensor) -> Tensor:
    """SiLU of each channel's weighted sum of the beam's last K inputs, the prompt's last ones where the beam has fewer; the new ones are kept in ``own_NC``.

    The row to keep them in is the last of ``rows_BS`` (-1: nowhere), the others lead to those before, oldest first, with -1 before the oldest where beams differ in depth.
    What is kept may be of a shorter type.

    Shapes: [B, C], [C, K], [R, Q, C], [B], [N, C], [B, S] -> [B, C].
    Raises: ValueError when shapes do not fit.
    """
    _check(x_BC, weight_CK, before_RQC, own_NC, rows_BS)
    taps = weight_CK.shape[1]
    kept_B = rows_BS[:, -1] >= 0
    own_NC[rows_BS[kept_B, -1]] = as_record(x_BC[kept_B], own_NC.dtype)
    y_BC = x_BC * weight_CK[:, -1]
    depth_B = (rows_BS[:, :-1] >= 0).sum(1)
    for back in range(1, taps):
        older_B = taps - 1 + (depth_B - back).clamp(max=-1)  # the place of the prompt's input, where the beam has fewer than ``back``
        x_old_BC = before_RQC[requests_B, older_B]
        if back < rows_BS.shape[1]:
            row_B = rows_BS[:, -1 - back]
            x_old_BC = torch.where((row_B >= 0)[:, None], own_NC[row_B].to(x_BC.dtype), x_old_BC)
        y_BC = y_BC + x_old_BC * weight_CK[:, -1 - back]
    return F.silu(y_BC)


@beam_convolution.register("cpu")
def beam_convolution_native(x_BC: Tensor, weight_CK: Tensor, before_RQC: Tensor, requests_B: Tensor, own_NC: Tensor, rows_BS: Tensor) -> Tensor:
    """All taps of a beam's channels at once in C++; other types than float32 take the torch way.

    Raises: ValueError when shapes do not fit, or a request or a row does not exist.
    """
    library = native.library_for(x_BC, weight_CK, before_RQC)
    kind = RECORD_KINDS.get(own_NC.dtype)
    if library is None or kind is None or not own_NC.is_contiguous() or not rows_BS.numel():
        return beam_convolution.reference(x_BC, weight_CK, before_RQC, requests_B, own_NC, rows_BS)
    _check(x_BC, weight_CK, before_RQC, own_NC, rows_BS)
    x_BC = x_BC if x_BC.stride(-1) == 1 else x_BC.contiguous()
    weight_KC, before_RQC, requests_B, rows_BS = weight_CK.T.contiguous(), before_RQC.contiguous(), requests_B.long().contiguous(), rows_BS.long().contiguous()
    y_BC = x_BC.new_empty(x_BC.shape)
    (beams, channels), taps = x_BC.shape, len(weight_KC)
    arguments = native.BEAM_CONVOLUTION.pack(
        *(beams, channels, taps, rows_BS.shape[1], len(before_RQC), len(own_NC), kind, x_BC.data_ptr(), x_BC.stride(0)),
        *(weight_KC.data_ptr(), before_RQC.data_ptr(), requests_B.data_ptr(), own_NC.data_ptr(), rows_BS.data_ptr(), y_BC.data_ptr()),
    )
    if native.call(library, "semantide_beam_convolution", arguments):
        raise ValueError(
            f"requests from {int(requests_B.min())} to {int(requests_B.max())} of {len(before_RQC)}, rows from {int(rows_BS.min())} to {int(rows_BS.max())} of "
            f"{len(own_NC)}: name what is there, the row to write last, and -1 only before the oldest"
        )
    return y_BC


def _check(x_BC: Tensor, weight_CK: Tensor, before_RQC: Tensor, own_NC: Tensor, rows_BS: Tensor) -> None:
    beams, (channels, taps) = len(x_BC), weight_CK.shape
    if x_BC.shape != (beams, channels) or before_RQC.shape[1:] != (taps - 1, channels) or own_NC.shape[1:] != (channels,) or rows_BS.shape[:1] != (beams,):
        raise ValueError(
            f"inputs {tuple(x_BC.shape)}, taps {tuple(weight_CK.shape)}, before them {tuple(before_RQC.shape)}, kept {tuple(own_NC.shape)}, rows "
            f"{tuple(rows_BS.shape)}: give [beams, channels], [channels, taps], [requests, taps - 1, channels], [kept, channels] and one list of rows per beam"
        )
