"""Tables of vectors of which a step reads and changes a few rows.

Legend: T asked ids, U unique ones among them, N rows, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


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

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave."""
        ...


class LocalTable:
    """A table in the memory of one process."""

    def __init__(
        self, num_rows: int, size: int, *, optimiser: Literal["adam", "adagrad"] = "adam", std: float = 0.02, beta1: float = 0.9, beta2: float = 0.98
    ) -> None:
        self.weight_ND = torch.empty(num_rows, size).normal_(std=std)
        self._optimiser, self._beta1, self._beta2 = optimiser, beta1, beta2
        if optimiser == "adam":
            self._first_ND, self._second_ND = torch.zeros(num_rows, size), torch.zeros(num_rows, size)
            self._steps_N = torch.zeros(num_rows)
        else:
            self._sum_N = torch.zeros(num_rows)

    def route(self, ids_T: Tensor) -> Route:
        """See ``Table``.

        Raises: ValueError for an id outside the table.
        """
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < len(self.weight_ND):
            raise ValueError(f"ids from {int(ids_T.min())} to {int(ids_T.max())} for a table of {len(self.weight_ND)} rows: give rows of the table")
        return Route(*torch.unique(ids_T, return_inverse=True))

    def fetch(self, route: Route) -> Tensor:
        """See ``Table``."""
        return self.weight_ND[route.ids_U]

    @torch.no_grad()
    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        """See ``Table``."""
        ids_U = route.ids_U
        if self._optimiser == "adagrad":
            sums_U = self._sum_N[ids_U] + gradients_UD.pow(2).mean(1)
            self._sum_N[ids_U] = sums_U
            self.weight_ND[ids_U] -= rate * gradients_UD / (sums_U.sqrt() + 1e-8).unsqueeze(1)
            return
        steps_U = self._steps_N[ids_U] + 1
        first_UD = self._first_ND[ids_U].lerp_(gradients_UD, 1 - self._beta1)
        second_UD = self._second_ND[ids_U].lerp_(gradients_UD.pow(2), 1 - self._beta2)
        self._steps_N[ids_U], self._first_ND[ids_U], self._second_ND[ids_U] = steps_U, first_UD, second_UD
        bias1_U1, bias2_U1 = (1 - beta ** steps_U.unsqueeze(1) for beta in (self._beta1, self._beta2))
        self.weight_ND[ids_U] -= rate * (first_UD / bias1_U1) / ((second_UD / bias2_U1).sqrt() + 1e-8)

    def state(self) -> dict[str, Tensor]:
        """See ``Table``."""
        if self._optimiser == "adagrad":
            return {"weight": self.weight_ND, "sum": self._sum_N}
        return {"weight": self.weight_ND, "first": self._first_ND, "second": self._second_ND, "steps": self._steps_N}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See ``Table``."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
