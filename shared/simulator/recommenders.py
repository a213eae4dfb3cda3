"""Who may be asked by simulated people, and those that bound what can be reached: chance, what is popular, and an oracle.

Legend: N items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semantide.shared.simulator.chance import Floats, uniform
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.users import Numbers


@dataclass(frozen=True)
class Event:
    """One thing of a person's past: what was done with an item. Exposures without a reaction are none."""

    item: str
    action: str
    time: int


@dataclass(frozen=True)
class Request:
    """A person asks for a page.

    ``history`` is oldest first, ``exclude`` what this visit has shown and what the person has opened before. ``visit`` and ``page`` count from 0; ``focus`` is the topic in the fore, which no real recommender knows.
    """

    user: str
    history: Sequence[Event]
    n: int
    exclude: frozenset[str]
    time: int
    visit: int
    page: int
    focus: int


Recommender = Callable[[Sequence[Request]], Sequence[Sequence[str]]]
"""Lists of item ids, best first, one for each request; of longer ones the beginning counts."""


class Chance:
    """Shows anything."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation.world

    def __call__(self, requests: Sequence[Request]) -> list[list[str]]:
        """See ``Recommender``."""
        return [self._best(request) for request in requests]

    def _best(self, request: Request) -> list[str]:
        user = int(request.user[1:])
        luck_N = uniform(self._world.config.seed, "chance", user, request.visit, request.page, np.arange(self._world.config.items))
        return _allowed(self._world.item_id, np.argsort(luck_N), request)


class Popular:
    """Shows what was opened most often, by the clicks of a log."""

    def __init__(self, simulation: Simulation, clicks: Mapping[str, int]) -> None:
        self._item_id = simulation.world.item_id
        counts_N = np.array([clicks.get(self._item_id(item), 0) for item in range(simulation.config.items)])
        self._order = np.argsort(-counts_N, kind="stable")

    def __call__(self, requests: Sequence[Request]) -> list[list[str]]:
        """See ``Recommender``."""
        return [_allowed(self._item_id, self._order, request) for request in requests]


class Oracle:
    """Knows everybody's taste and mood, and shows what is opened most surely; ``knowing`` 0 to 1 says how much of the truth it sees beside noise."""

    def __init__(self, simulation: Simulation, knowing: float = 1.0) -> None:
        self._simulation, self._knowing = simulation, knowing

    def scores(self, request: Request) -> Floats:
        """Of all items [N], the higher the better."""
        user = np.array([int(request.user[1:])])
        truth_N: Floats = self._simulation.preference.affinity(user, np.array([request.focus]))[0]
        if self._knowing == 1.0:
            return truth_N
        rng = np.random.default_rng([self._simulation.config.seed, 7, int(user[0])])
        blurred: Floats = self._knowing * truth_N + (1 - self._knowing) * truth_N.std() * 2 * rng.normal(size=len(truth_N))
        return blurred

    def __call__(self, requests: Sequence[Request]) -> list[list[str]]:
        """See ``Recommender``."""
        return [_allowed(self._simulation.world.item_id, np.argsort(-self.scores(request), kind="stable"), request) for request in requests]


def _allowed(item_id: Callable[[int], str], order: Numbers, request: Request) -> list[str]:
    chosen: list[str] = []
    for item in order.tolist():
        if len(chosen) == request.n:
            break
        if (name := item_id(item)) not in request.exclude:
            chosen.append(name)
    return chosen
