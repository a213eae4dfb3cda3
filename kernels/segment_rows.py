"""Rows of a table of vectors, kept short, and handed out segment by segment; from the host's memory to a device the next segment is under way already.

Legend: U rows of the table, D features, n rows of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Stored:
    """The vectors as they are kept: whole, as half-precision numbers, or as bytes with one scale a row."""

    table_UD: Tensor
    scales_U: Tensor | None
    wide: torch.dtype

    @classmethod
    def of(cls, vectors_UD: Tensor, precision: Precision) -> Stored:
        """Shorten vectors; the type they had is the one that products are summed in."""
        if precision == "float16":
            return cls(vectors_UD.half().contiguous(), None, vectors_UD.dtype)
        if precision == "int8":
            scales_U = (vectors_UD.abs().amax(1) / 127).clamp(min=torch.finfo(vectors_UD.dtype).tiny)
            return cls((vectors_UD / scales_U.unsqueeze(1)).round().to(torch.int8).contiguous(), scales_U, vectors_UD.dtype)
        if precision != "float32":
            raise ValueError(f"precision is {precision!r}: give float32, float16 or int8")
        return cls(vectors_UD.contiguous(), None, vectors_UD.dtype)

    @property
    def size(self) -> int:
        """Features of a vector."""
        return self.table_UD.shape[1]

    def widened(self, short: Tensor, rows: Tensor) -> Tensor:
        """Rows of the table in the type of computation; ``rows`` says which they are."""
        values = short.to(self.wide)
        return values if self.scales_U is None else values * self.scales_U[rows.to(self.scales_U.device)].to(values.device).unsqueeze(-1)

    def whole(self) -> Tensor:
        """All rows in the type of computation."""
        return self.widened(self.table_UD, torch.arange(len(self.table_UD), device=self.table_UD.device))

    def add(self, gradient_UD: Tensor, rows: Tensor, grad: Tensor) -> None:
        """Add the gradients of some rows, wherever they come from; those of negative rows are nothing."""
        home = gradient_UD.device
        gradient_UD.index_add_(0, rows.flatten().clamp(min=0).to(home), grad.flatten(0, -2).to(home))


class SegmentRows:
    """Rows and vectors of each segment on the device that computes.

    A table in the host's memory is read with two buffers on either side: while a segment is at work, the one after it is gathered and copied.
    """

    def __init__(self, stored: Stored, segments: Sequence[Tensor], device: torch.device) -> None:
        self._stored, self._segments, self._device = stored, segments, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._copied() if self._apart() else self._here()

    def _apart(self) -> bool:
        return self._stored.table_UD.is_cpu and self._device.type != "cpu"

    def _here(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in self._segments:
            at = rows.clamp(min=0)
            yield rows, self._stored.widened(self._stored.table_UD[at], at)

    def _copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        accelerator, stored = torch.get_device_module(self._device), self._stored
        beside = accelerator.Stream()
        largest = max((rows.numel() for rows in self._segments), default=0)
        host, device = (
            [self._pinned(largest) for _ in range(2)],
            [torch.empty(largest, stored.size, dtype=stored.table_UD.dtype, device=self._device) for _ in range(2)],
        )
        arrived, used = [accelerator.Event() for _ in range(2)], [accelerator.Event() for _ in range(2)]

        def send(number: int) -> None:
            slot, rows = number % 2, self._segments[number]
            if number >= 2:
                arrived[slot].synchronize()  # what was in the host's buffer has left it
            at = rows.clamp(min=0).flatten().cpu()
            torch.index_select(stored.table_UD, 0, at, out=host[slot][: len(at)])
            with accelerator.stream(beside):
                if number >= 2:
                    beside.wait_event(used[slot])
                device[slot][: len(at)].copy_(host[slot][: len(at)], non_blocking=True)
                arrived[slot].record(beside)

        # The buffers may lie where tensors lay that are gone for this thread, and that the device still reads.
        beside.wait_stream(accelerator.current_stream())
        if self._segments:
            send(0)
        for number, rows in enumerate(self._segments):
            slot = number % 2
            if number + 1 < len(self._segments):
                send(number + 1)
            here = accelerator.current_stream()
            here.wait_event(arrived[slot])
            vectors = stored.widened(device[slot][: rows.numel()].view(*rows.shape, -1), rows.clamp(min=0))
            yield rows, vectors
            # Widened vectors of a float32 table are the buffer itself: it is free when all that was queued with them is done.
            used[slot].record(here)

    def _pinned(self, count: int) -> Tensor:
        return torch.empty(count, self._stored.size, dtype=self._stored.table_UD.dtype, pin_memory=True)
