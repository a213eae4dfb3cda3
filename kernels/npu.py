"""The operators of torch_npu that stand in for kernels on Ascend NPUs; everything else runs there through Triton, or as the torch reference.

Legend: as in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

_MASK_TOKENS = 2048  # of the compressed mask that the operator wants for whatever length
_CAUSAL = 2  # its sparse mode: each query sees its own place and those before it


def causal_attention_npu(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """Causal softmax attention of packed sequences with grouped queries; gradients come from the operator.

    Shapes: ``bounds`` as numbers, first 0, last T; returns [T, H, D].
    Source: torch_npu.npu_fusion_attention, layout TND.
    """
    import torch_npu

    # The operator names where each sequence ends; one without tokens is left out.
    ends = [end for begin, end in pairwise(bounds) if end > begin]
    if not ends:
        return q_THD * 1
    mask = _future(q_THD.device)
    out_THD: Tensor = torch_npu.npu_fusion_attention(
        *(q_THD.contiguous(), k_TGD.contiguous(), v_TGD.contiguous()),
        *(q_THD.shape[1], "TND"),
        atten_mask=mask,
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
        sparse_mode=_CAUSAL,
    )[0]
    return out_THD


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a mask made while decoding may serve training later
def _future(device: torch.device) -> Tensor:
    return torch.ones(_MASK_TOKENS, _MASK_TOKENS, dtype=torch.bool, device=device).triu(1)
