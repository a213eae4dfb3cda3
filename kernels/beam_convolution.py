"""The short convolution of a linear-attention layer for beams: each finds its last few inputs by the index that leads to its other records.

Legend: B beams (or nodes of trees) of all requests, C channels, K taps (the last one is the token's own), Q = K - 1 inputs before, R requests, N kept inputs,
S tokens behind and with the new one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.dispatch import kernel


@kernel
def beam_convolution(x_BC: Tensor, weight_CK: Tensor, before_RQC: Tensor, requests_B: Tensor, own_NC: Tensor, rows_BS: Tensor) -> Tensor:
    """SiLU of each channel's weighted sum of the beam's last K inputs, the prompt's last ones where the beam has fewer; the new ones are kept in ``own_NC``.

    The row to keep them in is the last of ``rows_BS``, the others lead to those before, oldest first, with -1 before the oldest where beams differ in depth.

    Shapes: [B, C], [C, K], [R, Q, C], [B], [N, C], [B, S] -> [B, C].
    Raises: ValueError when shapes do not fit.
    """
    beams, (channels, taps) = len(x_BC), weight_CK.shape
    if x_BC.shape != (beams, channels) or before_RQC.shape[1:] != (taps - 1, channels) or own_NC.shape[1:] != (channels,) or rows_BS.shape[:1] != (beams,):
        raise ValueError(
            f"inputs {tuple(x_BC.shape)}, taps {tuple(weight_CK.shape)}, before them {tuple(before_RQC.shape)}, kept {tuple(own_NC.shape)}, rows "
            f"{tuple(rows_BS.shape)}: give [beams, channels], [channels, taps], [requests, taps - 1, channels], [kept, channels] and one list of rows per beam"
        )
    own_NC[rows_BS[:, -1]] = x_BC
    y_BC = x_BC * weight_CK[:, -1]
    depth_B = (rows_BS[:, :-1] >= 0).sum(1)
    for back in range(1, taps):
        older_B = taps - 1 + (depth_B - back).clamp(max=-1)  # the place of the prompt's input, where the beam has fewer than ``back``
        x_old_BC = before_RQC[requests_B, older_B]
        if back < rows_BS.shape[1]:
            row_B = rows_BS[:, -1 - back]
            x_old_BC = torch.where((row_B >= 0)[:, None], own_NC[row_B], x_old_BC)
        y_BC = y_BC + x_old_BC * weight_CK[:, -1 - back]
    return F.silu(y_BC)
