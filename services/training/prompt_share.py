"""One rank's share of an alignment: it draws, scores and learns from its own of a step's prompts, and all ranks make the same update.

With one rank everything is what it would be without: shares are 1, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from semantide.services.training.world import World

T = TypeVar("T")
D = TypeVar("D", bound=np.generic)


@dataclass(frozen=True)
class PromptShare:
    """Deals prompts and users out like cards, and brings together what becomes of them. All methods but ``own`` and ``place`` are collectives."""

    world: World = field(default_factory=World.single)

    @property
    def place(self) -> tuple[int, ...]:
        """What tells this rank's random numbers from those of others; nothing for one alone."""
        return () if self.world.size == 1 else (self.world.rank,)

    def own(self, things: Sequence[T]) -> Sequence[T]:
        """Those of this rank."""
        return things[self.world.rank :: self.world.size]

    def agreed(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return flag if self.world.size == 1 else self.sums(float(flag))[0] > 0

    def sums(self, *values: float) -> list[float]:
        """The sum of each over all ranks."""
        if self.world.size == 1:
            return list(values)
        total: list[float] = self.world.all_reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()
        return total

    def mean(self, figures: Mapping[str, float], weight: float) -> dict[str, float]:
        """Figures of all ranks that have them, weighed; on every rank the same."""
        if self.world.size == 1:
            return dict(figures)
        told = self.world.gather_json([dict(figures), weight])
        names = dict.fromkeys(name for own, _ in told for name in own)
        having = {name: [(own[name], heavy) for own, heavy in told if name in own] for name in names}
        return {name: sum(value * heavy for value, heavy in rows) / max(sum(heavy for _, heavy in rows), 1e-12) for name, rows in having.items()}

    def joined(self, own: npt.NDArray[D]) -> npt.NDArray[D]:
        """Rows of what was dealt out by ``own``, one for each thing: those of all of them, in their order."""
        if self.world.size == 1:
            return own
        parts = [part.numpy() for part in self.world.all_gather(torch.from_numpy(np.ascontiguousarray(own)))]
        whole = np.empty((sum(map(len, parts)), *own.shape[1:]), dtype=own.dtype)
        for rank, part in enumerate(parts):
            whole[rank :: self.world.size] = part
        return whole
