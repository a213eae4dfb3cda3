"""What a user's interactions mean for a recommendation: what to continue, what was seen, what never to show.

A history is made as the model's training histories were: the same actions count, and repeats are folded in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TimedEvent = tuple[str, str, int | None]  # item, action, milliseconds since 1970 or None

POSITIVE = 1.0  # the intensity from which an action says that the user wanted the item


@dataclass(frozen=True)
class Profile:
    """``history`` is what the user wanted, oldest first; ``seen`` all that was acted upon; ``blocked`` what was disliked and not wanted since.

    ``places`` are those of the history among the events.
    """

    history: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    places: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Reading:
    """How the data set that a model was trained on made histories of events: from which intensity on, and which repeats were folded."""

    positive_intensity: float = POSITIVE
    deduplicate: str = "consecutive"


def reading_of(header: Mapping[str, Any]) -> Reading:
    """What a model's header says."""
    said = header.get("history") or {}
    return Reading(float(said.get("positive_intensity", Reading.positive_intensity)), str(said.get("deduplicate", Reading.deduplicate)))


def profile_of(events: Iterable[tuple[str, str]], actions: Mapping[str, float], reading: Reading = Reading()) -> Profile:
    """The profile of (item, action) pairs in order of time; an action without a configured intensity counts as exposure."""
    history: list[str] = []
    places: list[int] = []
    known: set[str] = set()
    seen: dict[str, None] = {}
    blocked: dict[str, None] = {}
    for place, (item, action) in enumerate(events):
        intensity = actions.get(action, 0.0)
        if intensity >= reading.positive_intensity:
            repeated = item in known if reading.deduplicate == "all" else reading.deduplicate == "consecutive" and history[-1:] == [item]
            if not repeated:
                history.append(item)
                places.append(place)
                known.add(item)
        if intensity >= POSITIVE:
            blocked.pop(item, None)
        elif intensity < 0:
            blocked[item] = None
        if intensity >= POSITIVE or intensity < 0:
            seen[item] = None
    return Profile(tuple(history), tuple(seen), tuple(blocked), tuple(places))
