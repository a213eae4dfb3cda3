"""Recommenders before the same simulated people: what each of them is truly worth, by clicks and orders.

The log is what everybody has lived through; then each recommender meets the same people, at the same hours and with the same luck, and only what they are shown differs. So differences are
paired by person, and far smaller ones are beyond chance than in a test that divides people.
Legend: B people of a block, S places of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from semantide.shared.paired import Interval, lift, mean
from semantide.shared.simulator.chance import Floats
from semantide.shared.simulator.log import STRENGTH, Simulation
from semantide.shared.simulator.pages import Booleans, Visits
from semantide.shared.simulator.recommenders import Event, Recommender, Request
from semantide.shared.simulator.users import Numbers

FIGURES = ("clicks", "orders", "expected_clicks", "expected_orders", "pages", "exposures", "short", "foreign")
"""Of each person: the expected ones are chances added up, without the luck of the draw; ``short`` are places that stayed empty, ``foreign`` items that the world does not have."""


@dataclass(frozen=True)
class Arm:
    """What a recommender did, summed by person over all visits.

    Shapes: each of ``figures`` [U].
    """

    visits: int
    figures: Mapping[str, Floats]

    def per_visit(self, figure: str) -> Interval:
        """Mean of a figure for one visit, with its 95 % interval over people."""
        return mean(self.figures[figure] / self.visits)


@dataclass(frozen=True)
class ABTest:
    """All recommenders beside each other; ``base`` names the one that the others are compared with."""

    base: str
    arms: Mapping[str, Arm]

    def lift(self, name: str, figure: str) -> Interval:
        """By how much of the base's figure another one is better, paired by person, with its 95 % interval."""
        return lift(self.arms[name].figures[figure], self.arms[self.base].figures[figure])

    def rows(self) -> list[dict[str, float | str]]:
        """A table: one row for each recommender."""
        rows: list[dict[str, float | str]] = []
        for name, arm in self.arms.items():
            row: dict[str, float | str] = {"recommender": name}
            for figure in ("clicks", "orders"):
                row[figure] = arm.per_visit(figure).value
                found = self.lift(name, figure)
                row |= {f"{figure}_lift": found.value, f"{figure}_lift_low": found.low, f"{figure}_lift_high": found.high}
            row |= {"pages": arm.per_visit("pages").value, "exposures": arm.per_visit("exposures").value}
            rows.append(row)
        return rows


def ab_test(
    simulation: Simulation,
    recommenders: Mapping[str, Recommender],
    *,
    users: int | None = None,
    visits: int = 4,
    history: int = 200,
    base: str | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> ABTest:
    """Let the first ``users`` people, or all, visit each recommender ``visits`` times after the log has ended.

    A recommender reads at most the last ``history`` events of a person.

    Raises: ValueError without recommenders or people, or for a base that is none of them.
    """
    if users is not None and users < 1:
        raise ValueError(f"users is {users}: let at least one person visit, or leave it out for all of them")
    base = base if base is not None else next(iter(recommenders), "")
    if base not in recommenders or visits < 1:
        raise ValueError(f"base is {base!r} and visits {visits}: name one of the recommenders ({', '.join(recommenders) or 'none'}), and at least one visit")
    found: dict[str, list[dict[str, Floats]]] = {name: [] for name in recommenders}
    for block in simulation.blocks():
        block = block[block < (simulation.config.users if users is None else users)]
        if not len(block):
            break
        past = _lived(simulation, block)
        for name, recommend in recommenders.items():
            found[name].append(_Trial(simulation, block, past, history).run(recommend, visits))
        tick(int(block[-1]) + 1, simulation.config.users if users is None else users)
    arms = {name: Arm(visits, {figure: np.concatenate([part[figure] for part in parts]) for figure in FIGURES}) for name, parts in found.items()}
    return ABTest(base, arms)


@dataclass(frozen=True)
class _Past:
    """What people have done when the log ends."""

    events: list[list[Event]]
    opened_BN: Booleans


def _lived(simulation: Simulation, block: Numbers) -> _Past:
    tables: list[pa.Table] = []
    opened = np.zeros((len(block), simulation.config.items), dtype=np.bool_)
    for visits, table in simulation.pages(block):
        tables.append(table.select(["user", "item", "action", "time"]))
        opened = visits.opened_BN
    events: list[list[Event]] = [[] for _ in block]
    if tables:
        log = pa.concat_tables(tables).sort_by("time")
        for user, item, action, time in zip(*(log[name].to_pylist() for name in ("user", "item", "action", "time")), strict=True):
            if action != "exposure":
                events[int(user[1:]) - int(block[0])].append(Event(item, action, time))
    return _Past(events, opened)


class _Trial:
    """One recommender before some people."""

    def __init__(self, simulation: Simulation, block: Numbers, past: _Past, history: int) -> None:
        self._simulation, self._block, self._length = simulation, block, history
        self._visits = Visits(simulation.preference, simulation.marginals, block, past.opened_BN)
        self._events = [list(events) for events in past.events]
        self._opened = [{event.item for event in events if event.action != "hate"} for events in past.events]
        self._sums = {figure: np.zeros(len(block)) for figure in FIGURES}

    def run(self, recommend: Recommender, visits: int) -> dict[str, Floats]:
        config = self._simulation.config
        logged = self._simulation.world.sessions_U[self._block]
        for visit in range(visits):
            self._visits.begin(logged + visit)
            shown: list[set[str]] = [set() for _ in self._block]
            rows, page = np.arange(len(self._block)), 0
            while len(rows):
                times = self._visits.times(rows, np.full(len(rows), config.days + visit), page)
                requests = self._requests(rows, times, shown, visit, page)
                rows = self._shown(rows, requests, recommend(requests), shown, page)
                page += 1
        return self._sums

    def _requests(self, rows: Numbers, times: Numbers, shown: Sequence[set[str]], visit: int, page: int) -> list[Request]:
        lengths, focus, world = self._visits.lengths(rows, page), self._visits.focus(rows), self._simulation.world
        return [
            Request(
                world.user_id(int(self._block[row])),
                self._events[row][-self._length :],
                int(n),
                frozenset(shown[row] | self._opened[row]),
                int(time),
                visit,
                page,
                int(topic),
            )
            for row, n, time, topic in zip(rows.tolist(), lengths, times, focus, strict=True)
        ]

    def _shown(self, rows: Numbers, requests: Sequence[Request], lists: Sequence[Sequence[str]], shown: Sequence[set[str]], page: int) -> Numbers:
        if len(lists) != len(requests):
            raise ValueError(f"a recommender gave {len(lists)} lists for {len(requests)} requests: give one list for each, empty ones too")
        items = np.full((len(rows), max(request.n for request in requests)), -1, dtype=np.int64)
        for place, (row, request, names) in enumerate(zip(rows.tolist(), requests, lists, strict=True)):
            found = [self._simulation.world.item_row(name) for name in dict.fromkeys(names)]
            known = [item for item in found if item is not None][: request.n]
            items[place, : len(known)] = known
            self._sums["foreign"][row] += len(found) - sum(item is not None for item in found)
            self._sums["short"][row] += request.n - len(known)
        reactions = self._visits.look(rows, items, page)
        for figure, values in (
            ("clicks", reactions.signals["click"]),
            ("orders", reactions.signals["order"]),
            ("expected_clicks", reactions.expected["click"]),
            ("expected_orders", reactions.expected["order"]),
            ("exposures", items >= 0),
        ):
            self._sums[figure][rows] += np.where(items >= 0, values, 0).sum(1)
        self._sums["pages"][rows] += 1
        for place, row in enumerate(rows.tolist()):
            self._note(row, items[place], {name: signal[place] for name, signal in reactions.signals.items()}, requests[place].time, shown[row])
        return rows[reactions.stays_R]

    def _note(self, row: int, items: Numbers, signals: Mapping[str, Booleans], time: int, shown: set[str]) -> None:
        """What a person remembers of a page."""
        for slot, item in enumerate(items.tolist()):
            if item < 0:
                continue
            name = self._simulation.world.item_id(item)
            shown.add(name)
            action = strongest({signal for signal, happened in signals.items() if happened[slot]})
            if action != "exposure":
                self._events[row].append(Event(name, action, time + slot))
            if action not in ("exposure", "hate"):
                self._opened[row].add(name)


def strongest(signals: set[str]) -> str:
    """The signal that names an exposure's action."""
    return next((name for name in reversed(STRENGTH) if name in signals), "exposure")
