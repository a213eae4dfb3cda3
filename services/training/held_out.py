"""The held-out test of an alignment: lists and rollouts of the same users before, during and after, with every user's own result.

Legend: U users of the test, V of them whose rollouts are judged, N items of the data set, G rollouts of a user, n length of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.services.training.alignment_guard import Standing
from semantide.services.training.evaluate import Case
from semantide.services.training.prompt_share import PromptShare
from semantide.services.training.rankers import Ranker
from semantide.shared.metrics import RankingMetrics

KS = (10, 50)
_TOGETHER = 64

Rows = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """What rollouts for the test's first users are worth: mean rewards [V] by the optimised reward model and by the judge, and the share of free beams that spell no item."""

    reward_V: FloatArray
    judge_V: FloatArray | None
    invalid_share: float
    gate_rate: float


@dataclass(frozen=True)
class HeldOut:
    """Figures for people, and each user's for the guard."""

    figures: dict[str, float]
    standing: Standing


class HeldOutTest:
    """Ranks for the users of the validation part; ``judge`` lets the policy roll out for the first ``probes`` of them and has that scored."""

    def __init__(
        self,
        ranker: Ranker,
        cases: Sequence[Case],
        counts_N: Rows,
        *,
        exclude_seen: bool,
        judge: Callable[[], Judged],
        tick: Callable[[int, int], None] = lambda done, total: None,
        share: PromptShare | None = None,
    ) -> None:
        """Each rank of a ``share`` ranks for its own users; what comes out is the same on all of them."""
        self._ranker, self._exclude_seen, self._judge, self._tick, self._share = ranker, exclude_seen, judge, tick, share or PromptShare()
        # Histories of one length share a batch, so that attention sees dense blocks.
        self._cases = sorted(cases, key=lambda case: len(case.history))
        self._percentile_N = popularity_percentiles(counts_N)

    def run(self) -> HeldOut:
        """Test the model as it is."""
        judged = self._judge()  # first: a reward model that does not belong here is refused before the long part
        own = self._share.own(self._cases)
        ranked = [np.zeros((0, max(KS)), dtype=np.int64)]
        for begin in range(0, len(own), _TOGETHER):
            batch = own[begin : begin + _TOGETHER]
            told = [case.times for case in batch], [case.actions for case in batch]
            ranked.append(self._ranker.rank([case.history for case in batch], max(KS), self._exclude_seen, *told))
            self._tick(begin + len(batch), len(own))
        lists = self._share.joined(np.concatenate(ranked))
        metrics = RankingMetrics(KS, len(self._percentile_N))
        metrics.add(lists, [case.targets for case in self._cases])
        hits = [bool(np.isin(row[row >= 0], case.targets).any()) for row, case in zip(lists, self._cases, strict=True)]
        top = lists[:, : KS[0]]
        result = metrics.result()
        figures = {f"{name}@{k}": result.get(f"{name}@{k}", 0.0) for name in ("hr", "ndcg", "coverage") for k in KS}
        figures["popularity"] = float(self._percentile_N[top[top >= 0]].mean()) if (top >= 0).any() else 0.0
        figures |= {"reward": float(judged.reward_V.mean()), "gate_rate": judged.gate_rate, "invalid_share": judged.invalid_share}
        if judged.judge_V is not None:
            figures["judge"] = float(judged.judge_V.mean())
        return HeldOut(figures, Standing(np.array(hits, dtype=np.float64), judged.reward_V, judged.judge_V))


def popularity_percentiles(counts_N: Rows) -> FloatArray:
    """How popular each item is: the share of items with fewer training events, half of those with as many included."""
    ordered = np.sort(counts_N)
    below, to = np.searchsorted(ordered, counts_N, side="left"), np.searchsorted(ordered, counts_N, side="right")
    return np.asarray((below + to) / 2 / max(len(counts_N), 1), dtype=np.float64)
