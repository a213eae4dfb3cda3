"""What pages ask of the histories before them: which of their items are targets, with what weight, and what sees what.

Legend: S items of all blocks, C blocks, T items of the histories of a batch, B histories of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from semantide.shared.pages import CLICKED_FROM, ORDERED_FROM

Form = Literal["none", "point", "sequential", "parallel"]
Exposed = Literal["out", "weak", "contrast"]


@dataclass(frozen=True)
class PagesConfig:
    """Generator: training by pages. What was ordered or clicked on a page are its positives, the rest of it was exposed; what was disliked never is a target."""

    targets: Form = "none"
    """What of a page is predicted from the history before it. ``parallel``: all positives, each for itself, as in inference; ``sequential``: all, one after another, the
    strongest first, each after those before it; ``point``: one positive, drawn anew each epoch; ``none``: no pages, each item from all before it."""
    ordered_from: float = ORDERED_FROM
    """Least intensity of an action that counts as ordered."""
    clicked_from: float = CLICKED_FROM
    """Least intensity of an action that counts as clicked; below it an item was exposed only."""
    ordered_weight: float = 2.0
    """Weight of an ordered item's loss."""
    clicked_weight: float = 1.0
    """Weight of a clicked item's loss."""
    exposed: Exposed = "out"
    """What exposed items are: left out, ``weak`` positives, or a ``contrast`` that the page's positives are to be likelier than."""
    exposed_weight: float = 0.1
    """Weight of a weak positive's loss, or of a positive's contrast."""
    exposed_cap: int = 5
    """Most exposed items of a page in an epoch, drawn anew each time."""
    page_cap: int = 100
    """Most positives of a page in an epoch: the strongest, and among equals those that are drawn."""
    shuffle: bool = True
    """Whether equally strong items change places each epoch, so that the order in which they were shown is not learned."""

    @property
    def on(self) -> bool:
        """Whether training goes by pages."""
        return self.targets != "none"

    def __post_init__(self) -> None:
        for name, choices in (("targets", ("none", "point", "sequential", "parallel")), ("exposed", ("out", "weak", "contrast"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"pages.{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        for name, low, high in (
            ("ordered_weight", 0, 1000), ("clicked_weight", 0, 1000), ("exposed_weight", 0, 1000), ("exposed_cap", 0, 10_000), ("page_cap", 1, 100_000),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"pages.{name} is {getattr(self, name)}: give a number from {low} to {high}")
        if not 0 < self.clicked_from <= self.ordered_from:
            raise ValueError(
                f"pages.clicked_from is {self.clicked_from} and pages.ordered_from {self.ordered_from}: give intensities above 0, the second the larger"
            )
        if self.exposed == "contrast" and self.targets == "sequential":
            raise ValueError("pages.exposed is 'contrast' with pages.targets 'sequential': an order has no place for what was not taken; use parallel or point")


@dataclass(frozen=True)
class PageTargets:
    """Targets of a batch of histories, in blocks whose items follow one another; the one form of point-wise, sequential and parallel targets.

    Shapes: ``items_S`` rows of the data set's items; ``weights_S`` of each one's loss, 0 for what only is contrasted with; ``exposed_S`` whether it was only
    shown; ``offsets_C1`` [C + 1] where blocks begin; ``histories_C`` ascending; ``seen_C`` how many of its history's items a block sees; ``pages_C`` numbers
    blocks of one page alike.
    """

    items_S: Tensor
    weights_S: Tensor
    exposed_S: Tensor
    offsets_C1: Tensor
    histories_C: Tensor
    seen_C: Tensor
    pages_C: Tensor

    def to(self, device: torch.device | str) -> PageTargets:
        """The same on another device."""
        return PageTargets(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def lengths_B(self, num_histories: int) -> Tensor:
        """How many targets each history has."""
        lengths = torch.zeros(num_histories, dtype=torch.int64, device=self.items_S.device)
        return lengths.index_add_(0, self.histories_C, self.offsets_C1.diff())
