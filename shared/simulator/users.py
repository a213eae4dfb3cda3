"""People and items: what each likes and is, in numbers that only the simulator knows.

Items lie near the centres of topics; a person's taste is a mixture of a few topics, and each visit has one of these in the fore. An item also has an attraction, which makes people
open it whatever they like, and a value, which shows once it is open: the two are independent, so a recommender that learns from clicks alone is misled.
Legend: U users, N items, K topics, D size of the latent vectors, I interests of a person.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from semantide.shared.simulator.chance import Floats, uniform

Numbers = npt.NDArray[np.int64]

_INTERESTS = 3
_SPREAD = 0.7  # of items about the centre of their topic, and of tastes about their mixture
_SWITCH = 0.35  # chance that a visit brings another interest to the fore


@dataclass(frozen=True)
class SimulatorConfig:
    """A world, and the log that is written of it.

    ``order_share`` of clicks become orders (a video log has none to be fitted to); ``position_bias`` is the exponent by which attention falls with the place, ``fatigue`` what each item of a topic takes from the
    next one's log odds within a visit. ``sharpness`` of the logging policy: 0 shows what is popular, more shows what people like. ``uniform_share`` of its draws ignore both.
    ``answer_seconds`` is the mean time from an exposure to its answer, which is then an event of its own; 0 writes both as one.
    Units: ``sessions`` a user on average, within ``days``; ``start_ms`` milliseconds since 1970; ``slots`` of a page, least and most.
    """

    users: int = 2000
    items: int = 2000
    topics: int = 24
    dimensions: int = 8
    sessions: float = 8.0
    days: int = 14
    start_ms: int = 1_750_000_000_000
    slots: tuple[int, int] = (5, 10)
    order_share: float = 0.1
    position_bias: float = 0.2
    fatigue: float = 0.15
    sharpness: float = 2.0
    uniform_share: float = 0.05
    answer_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("items", 2), ("topics", 1), ("dimensions", 2), ("days", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {least}")
        if not 1 <= self.slots[0] <= self.slots[1]:
            raise ValueError(f"slots is {list(self.slots)}: give the least and the most items of a page, such as [5, 10]")
        if self.items < 2 * self.slots[1]:
            raise ValueError(f"items is {self.items}: a world needs at least two pages of them, {2 * self.slots[1]}")
        if not 0 < self.order_share < 1 or not 0 < self.uniform_share <= 1:
            raise ValueError(f"order_share is {self.order_share} and uniform_share {self.uniform_share}: give shares above 0, below or up to 1")
        if self.sessions <= 0 or self.position_bias < 0 or self.fatigue < 0 or self.sharpness < 0 or self.answer_seconds < 0 or self.seed < 0:
            raise ValueError("sessions must be above 0; position_bias, fatigue, sharpness, answer_seconds and seed not below it")


@dataclass(frozen=True)
class World:
    """Everybody and everything. A function of its configuration."""

    config: SimulatorConfig

    @cached_property
    def centre_KD(self) -> Floats:
        """Where each topic lies."""
        return _directions(self._rng("topics").normal(size=(self.config.topics, self.config.dimensions)))

    @cached_property
    def topic_N(self) -> Numbers:
        """Each item's topic; some topics have many more items than others."""
        weight_K = 1 / np.arange(2, self.config.topics + 2)
        return self._rng("topic").choice(self.config.topics, self.config.items, p=weight_K / weight_K.sum())

    @cached_property
    def item_ND(self) -> Floats:
        """Where each item lies."""
        noise_ND = self._rng("items").normal(size=(self.config.items, self.config.dimensions)) / np.sqrt(self.config.dimensions)
        return _directions(self.centre_KD[self.topic_N] + _SPREAD * noise_ND)

    @cached_property
    def attraction_N(self) -> Floats:
        """How much an item makes people open it, standard normal."""
        return self._rng("attraction").normal(size=self.config.items)

    @cached_property
    def value_N(self) -> Floats:
        """How good an item proves to be, standard normal."""
        return self._rng("value").normal(size=self.config.items)

    @cached_property
    def popularity_N(self) -> Floats:
        """How well known an item is, standard normal; attraction and value are behind a part of it."""
        noise_N: Floats = self._rng("popularity").normal(size=self.config.items)
        popularity_N: Floats = 0.5 * self.attraction_N + 0.5 * self.value_N + 0.5**0.5 * noise_N
        return popularity_N

    @cached_property
    def duration_quantile_N(self) -> Floats:
        """Rank of each item's length among all, 0 to 1."""
        return self._rng("duration").random(self.config.items)

    @cached_property
    def interests_UI(self) -> Numbers:
        """Topics that each person cares for, the dearest first."""
        keys_UK = self._rng("interests").random((self.config.users, self.config.topics))
        return np.argsort(keys_UK, axis=1)[:, : min(_INTERESTS, self.config.topics)]

    @cached_property
    def taste_UD(self) -> Floats:
        """What each person likes at all times."""
        weight_I = np.array([0.5, 0.3, 0.2])[: self.interests_UI.shape[1]]
        noise_UD = self._rng("taste").normal(size=(self.config.users, self.config.dimensions)) / np.sqrt(self.config.dimensions)
        mixture_UD: Floats = np.einsum("i,uid->ud", weight_I, self.centre_KD[self.interests_UI])
        return _directions(mixture_UD + 0.5 * _SPREAD * noise_UD)

    @cached_property
    def readiness_U(self) -> Floats:
        """How readily each person opens anything, standard normal."""
        return self._rng("readiness").normal(size=self.config.users)

    @cached_property
    def sessions_U(self) -> Numbers:
        """Visits of each person in the log; a few people come far more often than most."""
        draws_U = self._rng("activity").lognormal(-0.32, 0.8, self.config.users)  # of mean 1
        return np.clip(np.rint(self.config.sessions * draws_U), 1, np.ceil(8 * self.config.sessions)).astype(np.int64)

    def focus(self, users_B: Numbers, sessions_B: Numbers) -> Numbers:
        """The topic that is in the fore for each of these people at their visit of this number."""
        interests_BI = self.interests_UI[users_B]
        which_B = np.zeros(len(users_B), dtype=np.int64)
        for session in range(int(sessions_B.max(initial=0)) + 1):
            # Dearer interests come back more often.
            drawn_B = np.minimum(
                (uniform(self.config.seed, "interest", users_B, session) ** 1.5 * interests_BI.shape[1]).astype(np.int64), interests_BI.shape[1] - 1
            )
            changes_B = (uniform(self.config.seed, "switch", users_B, session) < _SWITCH) | (session == 0)
            which_B = np.where(changes_B & (session <= sessions_B), drawn_B, which_B)
        return interests_BI[np.arange(len(users_B)), which_B]

    def user_id(self, user: int) -> str:
        """What a log calls a person."""
        return f"u{user}"

    def item_id(self, item: int) -> str:
        """What a log calls an item."""
        return f"v{item}"

    def item_row(self, item_id: str) -> int | None:
        """The item that a log calls so."""
        number = item_id[1:]
        row = int(number) if item_id[:1] == "v" and number.isdigit() else -1
        return row if 0 <= row < self.config.items and self.item_id(row) == item_id else None

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, *purpose.encode()])


def _directions(vectors: Floats) -> Floats:
    directions: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions
