"""Full-ranking evaluation of any ranker on the cases of one part of a data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from semantide.services.training.rankers import Ranker
from semantide.shared.dataset import Dataset, Part
from semantide.shared.metrics import RankingMetrics
from semantide.shared.models.quantised import Weights

Rows = npt.NDArray[np.integer]

METRIC = re.compile(r"(hr|recall|ndcg|mrr)@([1-9][0-9]{0,3})")
"""Figures that every case has of its own."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What an evaluation measures."""

    ks: tuple[int, ...] = (1, 5, 10, 50)
    part: Literal["valid", "test"] = "test"
    beam_width: int = 50
    max_users: int | None = None
    """Users drawn by the job's seed; None: all."""
    min_targets: int = 1
    """Least items that a user must have in the part: 2 leaves those whose held-out page has several."""
    weights: Weights = "float32"
    """A shorter form of the generator's weights that is measured beside float32, as serving would use it."""

    logged: Literal["", "places", "pages"] = ""
    """Ask the log instead what the models would have earned: at each place of its pages behind what the log showed there, or with pages of their own."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    """Judge the input ``model`` against ``live``: for each metric, such as hr@50, the share of the live model's figure that may be lost."""
    publish: bool = False
    """With ``bounds``: tell serving, which promotes the model where it is not worse."""

    def __post_init__(self) -> None:
        for metric, share in self.bounds.items():
            if not METRIC.fullmatch(metric) or isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
                raise ValueError(f"bounds has {metric!r}: {share!r}: give metrics such as hr@50 or ndcg@50 with the share that may be lost, from 0 to below 1")
        if self.publish and not self.bounds:
            raise ValueError('publish is set without bounds: say what may be lost, as in {"hr@50": 0.02}')
        if self.logged not in ("", "places", "pages"):
            raise ValueError(f"logged is {self.logged!r}: give 'places' or 'pages', or leave it out")
        if self.logged and self.bounds:
            raise ValueError("logged is set with bounds: bounds judge rankings of held-out items, leave one of the two out")
        if not self.ks or any(isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= 10_000 for k in self.ks):
            raise ValueError(f"ks is {list(self.ks)}: give list lengths from 1 to 10000, such as [1, 5, 10, 50]")
        if self.weights not in ("float32", "bfloat16", "int8"):
            raise ValueError(f"weights is {self.weights!r}: give 'float32', 'bfloat16' or 'int8'")
        if self.part not in ("valid", "test"):
            raise ValueError(f"part is {self.part!r}: give 'valid' or 'test'")
        for name, value in (("beam_width", self.beam_width), ("max_users", self.max_users), ("min_targets", self.min_targets)):
            if (value is None and name != "max_users") or (value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)):
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")

    @classmethod
    def of(cls, changes: dict[str, Any]) -> EvaluateConfig:
        """From a job's ``config``.

        Raises: ValueError that names the field.
        """
        known = [known_field.name for known_field in fields(cls)]
        for name in changes:
            if name not in known:
                raise ValueError(f"config field {name!r} is unknown: known are {', '.join(known)}")
        values = dict(changes)
        if "ks" in values:
            if not isinstance(values["ks"], (list, tuple)):
                raise ValueError(f"ks is {values['ks']!r}: give a list such as [1, 5, 10, 50]")
            values["ks"] = tuple(values["ks"])
        if "bounds" in values and not isinstance(values["bounds"], dict):
            raise ValueError(f'bounds is {values["bounds"]!r}: give an object such as {{"hr@50": 0.02}}')
        if values.get("bounds"):
            judged = {int(metric.rpartition("@")[2]) for metric in values["bounds"] if METRIC.fullmatch(metric)}
            values["ks"] = tuple(sorted({*values.get("ks", (10,)), *judged}))
            values["beam_width"] = max([values.get("beam_width", 50), *judged])
        return cls(**values)


@dataclass(frozen=True)
class Case:
    """One user's history and what came after it; rows of the data set's item table.

    ``actions`` are their numbers in ``EventActions``, None where nobody looks at them.
    Units: ``times`` of the history's events, seconds; None where unknown.
    """

    user: int
    history: Rows
    targets: Rows
    times: Rows | None = None
    actions: Rows | None = None


def cases_of(dataset: Dataset, part: Part, max_users: int | None = None, seed: int = 0, actions_E: Rows | None = None, *, min_targets: int = 1) -> list[Case]:
    """The cases of a part with so many targets, or of ``max_users`` drawn users; ``actions_E`` numbers the actions of all events, where a ranker looks at them."""

    def done(user: int, length: int) -> Rows | None:
        first = int(dataset.offsets[user])
        return None if actions_E is None else actions_E[first : first + length]

    cases = [Case(*case, dataset.case_times(case[0], part) // 1000, done(case[0], len(case[1]))) for case in dataset.cases(part) if len(case[2]) >= min_targets]
    if max_users and max_users < len(cases):
        chosen = np.random.default_rng([seed, 77]).choice(len(cases), max_users, replace=False)
        cases = [cases[index] for index in np.sort(chosen)]
    return cases


def evaluate(
    ranker: Ranker,
    cases: Sequence[Case],
    *,
    ks: tuple[int, ...],
    num_items: int,
    exclude_seen: bool,
    cases_per_batch: int = 64,
    tick: Callable[[int, int], None] = lambda done, total: None,
    own: dict[str, list[float]] | None = None,
) -> dict[str, float]:
    """All metrics of a ranker; with ``exclude_seen`` no item of a history is recommended again.

    ``own`` is filled with each case's figures and its ``user``; the same cases come in the same order for every ranker.
    """
    metrics = RankingMetrics(ks, num_items, own=own)
    # Histories of one length share a batch, so that attention sees dense blocks.
    ordered = sorted(cases, key=lambda case: len(case.history))
    for begin in range(0, len(ordered), cases_per_batch):
        batch = ordered[begin : begin + cases_per_batch]
        lists = ranker.rank([case.history for case in batch], max(ks), exclude_seen, [case.times for case in batch], [case.actions for case in batch])
        metrics.add(lists, [case.targets for case in batch], [case.history for case in batch])
        tick(begin + len(batch), len(ordered))
    if own is not None:
        own["user"] = [case.user for case in ordered if len(case.targets)]
    return metrics.result()
