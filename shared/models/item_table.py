"""Tables of vectors of which a step reads and changes a few rows.

Legend: T asked ids, U unique ones among them, N rows, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from semantide.kernels.jagged_embedding import adagrad_rows, adam_rows, gather_rows, unique_ids

TableOptimiser = Literal["adam", "row-adam", "adagrad"]


@dataclass(frozen=True)
class Route:
    """Each asked id once, ascending, and where each asked one is among them.

    Shapes: ``ids_U``, ``inverse_T``.
    """

    ids_U: Tensor
    inverse_T: Tensor


class Table(Protocol):
    """Vectors by id: ask, look up, change."""

    def route(self, ids_T: Tensor) -> Route:
        """Where the rows of these ids are."""
        ...

    def fetch(self, route: Route) -> Tensor:
        """Their vectors: [U, D]."""
        ...

    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        """One step of the rows' optimiser."""
        ...

    def settle(self) -> None:
        """Bring home what lies elsewhere: before ``state``, between two steps, on all ranks."""
        ...

    def gather(self) -> Tensor:
        """The vectors of all rows, [N, D], other ranks' included: between two steps, on all ranks."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave."""
        ...


class LocalTable:
    """A table in the memory of one process.

    ``optimiser``: ``adagrad`` keeps one number a row, ``row-adam`` one and a vector, ``adam`` two vectors.
    """

    def __init__(self, num_rows: int, size: int, *, optimiser: TableOptimiser = "adam", std: float = 0.02, beta1: float = 0.9, beta2: float = 0.98) -> None:
        self.weight_ND = torch.empty(num_rows, size).normal_(std=std)
        self._beta1, self._beta2 = beta1, beta2
        if optimiser == "adagrad":
            self._state = {"sum": torch.zeros(num_rows)}
        else:
            second = torch.zeros(num_rows) if optimiser == "row-adam" else torch.zeros(num_rows, size)
            self._state = {"first": torch.zeros(num_rows, size), "second": second, "steps": torch.zeros(num_rows)}

    def route(self, ids_T: Tensor) -> Route:
        """See ``Table``.

        Raises: ValueError for an id outside the table.
        """
        return Route(*unique_ids(ids_T, len(self.weight_ND)))

    def fetch(self, route: Route) -> Tensor:
        """See ``Table``."""
        return gather_rows(self.weight_ND, route.ids_U)

    @torch.no_grad()
    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        """See ``Table``."""
        state, gradients_UD = self._state, gradients_UD.contiguous()
        if "sum" in state:
            adagrad_rows(self.weight_ND, state["sum"], route.ids_U, gradients_UD, rate)
        else:
            adam_rows(self.weight_ND, state["first"], state["second"], state["steps"], route.ids_U, gradients_UD, rate, self._beta1, self._beta2)

    def settle(self) -> None:
        """See ``Table``: everything is here."""

    def gather(self) -> Tensor:
        """See ``Table``: the table itself."""
        return self.weight_ND

    def state(self) -> dict[str, Tensor]:
        """See ``Table``."""
        return {"weight": self.weight_ND, **self._state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See ``Table``."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
