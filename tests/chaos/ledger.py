"""What was accepted against what is stored, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.manifest import Manifest

Event = tuple[str, str, int, str]  # user, item, time, action


@dataclass(frozen=True)
class Balance:
    """How many were accepted, how many of them are not stored, how many are stored again, and how many are stored that nobody sent."""

    accepted: int
    lost: int
    doubled: int
    strange: int


def balance(accepted: Iterable[Event], stored: Iterable[Event]) -> Balance:
    """Compare them; events that are the same in all four count as often as they are there."""
    sent, there = Counter(accepted), Counter(stored)
    doubled = sum(count - sent[event] for event, count in there.items() if event in sent and count > sent[event])
    return Balance(
        accepted=sum(sent.values()),
        lost=sum(max(0, count - there[event]) for event, count in sent.items()),
        doubled=doubled,
        strange=sum(count for event, count in there.items() if event not in sent),
    )


def stored_events(data_dir: Path) -> list[Event]:
    """All events of a stack's log."""
    with closing(Manifest(data_dir / "events")) as manifest:
        columns = ("user", "item", "time", "action")
        tables = [read_segment(segment.path, columns) for segment in EventLog(manifest).segments()]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]  # type: ignore[misc]


def histories_that_differ(accepted: Sequence[Event], found: dict[str, list[tuple[str, int, str]]], length: int) -> list[str]:
    """Users whose online history is not the last of what they did (exposures do not count)."""
    by_user: dict[str, list[tuple[int, str, str]]] = {}
    for user, item, time, action in accepted:
        if action != "exposure":
            by_user.setdefault(user, []).append((time, item, action))
    wrong = []
    for user, history in found.items():
        expected = [(item, time, action) for time, item, action in sorted(by_user.get(user, []))[-length:]]
        if history != expected:
            missing, more = len(set(expected) - set(history)), len(history) - len(set(history))
            wrong.append(f"{user}: {len(history)} of {len(expected)} events online, {missing} missing, {more} twice")
    return wrong
