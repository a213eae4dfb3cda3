"""A batch on its way through the stages of a step.

Legend: U unique rows of a table, D its vector size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.load_balancing import Share
from semantide.services.training.objective import TableRows


@dataclass
class Flight:
    """One batch and what the stages have added to it so far; a stage touches only the flight that it works on."""

    step: int
    share: Share
    ids: Mapping[str, Tensor]
    """What the tables are asked for."""
    batch: HistoryBatch
    """This rank's histories; on the training device once copied."""
    routes: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """What the tables answered [U, D], where they keep it."""
    rows: dict[str, TableRows] = field(default_factory=dict)
    """The answers on the training device."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    rate: float = 0.0
    """Learning rate of the rows' update."""
    collided: int = 0
    asked: int = 0
    """Rows asked for, and how many of them the batches just before update too."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each stage worked on it, and when it waited at the fence."""
    event: Any = None
    """On an accelerator: what the next user of the tensors waits for."""


class Ferry:
    """Copies of flights to the training device and of gradients back, on streams of their own where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there = None if device.type == "cpu" else torch.Stream(device)
        self._back = None if device.type == "cpu" else torch.Stream(device)

    def bring(self, flight: Flight) -> None:
        """Begin the copy of histories and rows to the device."""
        if self._there is None:
            flight.rows = {name: _rows(flight, name, flight.vectors[name].detach(), self._device) for name in flight.routes}
            return
        with self._there:
            flight.batch = flight.share.batch.to(self._device)
            flight.rows = {name: _rows(flight, name, _sent(vectors, self._device), self._device) for name, vectors in flight.vectors.items()}
            flight.event = self._there.record_event()

    def arrive(self, flight: Flight) -> None:
        """Called by the thread that computes: what it does next comes after the copy."""
        if flight.event is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(flight.event)
            for rows in flight.rows.values():
                rows.vectors_UD.record_stream(current)
        for rows in flight.rows.values():
            rows.vectors_UD.requires_grad_()

    def depart(self, flight: Flight) -> None:
        """Called by the thread that computed: the gradients of the rows are what its work so far has made."""
        flight.gradients = {name: _gradient(rows.vectors_UD) for name, rows in flight.rows.items()}
        flight.rows = {}
        if self._back is not None:
            flight.event = torch.accelerator.current_stream(self._device).record_event()

    def take_home(self, flight: Flight) -> None:
        """Bring the gradients to where the tables keep their rows."""
        if self._back is None:
            return
        with self._back:
            self._back.wait_event(flight.event)
            flight.gradients = {name: gradient.to(flight.vectors[name].device) for name, gradient in flight.gradients.items()}
        self._back.synchronize()


def _rows(flight: Flight, name: str, vectors_UD: Tensor, device: torch.device) -> TableRows:
    route = flight.routes[name]
    return TableRows(route.ids_U.to(device), vectors_UD, route.inverse_T.to(device), flight.ids[name].to(device))


def _sent(vectors_UD: Tensor, device: torch.device) -> Tensor:
    """A copy that goes on while the thread does."""
    if vectors_UD.device.type == "cpu":
        vectors_UD = vectors_UD.pin_memory()
    return vectors_UD.detach().to(device, non_blocking=True)


def _gradient(vectors_UD: Tensor) -> Tensor:
    """Zeros where the loss saw none of the rows: the other ranks' rows are updated all the same."""
    return torch.zeros_like(vectors_UD) if vectors_UD.grad is None else vectors_UD.grad
