"""How old the rows of a step may be, and who waits for whom so that they are exactly that old.

A step reads rows of the tables (fetch) and, once its gradients are known, changes them (update). With staleness 0 the rows of step t have seen every
update before t. With staleness k those of the k latest steps are missing: their gradients may still be on their way while t is fetched.

    staleness 1    fetch 0, fetch 1, update 0, fetch 2, update 1, fetch 3, update 2, ...

The order is not only a bound: an update waits for the fetches that must not see it just as a fetch waits for the updates it must see. So the order in
which a table is read and changed, and with it every number of a run, is the same whatever the threads' speeds are.
Source: TurboGR (arXiv 2605.13433), semi-asynchronous training; the fence in both directions is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition


class Stopped(Exception):
    """The run ends; whoever waits shall wait no more."""


@dataclass(frozen=True)
class Staleness:
    """How many of the latest updates the rows of a step have not seen; none during the first ``warmup_steps`` steps, nor across the start of an epoch."""

    batches: int = 0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from 0")

    def seen(self, step: int, start: int) -> int:
        """The updates of steps below this number are in the rows of ``step``, and no others; ``start`` is the first step of its epoch."""
        if step < self.warmup_steps:
            return step
        return max(start, step - self.batches, self.warmup_steps - 1)

    def last_before(self, step: int, start: int) -> int:
        """The last step whose rows must be read before the update of ``step``."""
        last = step
        while self.seen(last + 1, start) <= step:
            last += 1
        return last


class Fence:
    """Keeps the fetches and updates of one epoch in their order; threads wait at it."""

    def __init__(self, staleness: Staleness, start: int, first: int, end: int) -> None:
        """``start`` and ``end`` bound the steps of the epoch, ``first`` is where this run goes on: all updates before it are in the tables."""
        if not start <= first <= end:
            raise ValueError(f"first is {first}: give a step from {start} to {end}")
        self.staleness, self._start, self._end = staleness, start, end
        self._fetched, self._updated, self._stopped = first, first, False
        self._changed = Condition()

    def seen(self, step: int) -> int:
        """See ``Staleness.seen``."""
        return self.staleness.seen(step, self._start)

    def last_before(self, step: int) -> int:
        """See ``Staleness.last_before``; no step after the epoch."""
        return min(self.staleness.last_before(step, self._start), self._end - 1)

    def before_fetch(self, step: int) -> None:
        """Wait until the updates that ``step`` must see are done.

        Raises: Stopped.
        """
        self._wait(lambda: self._updated >= self.seen(step))

    def fetched(self, step: int) -> None:
        """The rows of ``step`` are read; steps come in order."""
        with self._changed:
            assert step == self._fetched
            self._fetched = step + 1
            self._changed.notify_all()

    def before_update(self, step: int) -> None:
        """Wait until the rows that must not see the update of ``step`` are read.

        Raises: Stopped.
        """
        self._wait(lambda: self._fetched > self.last_before(step))

    def updated(self, step: int) -> None:
        """The update of ``step`` is in the tables; steps come in order."""
        with self._changed:
            assert step == self._updated
            self._updated = step + 1
            self._changed.notify_all()

    def settle(self, step: int) -> None:
        """Wait until the updates of all steps before ``step`` are in the tables.

        Raises: Stopped.
        """
        self._wait(lambda: self._updated >= step)

    def rest(self, step: int) -> None:
        """Wait as ``settle`` does, and until all rows are read that may be without the update of ``step``: then nobody is at the tables until that update.

        Raises: Stopped.
        """
        self._wait(lambda: self._updated >= step and self._fetched > self.last_before(step))

    def land(self, fetched: int, updated: int, seconds: float) -> None:
        """Wait, but not longer than that, until all steps below ``fetched`` are read and all updates below ``updated`` are in the tables.

        Raises: Stopped.
        """
        self._wait(lambda: self._fetched >= fetched and self._updated >= updated, seconds)

    def stop(self) -> None:
        """End all waiting."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or ready(), seconds)
            if self._stopped:
                raise Stopped
