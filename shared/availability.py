"""Which items may not be recommended right now, kept in Redis: ingestion writes, serving reads.

A counter changes with every write, so that a reader asks for the whole set only when something changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semantide.shared.broker import WatchError

_KEY = "semantide:items:unavailable"
_VERSION = "semantide:items:unavailable:version"


class Availability:
    """The set of item ids that are unavailable or deleted."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def update(self, available: Mapping[str, bool]) -> None:
        """Record the state of some items."""
        pipe = self._broker.pipeline(transaction=True)
        _write(pipe, available)
        pipe.execute()

    def update_as_of(self, version: int, available: Mapping[str, bool]) -> bool:
        """Record states that were read at ``version``; False, and nothing is recorded, where somebody wrote since.

        A write that succeeds moves the version by one.
        """
        with self._broker.pipeline(transaction=True) as pipe:
            pipe.watch(_VERSION)
            if int(pipe.get(_VERSION) or 0) != version:
                return False
            pipe.multi()
            _write(pipe, available)
            try:
                pipe.execute()
            except WatchError:
                return False
        return True

    def version(self) -> int:
        """Changes whenever the set may have changed."""
        return int(self._broker.get(_VERSION) or 0)

    def unavailable(self) -> set[str]:
        """The whole set."""
        return {item.decode() for item in self._broker.smembers(_KEY)}


def _write(pipe: Any, available: Mapping[str, bool]) -> None:
    gone = [item for item, state in available.items() if not state]
    back = [item for item, state in available.items() if state]
    if gone:
        pipe.sadd(_KEY, *gone)
    if back:
        pipe.srem(_KEY, *back)
    pipe.incr(_VERSION)
