"""Which earlier rows stand behind each beam: the one index for keys and values, recurrent records and sequences.

Every step of decoding appends one row per beam to append-only stores (step-major: all beams of step 0, then of step 1, ...)
and never moves one. When beams are reordered only this index changes.
Legend: R requests, W beams, S steps so far, N rows appended so far.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ancestry:
    """For every live beam the store rows of its ancestors, oldest first.

    Shapes: ``rows_RWS`` [R, W, S].
    """

    def __init__(self, num_requests: int, device: torch.device | str = "cpu") -> None:
        self.rows_RWS = torch.zeros(num_requests, 1, 0, dtype=torch.long, device=device)
        self.num_rows = 0

    def extend(self, parents_RW: Tensor) -> Tensor:
        """Let new beams follow the given parents, and return the store rows [R, W] that this step's records go to.

        Raises: ValueError when a parent does not exist.
        """
        requests, width = parents_RW.shape
        if requests != self.rows_RWS.shape[0]:
            raise ValueError(f"parents of {requests} requests, but decoding began with {self.rows_RWS.shape[0]}: give one row per request")
        if parents_RW.numel() and (int(parents_RW.min()) < 0 or int(parents_RW.max()) >= self.rows_RWS.shape[1]):
            raise ValueError(f"parents from {int(parents_RW.min())} to {int(parents_RW.max())}, but the last step had {self.rows_RWS.shape[1]} beams")
        new_RW = self.num_rows + torch.arange(requests * width, device=parents_RW.device).view(requests, width)
        kept_RWS = self.rows_RWS.gather(1, parents_RW.unsqueeze(-1).expand(-1, -1, self.rows_RWS.shape[2]))
        self.rows_RWS = torch.cat([kept_RWS, new_RW.unsqueeze(-1)], -1)
        self.num_rows += requests * width
        return new_RW

    def sequences(self, record_N: Tensor) -> Tensor:
        """What was recorded along each beam's path, for example its codes: [R, W, S, ...]."""
        return record_N[self.rows_RWS]
