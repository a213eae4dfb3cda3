"""How many requests the holder of a key may make: a bucket of tokens for each, which fills steadily and empties by one a request. Of one process, so a deployment allows as many times that as it has of them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RateLimits:
    """The buckets of all holders. ``per_second`` 0 limits nobody."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second, self._burst, self._clock = per_second, max(1, burst), clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, holder: str) -> float:
        """Take a token. 0 where there was one, otherwise the seconds until there will be."""
        if not self._per_second:
            return 0.0
        with self._lock:
            now = self._clock()
            tokens, since = self._buckets.get(holder, (float(self._burst), now))
            tokens = min(float(self._burst), tokens + max(0.0, now - since) * self._per_second)
            enough = tokens >= 1
            self._buckets[holder] = (tokens - 1 if enough else tokens, now)
            return 0.0 if enough else (1 - tokens) / self._per_second
