"""The logging policy: what a modest recommender showed while the log was written, with the chance of every choice.

Items are drawn without replacement with fixed weights per person, a softmax of what is popular and of a rough guess of taste, mixed with a uniform share. What a person has been shown does not come again.
Legend: B people, N items, S places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semantide.shared.simulator.chance import Floats, uniform
from semantide.shared.simulator.users import Numbers, World

_POPULARITY = 1.2
_GUESS = 0.8  # error of the guess of taste, against the taste itself
_DRAWS = 64  # for one page, before places are filled exactly


@dataclass(frozen=True)
class LoggingPolicy:
    """Shows items; what it did not know is in the world."""

    world: World

    def weights(self, users_B: Numbers) -> Floats:
        """Chance of each item [B, N] as the first one that somebody new is shown; rows sum to 1."""
        config = self.world.config
        noise_BD = np.stack([_normal(config.seed, "guess", users_B, column) for column in range(config.dimensions)], 1) / np.sqrt(config.dimensions)
        guess_BD = self.world.taste_UD[users_B] + _GUESS * noise_BD
        # Not a matrix product: the last digits of that depend on how many people are looked at together.
        liked_BN: Floats = np.einsum("bd,nd->bn", guess_BD, self.world.item_ND)
        score_BN = config.sharpness * liked_BN + _POPULARITY * self.world.popularity_N
        score_BN = np.exp(score_BN - score_BN.max(1, keepdims=True))
        mixed: Floats = (1 - config.uniform_share) * score_BN / score_BN.sum(1, keepdims=True) + config.uniform_share / config.items
        return mixed


class Shelf:
    """What the logging policy has left to show to some people."""

    def __init__(self, policy: LoggingPolicy, users_B: Numbers) -> None:
        self._config, self._users_B = policy.world.config, users_B
        self._weight_BN = policy.weights(users_B)
        running_BN = np.cumsum(self._weight_BN, axis=1)
        running_BN /= running_BN[:, -1:]
        # One ascending row of all people's running sums: a draw for person b is looked up between b and b + 1.
        self._flat = (running_BN + np.arange(len(users_B))[:, None]).reshape(-1)
        self._shown_BN = np.zeros(self._weight_BN.shape, dtype=np.bool_)
        self._gone_B = np.zeros(len(users_B))

    def draw(self, rows_R: Numbers, lengths_R: Numbers, session_R: Numbers, page_R: Numbers) -> tuple[Numbers, Floats]:
        """Items [R, S] for these people's next page, and the chance of each given what was shown before it; -1 and 0 past a page's length.

        ``rows_R`` are places among this shelf's people.
        """
        width, num_items = int(lengths_R.max(initial=0)), self._config.items
        items_RS, chance_RS = np.full((len(rows_R), width), -1, dtype=np.int64), np.zeros((len(rows_R), width))
        # Nobody can be shown more than there is: the shelf is filled again.
        short = (~self._shown_BN[rows_R]).sum(1) < lengths_R
        self._shown_BN[rows_R[short]], self._gone_B[rows_R[short]] = False, 0.0
        filled_R = np.zeros(len(rows_R), dtype=np.int64)
        # To draw again what was drawn before is to draw from what is left.
        drawn = uniform(self._config.seed, "show", self._users_B[rows_R][:, None], session_R[:, None], page_R[:, None], np.arange(_DRAWS))
        found = np.searchsorted(self._flat, drawn + rows_R[:, None], side="right") - rows_R[:, None] * num_items
        found = np.clip(found, 0, num_items - 1)
        for column in range(_DRAWS):
            takes = np.flatnonzero((filled_R < lengths_R) & ~self._shown_BN[rows_R, found[:, column]])
            if len(takes):
                self._put(rows_R, takes, found[takes, column], filled_R, items_RS, chance_RS)
            if (filled_R >= lengths_R).all():
                return items_RS, chance_RS
        for place in np.flatnonzero(filled_R < lengths_R).tolist():
            self._fill(place, rows_R, lengths_R, session_R, page_R, filled_R, items_RS, chance_RS)
        return items_RS, chance_RS

    def _fill(
        self, place: int, rows_R: Numbers, lengths_R: Numbers, session_R: Numbers, page_R: Numbers, filled_R: Numbers, items_RS: Numbers, chance_RS: Floats
    ) -> None:
        """Draw the rest of one page among what is left, where little is."""
        row, at = int(rows_R[place]), np.array([place])
        while filled_R[place] < lengths_R[place]:
            left_N = self._weight_BN[row] * ~self._shown_BN[row]
            luck = uniform(self._config.seed, "fill", self._users_B[row], session_R[place], page_R[place], filled_R[place])
            running_N = np.cumsum(left_N)
            item = int(np.searchsorted(running_N, luck * running_N[-1], side="right"))
            self._put(rows_R, at, np.array([min(item, int(np.flatnonzero(left_N)[-1]))]), filled_R, items_RS, chance_RS)

    def _put(self, rows_R: Numbers, takes: Numbers, items: Numbers, filled_R: Numbers, items_RS: Numbers, chance_RS: Floats) -> None:
        rows, slots = rows_R[takes], filled_R[takes]
        weight = self._weight_BN[rows, items]
        items_RS[takes, slots] = items
        chance_RS[takes, slots] = weight / np.maximum(1 - self._gone_B[rows], weight)
        self._gone_B[rows] += weight
        self._shown_BN[rows, items] = True
        filled_R[takes] += 1


def _normal(seed: int, purpose: str, *address: object) -> Floats:
    """Standard normal numbers by address (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-uniform(seed, purpose + "-r", *address)))  # type: ignore[arg-type]
    normal: Floats = radius * np.cos(2 * np.pi * uniform(seed, purpose + "-a", *address))  # type: ignore[arg-type]
    return normal
