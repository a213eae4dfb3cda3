"""Which rows a target leaves out of its negatives: none, its positive, and what is known of its sequence.

Legend: T targets, N rows, K keys of known positives; b targets and r negatives of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def known_keys(sequences_N: Tensor, rows_N: Tensor, num_rows: int) -> Tensor:
    """What says that a row is a positive of a sequence: sorted keys for ``sampled_softmax``."""
    keys_K: Tensor = torch.unique(sequences_N * num_rows + rows_N)
    return keys_K


def is_known(sequences: Tensor, rows: Tensor, known_K: Tensor, num_rows: int) -> Tensor:
    """Where a row is a known positive of its sequence."""
    if not len(known_K):
        return torch.zeros_like(rows, dtype=torch.bool)
    keys = sequences * num_rows + rows
    return known_K[torch.searchsorted(known_K, keys).clamp(max=len(known_K) - 1)] == keys


@dataclass(frozen=True)
class Masks:
    """What a target leaves out."""

    positives_T: Tensor
    sequences_T: Tensor | None
    known_K: Tensor | None
    num_rows: int

    def out(self, targets: Tensor | slice, rows_br: Tensor) -> Tensor:
        """Where rows are none, the target's positive, or known of its sequence."""
        out_br = (rows_br < 0) | (rows_br == self.positives_T[targets].unsqueeze(1))
        if self.known_K is not None and self.sequences_T is not None:
            out_br |= is_known(self.sequences_T[targets].unsqueeze(1), rows_br.long(), self.known_K, self.num_rows)
        return out_br
