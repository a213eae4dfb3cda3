"""What people truly think: the chance of each reaction to an item, fitted so that a log of the logging policy has the marginals of a real one.

Legend: B people at a moment, S items that each is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from semantide.shared.simulator.chance import Floats
from semantide.shared.simulator.marginals import Marginals
from semantide.shared.simulator.policy import LoggingPolicy
from semantide.shared.simulator.users import Numbers, World

# Log odds per unit: the lasting taste, the topic in the fore, the item's attraction, the person's readiness. The last two give the spread of people's and items' click rates in the real log.
_TASTE, _FOCUS, _ATTRACTION, _READINESS = 2.2, 1.6, 0.8, 0.9
_REPEAT = 2.5  # taken from the log odds of what was opened before
_SAMPLE = 20_000

# After a click: how much of what brought it counts again, how much the item's value does, and how much an attraction that promised too much costs.
_AFTER: Mapping[str, tuple[float, float, float]] = {
    "long_view": (0.5, 0.8, -0.3),
    "like": (0.5, 1.0, -0.3),
    "comment": (0.3, 0.8, 0.0),
    "follow": (0.4, 1.0, -0.3),
    "forward": (0.4, 1.0, -0.3),
    "order": (0.7, 1.0, -0.3),
}
SIGNALS = ("click", *_AFTER, "hate")
"""Reactions, in the order in which a log names them."""


@dataclass(frozen=True)
class Moment:
    """Some people and what each sees.

    ``tired_BS`` counts items of the same topic that this visit has shown before; ``known_BS`` says what was opened before.

    Shapes: ``users_B``, ``focus_B``, ``tabs_B`` [B]; the others [B, S]; ``slots_BS`` places from 0, ``items_BS`` -1 where there is nothing.
    """

    users_B: Numbers
    focus_B: Numbers
    tabs_B: Numbers
    items_BS: Numbers
    slots_BS: Numbers
    tired_BS: Floats
    known_BS: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Chances:
    """``seen``: that an item is looked at. ``click``: that it is then opened. ``after``: of each further signal, once open. ``hate``: of a dislike, once looked at and not opened."""

    seen: Floats
    click: Floats
    after: Mapping[str, Floats]
    hate: Floats


@dataclass(frozen=True)
class Preference:
    """The truth. ``intercepts`` are fitted once for a world."""

    world: World
    intercepts: Mapping[str, float]
    tab_offset: Floats

    @classmethod
    def fit(cls, world: World, policy: LoggingPolicy, marginals: Marginals) -> Preference:
        """With the rates of signals of a real log, as the logging policy would meet them."""
        offset = _log_odds(np.clip(marginals.tab_rate, 0.02, 0.98)) - _log_odds(np.asarray(marginals.rates["click"]))
        blank = cls(world, dict.fromkeys(SIGNALS, 0.0), offset)
        moment = _typical(world, policy, marginals)
        rates = {**marginals.rates, "order": world.config.order_share * marginals.rates["click"]}
        seen = blank.seen(moment)
        wanted = blank.wanted(moment)
        fitted = {"click": _intercept(wanted, seen, rates["click"])}
        click = seen * _chance(wanted + fitted["click"])
        for name in _AFTER:
            fitted[name] = _intercept(blank.after(name, moment, wanted + fitted["click"]), click, rates[name])
        fitted["hate"] = _intercept(-wanted, seen - click, rates["hate"])
        return cls(world, fitted, offset)

    def chances(self, moment: Moment) -> Chances:
        """Of every reaction at this moment; zero where nothing is shown."""
        there = moment.items_BS >= 0
        wanted = self.wanted(moment) + self.intercepts["click"]
        after = {name: _chance(self.after(name, moment, wanted) + self.intercepts[name]) for name in _AFTER}
        dislike = _chance(self.intercepts["click"] - wanted + self.intercepts["hate"])
        return Chances(self.seen(moment) * there, _chance(wanted), after, dislike)

    def seen(self, moment: Moment) -> Floats:
        """How surely each place is looked at: less the further down."""
        attention: Floats = (moment.slots_BS + 1.0) ** -self.world.config.position_bias
        return attention

    def wanted(self, moment: Moment) -> Floats:
        """Log odds of opening, but for the intercept."""
        world, users = self.world, moment.users_B[:, None]
        items_BSD = world.item_ND[moment.items_BS]
        taste = np.einsum("bsd,bd->bs", items_BSD, world.taste_UD[moment.users_B])
        focus = np.einsum("bsd,bd->bs", items_BSD, world.centre_KD[moment.focus_B])
        drawn: Floats = _TASTE * taste + _FOCUS * focus + _ATTRACTION * world.attraction_N[moment.items_BS] + _READINESS * world.readiness_U[users]
        drawn = drawn + self.tab_offset[moment.tabs_B][:, None] - world.config.fatigue * moment.tired_BS - _REPEAT * moment.known_BS
        return drawn

    def after(self, name: str, moment: Moment, wanted: Floats) -> Floats:
        """Log odds of a further signal, but for the intercept."""
        again, value, promise = _AFTER[name]
        return again * wanted + value * self.world.value_N[moment.items_BS] + promise * self.world.attraction_N[moment.items_BS]

    def affinity(self, users_B: Numbers, focus_B: Numbers) -> Floats:
        """Log odds of opening every item [B, N], as far as they lie in the person and the item: what an oracle ranks by."""
        liked = _TASTE * self.world.taste_UD[users_B] + _FOCUS * self.world.centre_KD[focus_B]
        return liked @ self.world.item_ND.T + _ATTRACTION * self.world.attraction_N


def _typical(world: World, policy: LoggingPolicy, marginals: Marginals) -> Moment:
    """What a first page of the logging policy looks like, for many people."""
    rng = np.random.default_rng([world.config.seed, *b"typical"])
    people = rng.integers(0, world.config.users, min(_SAMPLE, 20 * world.config.users))
    users = np.sort(people)
    slots = np.broadcast_to(np.arange(world.config.slots[1]), (len(users), world.config.slots[1]))
    lengths = rng.integers(world.config.slots[0], world.config.slots[1] + 1, len(users))
    items = policy.independent(users, world.config.slots[1], rng)
    tabs = rng.choice(len(marginals.tabs), len(users), p=marginals.tab_share)
    there = slots < lengths[:, None]
    focus = world.focus(users, rng.integers(0, 8, len(users)))
    topics = world.topic_N[items]
    earlier = topics[:, :, None] == topics[:, None, :]
    # Visits of about two pages: half of what is shown comes on a second one.
    tired = (np.tril(earlier, -1).sum(2) * 1.5).astype(np.float64)
    return Moment(users, focus, tabs, np.where(there, items, -1), slots, tired, np.zeros(items.shape, dtype=np.bool_))


def _intercept(drawn: Floats, weight: Floats, rate: float) -> float:
    """The intercept at which a signal with these log odds has this rate, where each place counts with its weight."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (weight * _chance(drawn + middle)).mean() < rate else (low, middle)
    return (low + high) / 2


def _chance(log_odds: Floats) -> Floats:
    chance: Floats = 1 / (1 + np.exp(-log_odds))
    return chance


def _log_odds(chance: Floats) -> Floats:
    odds: Floats = np.log(chance) - np.log1p(-chance)
    return odds
