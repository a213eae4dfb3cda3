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
from semantide.shared.models.first_rows import first_rows

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

    places_N: Tensor | None
    """The row of each id; None where an id is its row."""

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

    def read(self, ids_T: Tensor) -> Tensor:
        """The vectors of some rows, [T, D], as they are: between two steps after ``settle``, on all ranks, which may ask for different ones."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave, or from the ``weight`` of it alone."""
        ...


class LocalTable:
    """A table in the memory of one process.

    ``optimiser``: ``adagrad`` keeps one number a row, ``row-adam`` one and a vector, ``adam`` two vectors. The first vectors are those of ``first_rows``; of a share of a
    larger table ``rows`` says which of its rows they are.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        optimiser: TableOptimiser = "adam",
        std: float = 0.02,
        beta1: float = 0.9,
        beta2: float = 0.98,
        seed: int = 0,
        rows: slice = slice(None),
        places_N: Tensor | None = None,
    ) -> None:
        numbers_N = (rows.start or 0) + (rows.step or 1) * torch.arange(num_rows)
        self.weight_ND = first_rows(numbers_N, size, std, seed).to(torch.get_default_dtype())
        self.places_N = places_N
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
        return Route(*unique_ids(placed(ids_T, self.places_N), len(self.weight_ND)))

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

    def read(self, ids_T: Tensor) -> Tensor:
        """See ``Table``."""
        return gather_rows(self.weight_ND, placed(ids_T, self.places_N).to(self.weight_ND.device))

    def state(self) -> dict[str, Tensor]:
        """See ``Table``."""
        return {"weight": self.weight_ND, **self._state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See ``Table``."""
        for name, tensor in self.state().items():
            if name in state:
                tensor.copy_(state[name])


def placed(ids_T: Tensor, places_N: Tensor | None) -> Tensor:
    """The rows of ids, where ids are not rows.

    Raises: ValueError for an id that has no row.
    """
    if places_N is None:
        return ids_T
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < len(places_N):
        raise ValueError(f"ids from {int(ids_T.min())} to {int(ids_T.max())} for {len(places_N)} known ones: give ids of the data set")
    rows_T: Tensor = places_N[ids_T]
    return rows_T
