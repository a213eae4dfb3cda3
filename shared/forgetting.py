"""Who is being forgotten: their ids stand in the broker until the sweep has ended and every process that holds something of users in memory has seen them.

A process that looks every ``LOOK_SECONDS`` meets each id at least once, for none goes before ``KNOWN_SECONDS``; one that could not look for ``MISSED_SECONDS`` may have missed some.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

KEY = "semantide:ingestion:forgetting"
LOOK_SECONDS = 1.0
MISSED_SECONDS = 4.0
KNOWN_SECONDS = 5.0
"""At least; a request that began before the deletion may take its own time on top."""


class Forgetting:
    """The users of one deployment who are to be swept, by the digests of their tombstones."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def add(self, digest: str, user: str) -> None:
        """Let a user be known as one to be forgotten."""
        self._broker.hset(KEY, digest, user.encode(errors="surrogatepass"))

    def users(self) -> dict[str, str]:
        """Ids by digest."""
        return {digest.decode(): user.decode(errors="surrogatepass") for digest, user in self._broker.hgetall(KEY).items()}

    def remove(self, digests: Iterable[str]) -> None:
        """Forget the ids themselves."""
        if names := list(digests):
            self._broker.hdel(KEY, *names)
