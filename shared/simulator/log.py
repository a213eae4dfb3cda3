"""The log that the logging policy leaves: exposures with their page, place, propensity and all signals, and the items they are of.

Legend: B people of a block, R of them who look at a page, S places of a page.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.shared.simulator.chance import Floats, uniform
from semantide.shared.simulator.marginals import Marginals
from semantide.shared.simulator.pages import DAY_MS, MOST_PAGES, PAGE_MS, Reactions, Visits, moments, time_of_day
from semantide.shared.simulator.policy import LoggingPolicy, Shelf
from semantide.shared.simulator.preference import SIGNALS, Preference
from semantide.shared.simulator.users import Numbers, SimulatorConfig, World

CARD = "_simulation.json"
"""Beside a written log: the configuration of its world. Imports pass over files whose names begin so."""
_BLOCK_CELLS = 1 << 23  # people x items that are in memory at once
_PILOT_USERS, _PILOTS = 400, 3  # that the truth is fitted on, and how often
STRENGTH = ("exposure", "click", "long_view", "like", "comment", "follow", "forward", "order", "hate")  # the last one that holds names the action

LOG_SCHEMA = pa.schema(
    [
        ("user", pa.string()),
        ("item", pa.string()),
        ("time", pa.int64()),
        ("action", pa.string()),
        ("page", pa.string()),
        ("value", pa.float64()),
        ("event_id", pa.string()),
        ("position", pa.int32()),
        ("propensity", pa.float64()),
        ("signals", pa.list_(pa.string())),
        ("tab", pa.string()),
    ]
)


@dataclass(frozen=True)
class _Shown:
    """One page each of R people."""

    session: int
    page: int
    rows_R: Numbers
    items_RS: Numbers
    chances_RS: Floats
    times_R: Numbers


class Simulation:
    """One world with its logging policy and the truth about its people."""

    def __init__(self, config: SimulatorConfig) -> None:
        self.config, self.world, self.marginals = config, World(config), Marginals.load()
        self.policy = LoggingPolicy(self.world)
        self.preference = Preference.unfitted(self.world, self.marginals)
        pilot = np.arange(min(config.users, _PILOT_USERS))
        for _ in range(_PILOTS):
            # What people come to see depends on what they think of it: those who are pleased stay longer.
            moments = [reactions.moment for _, _, reactions in self._played(pilot)]
            self.preference = self.preference.fitted(moments, self.marginals)

    @classmethod
    def of(cls, folder: Path) -> Simulation:
        """The world whose log is in this folder.

        Raises: ValueError where there is none.
        """
        path = folder / CARD
        if not path.exists():
            raise ValueError(f"{folder} holds no {CARD}: name a folder that `semantide simulate` has written")
        raw = json.loads(path.read_text())
        return cls(SimulatorConfig(**{**raw, "slots": tuple(raw["slots"])}))

    def blocks(self) -> Iterator[Numbers]:
        """All people, some at a time."""
        size = max(1, _BLOCK_CELLS // self.config.items)
        for begin in range(0, self.config.users, size):
            yield np.arange(begin, min(begin + size, self.config.users))

    def begins(self, users_B: Numbers) -> Numbers:
        """When every visit of the log begins [B, most visits], ascending, each after the last page of the one before; milliseconds since 1970. Past a person's visits it says nothing."""
        sessions, config = self.world.sessions_U[users_B], self.config
        numbers = np.arange(int(sessions.max(initial=0)))
        luck = uniform(config.seed, "day", users_B[:, None], numbers)
        times = (luck * config.days).astype(np.int64) * DAY_MS + time_of_day(config.seed, self.marginals, users_B[:, None], numbers)
        # A visit's number is its place in time: what somebody remembers at one happened before it.
        times = np.sort(np.where(numbers < sessions[:, None], times, (config.days + 1) * DAY_MS), axis=1)
        longest = numbers * MOST_PAGES * PAGE_MS
        return config.start_ms + np.maximum.accumulate(times - longest, axis=1) + longest

    def pages(self, users_B: Numbers) -> Iterator[tuple[Visits, pa.Table]]:
        """The log of these people, page after page of all of them, and what they remember by then."""
        for visits, shown, reactions in self._played(users_B):
            yield visits, self._table(visits, shown, reactions)

    def _played(self, users_B: Numbers) -> Iterator[tuple[Visits, _Shown, Reactions]]:
        visits, shelf, begins = Visits(self.preference, self.marginals, users_B), Shelf(self.policy, users_B), self.begins(users_B)
        sessions = self.world.sessions_U[users_B]
        for session in range(begins.shape[1]):
            rows = np.flatnonzero(session < sessions)
            visits.begin(np.full(len(users_B), session))
            page = 0
            while len(rows):
                lengths = visits.lengths(rows, page)
                items, chances = shelf.draw(rows, lengths, visits.session_B[rows], np.full(len(rows), page))
                reactions = visits.look(rows, items, page)
                yield visits, _Shown(session, page, rows, items, chances, begins[rows, session] + page * PAGE_MS), reactions
                rows = rows[reactions.stays_R]
                page += 1

    def _table(self, visits: Visits, shown: _Shown, reactions: Reactions) -> pa.Table:
        there = shown.items_RS >= 0
        row, place = np.nonzero(there)
        happened = {name: signal[there] for name, signal in reactions.signals.items()}
        tabs = np.array(self.marginals.tabs)[reactions.moment.tabs_B]
        users = [self.world.user_id(user) for user in reactions.moment.users_B.tolist()]
        pages = [f"{user}/{shown.session}/{tab}/{shown.page}" for user, tab in zip(users, tabs.tolist(), strict=True)]
        columns = {
            "user": [users[index] for index in row.tolist()],
            "item": [self.world.item_id(item) for item in shown.items_RS[there].tolist()],
            "time": moments(shown.times_R, shown.items_RS.shape[1])[there],
            "action": _actions(happened),
            "page": [pages[index] for index in row.tolist()],
            "value": reactions.watched[there],
            "event_id": [f"{pages[index]}/{slot}" for index, slot in zip(row.tolist(), place.tolist(), strict=True)],
            "position": place.astype(np.int32),
            "propensity": shown.chances_RS[there],
            "signals": _signals(happened, len(row)),
            "tab": tabs[row],
        }
        return pa.table(columns, schema=LOG_SCHEMA)

    def logged(self, users_B: Numbers) -> Iterator[pa.Table]:
        """The events of these people as a shop would send them: with ``answer_seconds`` what was done comes later than what was shown."""
        for _, table in self.pages(users_B):
            yield _with_late_answers(table, self.config) if self.config.answer_seconds else table

    def log(self) -> pa.Table:
        """The whole log, in memory."""
        return pa.concat_tables([table for users in self.blocks() for table in self.logged(users)] or [LOG_SCHEMA.empty_table()])

    def items(self) -> pa.Table:
        """The items, with titles and categories that say something of their topics."""
        world, config = self.world, self.config
        topics_NK = np.argsort(-(world.item_ND @ world.centre_KD.T), axis=1)[:, : min(2, config.topics)]
        seconds = np.interp(world.duration_quantile_N, *self.marginals.duration_ms) / 1000
        rows: list[dict[str, Any]] = []
        for item in range(config.items):
            topic, length = int(world.topic_N[item]), float(seconds[item])
            other = next((int(near) for near in topics_NK[item] if near != topic), topic)
            band = "under 15 s" if length < 15 else "15 to 60 s" if length < 60 else "1 to 3 min" if length < 180 else "over 3 min"
            rows.append(
                {
                    "id": world.item_id(item),
                    "title": f"{length:.0f} s about topic {topic}",
                    "text": f"topic {topic} with some of topic {other}, {band}",
                    "categories": [f"topic {topic}", f"near topic {other}", band],
                }
            )
        return pa.Table.from_pylist(
            rows, pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string()), ("categories", pa.list_(pa.string()))])
        )

    def write(self, folder: Path, form: str = "parquet", tick: Callable[[int, int], None] = lambda done, total: None) -> dict[str, int]:
        """Write interactions, items and the card that the world can be made of again; how much there is of each.

        Raises: ValueError for another form than parquet or jsonl.
        """
        if form not in ("parquet", "jsonl"):
            raise ValueError(f"form is {form!r}: give 'parquet' or 'jsonl'")
        folder.mkdir(parents=True, exist_ok=True)
        items, rows, clicks, orders = self.items(), 0, 0, 0
        with _Writer(folder / f"interactions.{form}", LOG_SCHEMA) as log:
            for users in self.blocks():
                for table in self.logged(users):
                    log.write(table)
                    rows += table.num_rows - table["position"].null_count  # answers on their own have no place
                    names = table["signals"].combine_chunks().flatten().value_counts().to_pylist()
                    counts = {entry["values"]: entry["counts"] for entry in names}
                    clicks, orders = clicks + counts.get("click", 0), orders + counts.get("order", 0)
                tick(int(users[-1]) + 1, self.config.users)
        with _Writer(folder / f"items.{form}", items.schema) as catalog:
            catalog.write(items)
        (folder / CARD).write_text(json.dumps(asdict(self.config), indent=1) + "\n")
        return {"users": self.config.users, "items": self.config.items, "exposures": rows, "clicks": clicks, "orders": orders}


def _with_late_answers(table: pa.Table, config: SimulatorConfig) -> pa.Table:
    """Exposures without what was done, and behind them the answers, which name their page; the wait is exponential."""
    columns = {name: table[name].to_pylist() for name in LOG_SCHEMA.names}
    answered = [row for row, action in enumerate(columns["action"]) if action != "exposure"]
    answers: dict[str, list[Any]] = {name: [columns[name][row] for row in answered] for name in ("user", "item", "action", "page", "value", "signals")}
    luck = uniform(config.seed, "answer", np.array([zlib.crc32(columns["event_id"][row].encode()) for row in answered], dtype=np.int64))
    waits = 1 + np.rint(-1000 * config.answer_seconds * np.log1p(-luck)).astype(np.int64)
    answers["time"] = (np.array([columns["time"][row] for row in answered], dtype=np.int64) + waits).tolist()
    answers["event_id"] = [f"{columns['event_id'][row]}/answer" for row in answered]
    for row in answered:
        columns["action"][row], columns["signals"][row], columns["value"][row] = "exposure", [], None
    nothing = [None] * len(answered)
    return pa.concat_tables(
        [pa.table(columns, schema=LOG_SCHEMA), pa.table({name: answers.get(name, nothing) for name in LOG_SCHEMA.names}, schema=LOG_SCHEMA)]
    )


class _Writer:
    """A table's file, batch by batch."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._parquet = pq.ParquetWriter(path, schema, compression="zstd") if path.suffix == ".parquet" else None
        self._lines = None if self._parquet else path.open("w")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._parquet, self._lines):
            if stream is not None:
                stream.close()

    def write(self, table: pa.Table) -> None:
        if self._parquet is not None:
            self._parquet.write_table(table)
        elif self._lines is not None:
            self._lines.writelines(json.dumps(row) + "\n" for row in table.to_pylist())


def _actions(shown: dict[str, Any]) -> list[str]:
    """The strongest signal of each exposure."""
    strongest = np.zeros(len(shown["click"]), dtype=np.int64)
    for rank, name in enumerate(STRENGTH):
        if name in shown:
            strongest[shown[name]] = rank
    return [STRENGTH[rank] for rank in strongest.tolist()]


def _signals(shown: dict[str, Any], count: int) -> list[list[str]]:
    signals: list[list[str]] = [[] for _ in range(count)]
    for name in SIGNALS:
        for row in np.flatnonzero(shown[name]).tolist():
            signals[row].append(name)
    return signals
