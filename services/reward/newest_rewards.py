"""The reward models in the order of their making, in Redis: which one answers where none is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ORDER = "semantide:rewards:order"


class NewestRewards:
    """Remembers reward models by when they were made."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def put(self, reward: str, now_ms: int) -> None:
        """A reward model was made."""
        self._broker.zadd(_ORDER, {reward: now_ms})

    def all(self) -> list[str]:
        """All of them, the newest first."""
        return [ref.decode() for ref in self._broker.zrevrange(_ORDER, 0, -1)]

    def newest(self, stored: Callable[[str], bool]) -> str | None:
        """The one that was made last of those that still are ``stored``: retention and people take some away."""
        return next(filter(stored, self.all()), None)
