"""The popularity baseline: the most interacted-with items of the training part, for everybody the same.

Legend: N items.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Popularity:
    """Items in the order of their counts.

    Shapes: ``counts_N`` [N].
    """

    counts_N: npt.NDArray[np.int64]

    @classmethod
    def fit(cls, histories: Iterable[npt.NDArray[np.integer]], num_items: int) -> Popularity:
        """Count the items of histories."""
        counts = np.zeros(num_items, dtype=np.int64)
        for history in histories:
            np.add.at(counts, history, 1)
        return cls(counts)

    def ranking(self) -> npt.NDArray[np.int64]:
        """All item rows, most popular first; equal counts in row order."""
        return np.argsort(-self.counts_N, kind="stable").astype(np.int64)
