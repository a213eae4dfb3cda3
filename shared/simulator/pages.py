"""Visits: people come, are shown pages, react, tire of what they have seen, and go on or leave.

All luck is addressed by person, visit, page and item or place, so whoever chooses the items meets the same people in the same mood.
Legend: B people, R of them who look at a page, S places of a page, N items, K topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.shared.simulator.chance import Floats, uniform
from semantide.shared.simulator.marginals import Marginals
from semantide.shared.simulator.preference import SIGNALS, Moment, Preference
from semantide.shared.simulator.users import Numbers, World

Booleans = npt.NDArray[np.bool_]

MOST_PAGES = 8
"""Of one visit."""
_GO_ON, _JOY = 0.3, 2.5  # log odds of a next page, and what each share of opened items adds
PAGE_MS, _PLACE_MS, DAY_MS = 90_000, 4_000, 86_400_000


@dataclass(frozen=True)
class Reactions:
    """To one page each, as it was at this ``moment``. ``signals`` by name; ``watched`` is the share of an item that was played; ``expected`` the chances of a click and of an order before anybody looked.

    Shapes: all [R, S]; ``stays_R`` [R] says who asks for another page.
    """

    signals: Mapping[str, Booleans]
    watched: Floats
    expected: Mapping[str, Floats]
    stays_R: Booleans
    moment: Moment


class Visits:
    """Some people, and what they remember. ``opened_BN`` is their own copy."""

    def __init__(self, preference: Preference, marginals: Marginals, users_B: Numbers, opened_BN: Booleans | None = None) -> None:
        self.world: World = preference.world
        self._preference, self._marginals, self.users_B = preference, marginals, users_B
        self.opened_BN = np.zeros((len(users_B), self.world.config.items), dtype=np.bool_) if opened_BN is None else opened_BN.copy()
        self._tired_BK = np.zeros((len(users_B), self.world.config.topics), dtype=np.int64)
        self._focus_B = np.zeros(len(users_B), dtype=np.int64)
        self.session_B = np.zeros(len(users_B), dtype=np.int64)

    def begin(self, session_B: Numbers) -> None:
        """Everybody's visit of this number begins; what tired people is forgotten."""
        self.session_B = session_B
        self._focus_B = self.world.focus(self.users_B, session_B)
        self._tired_BK[:] = 0

    def lengths(self, rows_R: Numbers, page: int) -> Numbers:
        """How many items these people's next page has."""
        least, most = self.world.config.slots
        luck = uniform(self.world.config.seed, "length", self.users_B[rows_R], self.session_B[rows_R], page)
        return least + np.minimum((luck * (most - least + 1)).astype(np.int64), most - least)

    def tabs(self, rows_R: Numbers) -> Numbers:
        """The surface on which each visit takes place."""
        luck = uniform(self.world.config.seed, "tab", self.users_B[rows_R], self.session_B[rows_R])
        return np.minimum(np.searchsorted(np.cumsum(self._marginals.tab_share), luck, side="right"), len(self._marginals.tabs) - 1)

    def times(self, rows_R: Numbers, day_R: Numbers, page: int) -> Numbers:
        """When each page is shown, milliseconds since 1970."""
        config, users, session_R = self.world.config, self.users_B[rows_R], self.session_B[rows_R]
        return config.start_ms + day_R * DAY_MS + time_of_day(config.seed, self._marginals, users, session_R) + page * PAGE_MS

    def focus(self, rows_R: Numbers) -> Numbers:
        """The topic in the fore of each visit."""
        return self._focus_B[rows_R]

    def look(self, rows_R: Numbers, items_RS: Numbers, page: int) -> Reactions:
        """Show a page to each of these people and let them react; -1 where nothing is."""
        there = items_RS >= 0
        topics = np.where(there, self.world.topic_N[items_RS], -1)
        slots = np.broadcast_to(np.arange(items_RS.shape[1]), items_RS.shape)
        before = np.tril(topics[:, :, None] == topics[:, None, :], -1).sum(2)
        tired = self._tired_BK[rows_R[:, None], topics] + before
        moment = Moment(
            self.users_B[rows_R], self._focus_B[rows_R], self.tabs(rows_R), items_RS, slots, tired.astype(np.float64), self.opened_BN[rows_R[:, None], items_RS]
        )
        chances = self._preference.chances(moment)
        address = self.users_B[rows_R][:, None], self.session_B[rows_R][:, None], page
        seed = self.world.config.seed
        looked = uniform(seed, "look", *address, slots) < chances.seen
        click = looked & (uniform(seed, "click", *address, items_RS) < chances.click)
        signals = {"click": click}
        for name, chance in chances.after.items():
            signals[name] = click & (uniform(seed, name, *address, items_RS) < chance)
        signals["hate"] = looked & ~click & (uniform(seed, "hate", *address, items_RS) < chances.hate)
        assert tuple(signals) == SIGNALS
        self._remember(rows_R, items_RS, topics, click)
        opened = click.sum(1) / np.maximum(there.sum(1), 1)
        odds = _GO_ON + _JOY * (opened - self._marginals.rates["click"])
        stays = (uniform(seed, "stay", self.users_B[rows_R], self.session_B[rows_R], page) < 1 / (1 + np.exp(-odds))) & (page + 1 < MOST_PAGES)
        expected = {"click": chances.seen * chances.click, "order": chances.seen * chances.click * chances.after["order"]}
        return Reactions(signals, self._watched(signals, uniform(seed, "watch", *address, items_RS)), expected, stays, moment)

    def _remember(self, rows_R: Numbers, items_RS: Numbers, topics_RS: Numbers, click: Booleans) -> None:
        row, place = np.nonzero(click)
        self.opened_BN[rows_R[row], items_RS[row, place]] = True
        row, place = np.nonzero(items_RS >= 0)
        np.add.at(self._tired_BK, (rows_R[row], topics_RS[row, place]), 1)

    def _watched(self, signals: Mapping[str, Booleans], luck: Floats) -> Floats:
        """Shares with the real log's quantiles: what was left alone has the lowest, long views the highest."""
        click, long_view = self._marginals.rates["click"], self._marginals.rates["long_view"]
        low = np.where(signals["long_view"], 1 - long_view, np.where(signals["click"], 1 - click, 0.0))
        high = np.where(signals["long_view"], 1.0, np.where(signals["click"], 1 - long_view, 1 - click))
        shares: Floats = np.interp(low + luck * (high - low), *self._marginals.watch_ratio)
        return np.round(shares, 4)


def time_of_day(seed: int, marginals: Marginals, users: Numbers, visits: Numbers) -> Numbers:
    """When in its day each visit would begin, milliseconds; users and numbers of visits broadcast against each other."""
    hour = np.minimum(np.searchsorted(np.cumsum(marginals.hour_share), uniform(seed, "hour", users, visits), side="right"), 23)
    begins: Numbers = ((hour + uniform(seed, "minute", users, visits)) * 3_600_000).astype(np.int64)
    return begins


def moments(page_R: Numbers, places: int) -> Numbers:
    """When each place of a page is reached, from the page's own time on [R, S]."""
    return page_R[:, None] + np.arange(places) * _PLACE_MS
