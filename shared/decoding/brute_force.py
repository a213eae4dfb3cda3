"""The reference of beam search: score every item, keep the allowed ones, sort.

It walks no trie and prunes nothing: every item is a beam of its own. For tests and small catalogs.
Legend: R requests, N items, L levels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.shared.decoding.protocol import StepModel
from semantide.shared.decoding.search_trie import BoolArray
from semantide.shared.trie import IntArray

FloatArray = npt.NDArray[np.float64]


@torch.inference_mode()
def score_every_item(model: StepModel, codes: IntArray, tokens_T: Tensor, offsets_R1: Tensor) -> FloatArray:
    """Log-probability of every item after every prompt: [R, N].

    Shapes: ``codes`` [N, L]; ``tokens_T``, ``offsets_R1`` as in ``StepModel.begin``.
    """
    requests, (items, levels) = len(offsets_R1) - 1, codes.shape
    codes_NL = torch.as_tensor(codes, dtype=torch.int64, device=tokens_T.device)
    logits, state = model.begin(tokens_T, offsets_R1)
    scores_RN = torch.log_softmax(logits.double(), -1)[:, codes_NL[:, 0]]
    for level in range(1, levels):
        own = torch.arange(items, device=tokens_T.device) if level > 1 else torch.zeros(items, dtype=torch.int64, device=tokens_T.device)
        logits = model.step(state, level, own.expand(requests, -1), codes_NL[:, level - 1].expand(requests, -1))
        scores_RN = scores_RN + torch.log_softmax(logits.double(), -1).gather(2, codes_NL[:, level].expand(requests, -1)[:, :, None]).squeeze(2)
    return np.asarray(scores_RN.cpu().numpy(), dtype=np.float64)


def best_items(scores_N: FloatArray, codes: IntArray, allowed: BoolArray, n: int) -> IntArray:
    """Catalog rows of the n best allowed items; equal scores in the order of their codes."""
    order = np.lexsort((*codes.T[::-1], -scores_N))
    return np.asarray(order[allowed[order]][:n], dtype=np.int64)
