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
        """Rows of the table in the type of computation; ``rows`` says on this table's device which."""
        values = short.to(self.wide)
        return values if self.scales_U is None else values * self.scales_U[rows].to(values.device).unsqueeze(-1)

    def whole(self) -> Tensor:
        """All rows in the type of computation."""
        return self.widened(self.table_UD, torch.arange(len(self.table_UD), device=self.table_UD.device))

    def add(self, gradient_UD: Tensor, rows: Tensor, grad: Tensor) -> None:
        """Add the gradients of some rows, wherever they come from; those of negative rows are nothing."""
        home = gradient_UD.device
        gradient_UD.index_add_(0, rows.flatten().clamp(min=0).to(home), grad.flatten(0, -2).to(home))


class SegmentRows:
    """Rows and vectors of each segment on the device that computes.

    A table on another device is read with two buffers: while a segment is at work, the one after it is gathered and copied.
    """

    def __init__(self, stored: Stored, segments: Sequence[Tensor], device: torch.device) -> None:
        self._stored, self._segments, self._device = stored, segments, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._stored.table_UD.device == self._device or self._device.type == "cpu":
            for rows in self._segments:
                at = rows.clamp(min=0).to(self._stored.table_UD.device)
                yield rows, self._stored.widened(self._stored.table_UD[at].to(self._device), at)
            return
        yield from self._copied()

    def _copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        accelerator = torch.get_device_module(self._device)
        beside, home = accelerator.Stream(self._device), self._stored.table_UD.device
        largest = max((rows.numel() for rows in self._segments), default=0)
        pinned = [torch.empty(largest, self._stored.size, dtype=self._stored.table_UD.dtype, pin_memory=True) for _ in range(2)]
        copied: list[torch.Event | None] = [None, None]

        def send(number: int) -> tuple[Tensor, Tensor, Tensor | None, torch.Event]:
            rows, slot = self._segments[number], number % 2
            at = rows.clamp(min=0).to(home).flatten()
            if (earlier := copied[slot]) is not None:
                earlier.synchronize()  # the buffer may still be on its way
            torch.index_select(self._stored.table_UD, 0, at, out=pinned[slot][: len(at)])
            with accelerator.stream(beside):
                short = pinned[slot][: len(at)].to(self._device, non_blocking=True).view(*rows.shape, -1)
                scales = None if self._stored.scales_U is None else self._stored.scales_U[at].to(self._device, non_blocking=True).view(rows.shape)
                event = accelerator.Event()
                event.record(beside)
            copied[slot] = event
            return rows, short, scales, event

        under_way = send(0) if len(self._segments) else None
        for number in range(len(self._segments)):
            assert under_way is not None
            rows, short, scales, event = under_way
            accelerator.current_stream(self._device).wait_event(event)
            short.record_stream(accelerator.current_stream(self._device))
            vectors = short.to(self._stored.wide)
            # The next one leaves before this one's work is queued: both go on at the same time.
            under_way = send(number + 1) if number + 1 < len(self._segments) else None
            yield rows, vectors if scales is None else vectors * scales.unsqueeze(-1)
