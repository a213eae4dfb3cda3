"""What a user's interactions mean for a recommendation: what to continue, what was seen, what never to show.

The same item several times in a row counts once, as in the training histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

POSITIVE = 1.0  # the intensity from which an action says that the user wanted the item


@dataclass(frozen=True)
class Profile:
    """``history`` is what the user wanted, oldest first; ``seen`` all that was acted upon; ``blocked`` what was disliked and not wanted since."""

    history: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()


def profile_of(events: Iterable[tuple[str, str]], actions: Mapping[str, float]) -> Profile:
    """The profile of (item, action) pairs in order of time; an action without a configured intensity counts as exposure."""
    history: list[str] = []
    seen: dict[str, None] = {}
    blocked: dict[str, None] = {}
    for item, action in events:
        intensity = actions.get(action, 0.0)
        if intensity >= POSITIVE:
            if not history or history[-1] != item:
                history.append(item)
            blocked.pop(item, None)
        elif intensity < 0:
            blocked[item] = None
        if intensity >= POSITIVE or intensity < 0:
            seen[item] = None
    return Profile(tuple(history), tuple(seen), tuple(blocked))
