"""How wide searches may be while more requests come than can be answered: stepwise narrower, and wide again as soon as there is room.

Late answers help nobody, so width is given up before the time is: an answer of half the beams is a good one, and it says how it was found.
"""

from __future__ import annotations

import math

SHARES = (1.0, 0.75, 0.5, 0.25)  # of the beams that a request asked for


class Narrowing:
    """The share of the asked width that searches get now.

    It falls by a step where the expected wait passes ``wait_seconds``, by another where it passes twice as much, and so on; it rises again when the wait is
    below half of what made it fall, so that it does not flicker. ``wait_seconds`` 0: searches are never narrowed.
    """

    def __init__(self, wait_seconds: float) -> None:
        if wait_seconds < 0:
            raise ValueError(f"wait_seconds is {wait_seconds}: give 0 to never narrow searches, or the wait from which on they are narrowed")
        self._wait_seconds = wait_seconds
        self._step = 0

    @property
    def share(self) -> float:
        """The share as it was last decided."""
        return SHARES[self._step]

    def decide(self, expected_seconds: float) -> float:
        """The share, now that a new request would wait this long."""
        if self._wait_seconds:
            self._step = max(self._reached(expected_seconds), min(self._step, self._reached(2 * expected_seconds)))
        return self.share

    def _reached(self, seconds: float) -> int:
        if seconds <= self._wait_seconds:
            return 0
        return min(1 + int(math.log2(seconds / self._wait_seconds)), len(SHARES) - 1)


def narrowed_width(width: int, least: int, share: float) -> int:
    """The beams of a request that asked for ``width`` and must get ``least`` items."""
    return max(min(least, width), math.ceil(width * share))
