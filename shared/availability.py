"""Which items may not be recommended right now, kept in Redis: ingestion writes, serving reads.

A counter changes with every write, so that a reader asks for the whole set only when something changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "semantide:items:unavailable"
_VERSION = "semantide:items:unavailable:version"


class Availability:
    """The set of item ids that are unavailable or deleted."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def update(self, available: Mapping[str, bool]) -> None:
        """Record the state of some items."""
        gone = [item for item, state in available.items() if not state]
        back = [item for item, state in available.items() if state]
        pipe = self._broker.pipeline(transaction=True)
        if gone:
            pipe.sadd(_KEY, *gone)
        if back:
            pipe.srem(_KEY, *back)
        pipe.incr(_VERSION)
        pipe.execute()

    def version(self) -> int:
        """Changes whenever the set may have changed."""
        return int(self._broker.get(_VERSION) or 0)

    def unavailable(self) -> set[str]:
        """The whole set."""
        return {item.decode() for item in self._broker.smembers(_KEY)}
