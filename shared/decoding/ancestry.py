"""Which earlier rows stand behind each beam: the one index for keys and values, recurrent records and sequences.

Every step of decoding appends one row per beam to append-only stores (step-major: all beams of step 0, then of step 1, ...)
and never moves one. When beams are reordered only this index changes. Requests may have different numbers of beams: rows are packed.
Legend: R requests, W beams of the widest request, B live beams of all requests, S steps so far, N rows appended so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Neighbouring requests [first, last) of one width, whose beams [begin, end) make a table without padding.

    Shapes: ``rows_RWS`` [R, W, S].
    """

    first: int
    last: int
    width: int
    begin: int
    end: int
    rows_RWS: Tensor


class Ancestry:
    """For every live beam the store rows of its ancestors, oldest first.

    ``counts[r]`` is the number of request r's beams, which follow those of the request before.

    Shapes: ``rows_BS`` [B, S].
    """

    def __init__(self, num_requests: int, device: torch.device | str = "cpu") -> None:
        self.counts: tuple[int, ...] = (1,) * num_requests
        self.rows_BS = torch.zeros(num_requests, 0, dtype=torch.long, device=device)
        self.num_rows = 0

    @property
    def steps(self) -> int:
        """Codes behind each beam."""
        return self.rows_BS.shape[1]

    def pack(self, table_RW: Tensor, counts: Sequence[int] | None) -> Tensor:
        """The entries of real beams, request after request: [B]."""
        if counts is None or min(counts, default=0) == table_RW.shape[1]:
            return table_RW.flatten()
        return torch.cat([row_W[:count] for row_W, count in zip(table_RW, counts, strict=True)])

    def extend(self, parents_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Let new beams follow the given parents; their records go to the stores' next rows. Returns which earlier live beam each follows: [B].

        Raises: ValueError when a parent does not exist.
        """
        requests, width = parents_RW.shape
        if requests != len(self.counts):
            raise ValueError(f"parents of {requests} requests, but decoding goes on with {len(self.counts)}: give one row per request")
        chosen = tuple(counts) if counts is not None else (width,) * requests
        if len(chosen) != requests or any(not 0 <= count <= width for count in chosen):
            raise ValueError(f"counts {chosen} for parents of shape {tuple(parents_RW.shape)}: give one count per request, from 0 to {width}")
        parents_B = self.pack(parents_RW, chosen)
        device = parents_RW.device
        chosen_R, before_R = torch.tensor(chosen, device=device), torch.tensor(self.counts, device=device)
        if parents_B.numel() and bool((parents_B < 0).any() or (parents_B >= before_R.repeat_interleave(chosen_R)).any()):
            raise ValueError(f"parents from {int(parents_B.min())} to {int(parents_B.max())}, but the last step had {self.counts} beams")
        parents_B = parents_B + (before_R.cumsum(0) - before_R).repeat_interleave(chosen_R)
        new_B1 = torch.arange(self.num_rows, self.num_rows + len(parents_B), device=device)[:, None]
        self.rows_BS = torch.cat([self.rows_BS[parents_B], new_B1], 1)
        self.num_rows += len(parents_B)
        self.counts = chosen
        return parents_B

    def runs(self) -> Iterator[Run]:
        """The live beams as tables without padding: as few as neighbours of equal width allow."""
        bounds = [0, *accumulate(self.counts)]
        for width, group in groupby(range(len(self.counts)), key=lambda request: self.counts[request]):
            requests = list(group)
            begin, end = bounds[requests[0]], bounds[requests[-1] + 1]
            rows_RWS = self.rows_BS[begin:end].view(len(requests), width, self.steps)
            yield Run(requests[0], requests[-1] + 1, width, begin, end, rows_RWS)

    def keep(self, requests: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Go on with these requests only. Returns the live beams that stay [B], and the store rows that are still needed [N], in the stores' new order."""
        bounds = [0, *accumulate(self.counts)]
        device = self.rows_BS.device
        beams_B = torch.cat([torch.arange(0, device=device), *(torch.arange(bounds[r], bounds[r + 1], device=device) for r in requests)])
        kept_N, rows = torch.unique(self.rows_BS[beams_B], return_inverse=True)
        self.rows_BS = rows.view(len(beams_B), self.steps)
        self.num_rows = len(kept_N)
        self.counts = tuple(self.counts[request] for request in requests)
        return beams_B, kept_N

    def sequences(self, record_N: Tensor) -> Tensor:
        """What was recorded along each beam's path, for example its codes: [B, S, ...]."""
        return record_N[self.rows_BS]
