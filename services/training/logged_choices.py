"""What a model would have earned in a log that another policy wrote: its choice at each place of logged pages, beside the logged one and the chance of that.

A place of a page is a decision. The log showed one item there, with a chance that is known given what it had shown before; the model would show the first of its list that may stand there. Where both are
the same the log's reward is the model's, and stands for 1 / chance of such places. Two questions are asked so:

    places   the model decides at each place by itself, after what the log showed before it: precise, for one choice alone must agree
    pages    the model decides the page: all choices up to a place must agree; what the model alone would earn, of far more variance

Legend: G pages, C places of all pages (decisions), N items of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from semantide.services.training.evaluate import Case
from semantide.services.training.rankers import Ranker
from semantide.shared.dataset import Dataset, Part
from semantide.shared.errors import BadData, Conflict
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import PARTS, Feedback, history_ends
from semantide.shared.off_policy import Decisions, Estimate, cascade_weights, doubly_robust, halves, ips, lift, snips
from semantide.shared.pages import CLICKED_FROM, ORDERED_FROM

IntArray = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Question = Literal["places", "pages"]

REWARDS: Mapping[str, float] = {"clicks": CLICKED_FROM, "orders": ORDERED_FROM}
"""Least intensity that counts, of each reward."""
_SESSION_SECONDS = 1800  # of data sets that do not say what a session is
_PRIOR = 10.0  # exposures of the usual rate that every item begins with, where a reward is foretold
_FEWEST = 50  # effective decisions from which on an interval is to be believed
_TOGETHER = 64


@dataclass(frozen=True)
class LoggedPages:
    """Pages whose places have known chances, each with the history before it.

    ``before`` are items that the same person was shown earlier in the session: a list goes on behind them and does not show them again.

    Shapes: ``cases``, ``before`` one of each page [G]; ``page_C`` ascending, ``place_C``, ``item_C``, ``propensity_C`` (NaN where nobody knows it), ``half_C`` of the people, ``rewards`` of each kind [C]; ``rates_2N``
    what items earned in training of either half of the people, of each kind.
    """

    cases: list[Case]
    before: list[frozenset[int]]
    page_C: IntArray
    place_C: IntArray
    item_C: IntArray
    propensity_C: Floats
    half_C: IntArray
    rewards: Mapping[str, Floats]
    rates_2N: Mapping[str, Floats]

    @property
    def users_C(self) -> IntArray:
        """Whose decision each is."""
        return np.array([case.user for case in self.cases], dtype=np.int64)[self.page_C]

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        feedback: Feedback,
        part: Part,
        question: Question,
        *,
        max_users: int | None = None,
        seed: int = 0,
        events: EventActions | None = None,
    ) -> LoggedPages:
        """The pages of a part, of ``max_users`` drawn people; ``events`` where a ranker looks at what was done.

        A page is of the part in whose time it began: which part an exposure is of depends on when it was answered. Of a page counts what is known from its first place on without a gap, for what stood
        before a place is what its chance is given. Left out are people and moments without a history.

        Raises: Conflict for a data set that does not say how strong its actions are or was not split by time, BadData where no chance is known.
        """
        bounds = [dataset.header.get("valid_time"), dataset.header.get("test_time")]
        if not all(bounds):
            split = dataset.header.get("config", {}).get("split", "by events")
            raise Conflict(
                f"a log says what a model would have earned only if its pages were not chosen by what was clicked, and the split of this data set is {split}, whose parts begin at what was liked: "
                "make one that is split by time (`semantide dataset --set split=temporal`)"
            )
        rows, page_C = _known_places(feedback, np.array(bounds), part, question)
        first = np.flatnonzero(np.append(True, np.diff(page_C) != 0))[: len(rows)]
        users_G, times_G = feedback.users[rows[first]], np.minimum.reduceat(feedback.times[rows], first) if len(rows) else np.zeros(0, np.int64)
        ends_G = history_ends(dataset, users_G, times_G)
        kept_G = ends_G > 0
        people = np.unique(users_G[kept_G])
        if max_users and max_users < len(people):
            kept_G &= np.isin(users_G, np.random.default_rng([seed, 78]).choice(people, max_users, replace=False))
        rows, page_C = rows[kept_G[page_C]], (np.cumsum(kept_G) - 1)[page_C[kept_G[page_C]]]
        if np.isnan(feedback.propensities[rows]).all():
            raise BadData(
                f"no place of the {part} part's pages has a chance that is known: send exposures with the `request_id` of answers that chance had a part in "
                "(SEMANTIDE_SERVING_RANDOMISATION), or with `position` and `propensity`, and make the data set anew"
            )
        numbers = None if events is None else events.numbers_E
        cases = [_case(dataset, int(user), int(end), numbers) for user, end in zip(users_G[kept_G], ends_G[kept_G], strict=True)]
        before = _shown_before(feedback, users_G[kept_G], times_G[kept_G], _session_ms(dataset))
        strength_X = _strength(dataset, feedback)
        rewards = {name: (strength_X[rows] >= least).astype(np.float64) for name, least in REWARDS.items()}
        half_U = halves(np.arange(len(dataset.user_ids))).astype(np.int64)
        rates = {name: _rates(dataset, feedback, half_U, strength_X >= least) for name, least in REWARDS.items()}
        return cls(
            cases,
            before,
            page_C,
            feedback.positions[rows].astype(np.int64),
            feedback.items[rows].astype(np.int64),
            feedback.propensities[rows].astype(np.float64),
            half_U[feedback.users[rows]],
            rewards,
            rates,
        )


def _known_places(feedback: Feedback, bounds: IntArray, part: Part, question: Question) -> tuple[IntArray, IntArray]:
    """Exposures of pages that began in the part and are known from the first place on without a gap, in the order of page and place, and the number of each one's page."""
    rows = np.flatnonzero((feedback.users >= 0) & (feedback.positions >= 0))
    begins_P = np.full(int(feedback.pages.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins_P, feedback.pages, feedback.times)
    rows = rows[np.searchsorted(bounds, begins_P[feedback.pages[rows]], side="right") == PARTS.index(part)]
    rows = rows[np.lexsort((feedback.positions[rows], feedback.pages[rows]))]
    unknown_C = np.isnan(feedback.propensities[rows]) & (question == "pages")
    new = np.append(True, np.diff(feedback.pages[rows]) != 0)[: len(rows)]
    page_C = np.cumsum(new) - 1
    begins_C = np.flatnonzero(new)[page_C]
    broken_C = np.cumsum((feedback.positions[rows] != np.arange(len(rows)) - begins_C) | unknown_C)
    # A page is broken from the first place on that is not what should stand there.
    kept_C = broken_C == np.append(0, broken_C)[begins_C]
    return rows[kept_C], np.unique(page_C[kept_C], return_inverse=True)[1].astype(np.int64)


def _case(dataset: Dataset, user: int, end: int, numbers_E: npt.NDArray[np.integer] | None) -> Case:
    span = slice(int(dataset.offsets[user]), int(dataset.offsets[user]) + end)
    return Case(user, dataset.items[span], np.zeros(0, np.int64), dataset.times[span] // 1000, None if numbers_E is None else numbers_E[span])


def _session_ms(dataset: Dataset) -> int:
    return int(1000 * float(dataset.header.get("config", {}).get("session_gap_seconds", _SESSION_SECONDS)))


def _shown_before(feedback: Feedback, users_G: npt.NDArray[np.int32], times_G: IntArray, session_ms: int) -> list[frozenset[int]]:
    """What each page's person was shown within a session's gap before it."""
    order = np.lexsort((feedback.times, feedback.users))
    users, times, items = feedback.users[order], feedback.times[order], feedback.items[order]
    found = []
    for user, time in zip(users_G.tolist(), times_G.tolist(), strict=True):
        begin, end = np.searchsorted(users, [user, user + 1])
        since, until = begin + np.searchsorted(times[begin:end], [time - session_ms, time])
        found.append(frozenset(items[since:until].tolist()))
    return found


def _strength(dataset: Dataset, feedback: Feedback) -> Floats:
    """Intensity of the strongest signal of each exposure; 0 without any."""
    actions = dataset.header.get("config", {}).get("actions") or {}
    if not actions and feedback.signals:
        raise Conflict("the data set does not say how strong its actions are: make it anew (`semantide dataset`)")
    intensities_S = np.array([float(actions.get(name, 0.0)) for name in feedback.signals])
    return np.asarray((feedback.signals_XS * intensities_S).max(1, initial=0.0), dtype=np.float64)


def _rates(dataset: Dataset, feedback: Feedback, half_U: IntArray, given_X: npt.NDArray[np.bool_]) -> Floats:
    """What each item earned in training [2, N], of people of the one half and of the other, drawn to what all items earned."""
    num_items, trained = len(dataset.item_ids), (feedback.parts == PARTS.index("train")) & (feedback.users >= 0)
    rates = []
    for side in (0, 1):
        mine = trained & (half_U[feedback.users.clip(0)] == side)
        usual = float(given_X[mine].mean()) if mine.any() else 0.0
        shown_N, given_N = (np.bincount(feedback.items[rows], minlength=num_items) for rows in (mine, mine & given_X))
        rates.append((given_N + _PRIOR * usual) / (shown_N + _PRIOR))
    return np.stack(rates)


def choices(
    pages: LoggedPages, ranker: Ranker, question: Question, depth: int, exclude_seen: bool, tick: Callable[[int, int], None] = lambda done, total: None
) -> IntArray:
    """What the model would show at each place [C], -1 where its list of ``depth`` items has ended."""
    chosen_C = np.full(len(pages.page_C), -1, dtype=np.int64)
    starts = np.searchsorted(pages.page_C, np.arange(len(pages.cases) + 1))
    # Histories of one length share a batch, so that attention sees dense blocks.
    order = sorted(range(len(pages.cases)), key=lambda page: len(pages.cases[page].history))
    for begin in range(0, len(order), _TOGETHER):
        batch = [pages.cases[page] for page in order[begin : begin + _TOGETHER]]
        lists = ranker.rank([case.history for case in batch], depth, exclude_seen, [case.times for case in batch], [case.actions for case in batch])
        for page, row in zip(order[begin : begin + _TOGETHER], lists, strict=True):
            own = [item for item in row.tolist() if item >= 0 and item not in pages.before[page]]
            decisions = slice(int(starts[page]), int(starts[page + 1]))
            places, items = pages.place_C[decisions].tolist(), pages.item_C[decisions].tolist()
            chosen_C[decisions] = _of_page(own, places) if question == "pages" else _of_places(own, items)
        tick(begin + len(batch), len(order))
    return chosen_C


def _of_page(own: Sequence[int], places: Sequence[int]) -> list[int]:
    return [own[place] if place < len(own) else -1 for place in places]


def _of_places(own: Sequence[int], shown: Sequence[int]) -> list[int]:
    found, taken, first = [], set[int](), 0
    for item in shown:
        while first < len(own) and own[first] in taken:
            first += 1
        found.append(own[first] if first < len(own) else -1)
        taken.add(item)
    return found


def earned(pages: LoggedPages, chosen_C: IntArray, question: Question) -> dict[str, Any]:
    """What the model would have earned at a place on average, by each estimate, beside what the log earned there; for JSON.

    ``covered``: whether the log gave, as far as anybody can see, all that the model chooses a chance; ``tells``: and enough of it to say what is beyond noise.
    """
    agrees_C, chances_C = (chosen_C == pages.item_C).astype(np.float64), pages.propensity_C
    if question == "pages":
        # Of a very long page the product of all chances is 0 in float64.
        agrees_C, chances_C = cascade_weights(agrees_C, pages.page_C), np.maximum(cascade_weights(chances_C, pages.page_C), np.finfo(np.float64).tiny)
    known = np.flatnonzero(~np.isnan(chances_C))
    users, items, chosen, other = pages.users_C[known], pages.item_C[known], chosen_C[known], 1 - pages.half_C[known]
    agrees, chances, one = agrees_C[known], chances_C[known], np.ones(len(known))
    found: dict[str, Any] = {"agrees": float(agrees.mean()), "users": len(np.unique(users)), "pages": len(np.unique(pages.page_C[known])), "places": len(known)}
    for name, rewards_C in pages.rewards.items():
        rewards, rates_2N = rewards_C[known], pages.rates_2N[name]
        log, decisions = ips(Decisions(rewards, one, one, users)), Decisions(rewards, chances, agrees, users)
        expected = np.where(chosen >= 0, rates_2N[other, chosen.clip(0)], 0.0)
        estimates = {"ips": ips(decisions), "snips": snips(decisions), "doubly_robust": doubly_robust(decisions, rates_2N[other, items], expected)}
        weights, effective = estimates["ips"].mean_weight, estimates["ips"].effective
        found |= {"mean_weight": weights.as_dict(), "effective": effective, "covered": weights.high >= 1, "tells": weights.high >= 1 and effective >= _FEWEST}
        found[name] = {"log": log.interval.as_dict(), **{kind: _told(each, log, found["tells"]) for kind, each in estimates.items()}}
    return found


def _told(estimate: Estimate, log: Estimate, tells: bool) -> dict[str, Any]:
    """An estimate and how it stands to the log's own earnings, which only a log that ``tells`` can say is more than noise."""
    against = lift(estimate, log)
    return {**estimate.interval.as_dict(), "lift": {**against.as_dict(), "beyond_noise": tells and against.beyond_noise}}
