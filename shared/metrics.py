"""Quality of ranked lists, by full ranking: no sampled candidates anywhere.

A list is rows of items, best first, -1 past its end. A target that is not in the list is a miss.
    hit rate  share of cases with at least one target among the first k
    recall    share of a case's targets among the first k, averaged over cases (equals the hit rate where every case has one target)
    ndcg      sum of 1 / log2(rank + 2) over found targets, divided by the best possible sum
    mrr       1 / (rank + 1) of the first found target
    coverage  share of all items that stand among the first k of any list
Legend: R cases, n length of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.integer]


@dataclass
class RankingMetrics:
    """Sums over the cases seen so far; ``result`` divides. ``own`` collects each case's figures, where somebody gives a place for them."""

    ks: tuple[int, ...]
    num_items: int
    cases: int = 0
    repeats: int = 0
    short: int = 0
    own: dict[str, list[float]] | None = None
    _sums: dict[str, float] = field(default_factory=dict)
    _shown: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ks or any(k < 1 for k in self.ks):
            raise ValueError(f"ks is {self.ks}: give at least one list length of 1 or more")

    def add(self, rows_Rn: Rows, targets: Sequence[Rows], histories: Sequence[Rows] | None = None) -> None:
        """Add ranked lists [R, n] and each case's target rows; histories count how many targets are repeats.

        Raises: ValueError when lists are shorter than the largest k allows and numbers do not match.
        """
        if len(rows_Rn) != len(targets):
            raise ValueError(f"{len(rows_Rn)} lists for {len(targets)} cases: give one list per case")
        for case, (row, wanted) in enumerate(zip(rows_Rn, targets, strict=True)):
            relevant = np.unique(wanted)
            if not len(relevant):
                continue
            self.cases += 1
            if histories is not None:
                self.repeats += bool(np.isin(relevant, histories[case]).any())
            self.short += bool(len(row) < max(self.ks) or (row[: max(self.ks)] < 0).any())
            ranks = np.flatnonzero(np.isin(row, relevant))
            for k in self.ks:
                found = ranks[ranks < k]
                ideal = _discounts(np.arange(min(len(relevant), k))).sum()
                self._sum(f"hr@{k}", float(len(found) > 0))
                self._sum(f"recall@{k}", len(found) / len(relevant))
                self._sum(f"ndcg@{k}", float(_discounts(found).sum() / ideal))
                self._sum(f"mrr@{k}", 1 / (int(found[0]) + 1) if len(found) else 0.0)
        for k in self.ks:
            self._shown.setdefault(k, set()).update(np.unique(rows_Rn[:, :k]).tolist())

    def _sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value
        if self.own is not None:
            self.own.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        """Every metric at every k, and the number of cases."""
        figures: dict[str, float] = {name: value / self.cases for name, value in self._sums.items()}
        for k in self.ks:
            figures[f"coverage@{k}"] = len(self._shown.get(k, set()) - {-1}) / max(self.num_items, 1)
        return {**figures, "cases": self.cases, "repeat_share": self.repeats / max(self.cases, 1), "short_share": self.short / max(self.cases, 1)}


def _discounts(ranks: Rows) -> npt.NDArray[np.float64]:
    return 1 / np.log2(np.asarray(ranks, dtype=np.float64) + 2)
