"""What people truly think: the chance of each reaction to an item, fitted so that a log of the logging policy has the marginals of a real one.

Legend: B people at a moment, S items that each is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from semantide.shared.simulator.chance import Floats
from semantide.shared.simulator.marginals import Marginals
from semantide.shared.simulator.users import Numbers, World

# Log odds per unit: the lasting taste, the topic in the fore, the item's attraction, the person's readiness. The last two give the spread of people's and items' click rates in the real log.
_TASTE, _FOCUS, _ATTRACTION, _READINESS = 4.0, 3.2, 1.5, 2.4
_REPEAT = 2.5  # taken from the log odds of what was opened before

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
    def unfitted(cls, world: World, marginals: Marginals) -> Preference:
        """With intercepts of 0."""
        offset = _log_odds(np.clip(marginals.tab_rate, 0.02, 0.98)) - _log_odds(np.asarray(marginals.rates["click"]))
        return cls(world, dict.fromkeys(SIGNALS, 0.0), offset)

    def fitted(self, moments: Sequence[Moment], marginals: Marginals) -> Preference:
        """With such intercepts that these moments have the rates of signals of a real log."""
        rates = {**marginals.rates, "order": self.world.config.order_share * marginals.rates["click"]}
        there = [moment.items_BS >= 0 for moment in moments]

        def flat(values: Iterable[Floats]) -> Floats:
            return np.concatenate([each[shown] for each, shown in zip(values, there, strict=True)])

        seen, wanted = flat(map(self.seen, moments)), [self.wanted(moment) for moment in moments]
        fitted = {"click": _intercept(flat(wanted), seen, rates["click"])}
        click = seen * _chance(flat(wanted) + fitted["click"])
        for name in _AFTER:
            log_odds = flat(self.after(name, moment, each + fitted["click"]) for moment, each in zip(moments, wanted, strict=True))
            fitted[name] = _intercept(log_odds, click, rates[name])
        fitted["hate"] = _intercept(-flat(wanted), seen - click, rates["hate"])
        return replace(self, intercepts=fitted)

    def chances(self, moment: Moment) -> Chances:
        """Of every reaction at this moment; zero where nothing is shown."""
        there = moment.items_BS >= 0
        wanted = self.wanted(moment) + self.intercepts["click"]
        after = {name: _chance(self.after(name, moment, wanted) + self.intercepts[name]) for name in _AFTER}
        dislike = _chance(self.intercepts["click"] - wanted + self.intercepts["hate"])
        return Chances(self.seen(moment) * there, _chance(wanted), after, dislike)

    def seen(self, moment: Moment) -> Floats:
        """How surely each place is looked at: less the further down."""
        attention = np.power(moment.slots_BS + 1.0, -self.world.config.position_bias).astype(np.float64)
        return np.broadcast_to(attention, moment.items_BS.shape)

    def wanted(self, moment: Moment) -> Floats:
        """Log odds of opening, but for the intercept."""
        world, users = self.world, moment.users_B[:, None]
        items_BSD = world.item_ND[moment.items_BS]
        taste: Floats = np.einsum("bsd,bd->bs", items_BSD, world.taste_UD[moment.users_B])
        focus: Floats = np.einsum("bsd,bd->bs", items_BSD, world.centre_KD[moment.focus_B])
        wanted: Floats = _TASTE * taste + _FOCUS * focus + _ATTRACTION * world.attraction_N[moment.items_BS] + _READINESS * world.readiness_U[users]
        return wanted + self.tab_offset[moment.tabs_B][:, None] - world.config.fatigue * moment.tired_BS - _REPEAT * moment.known_BS

    def after(self, name: str, moment: Moment, wanted: Floats) -> Floats:
        """Log odds of a further signal, but for the intercept."""
        again, value, promise = _AFTER[name]
        return again * wanted + value * self.world.value_N[moment.items_BS] + promise * self.world.attraction_N[moment.items_BS]

    def affinity(self, users_B: Numbers, focus_B: Numbers) -> Floats:
        """Log odds of opening every item [B, N], as far as they lie in the person and the item: what an oracle ranks by."""
        liked = _TASTE * self.world.taste_UD[users_B] + _FOCUS * self.world.centre_KD[focus_B]
        return liked @ self.world.item_ND.T + _ATTRACTION * self.world.attraction_N


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
