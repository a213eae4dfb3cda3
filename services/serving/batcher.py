"""Groups concurrent requests into batches: whatever waits when a worker is free goes together, so a lone request never waits for company.

The queue is bounded: what does not fit is refused at once. A request that waited past its deadline or whose client left is dropped
before any work. Where ``run`` gives an exception in place of an answer, that request alone fails; if all of ``run`` fails, the requests are
tried one by one, so that one bad request does not take its neighbours along.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from semantide.shared.errors import TransientError

Q = TypeVar("Q")
A = TypeVar("A")


class Overloaded(TransientError):
    """The queue is full. ``retry_after_seconds`` says when there should be room."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass
class _Entry(Generic[Q, A]):
    query: Q
    arrived: float
    deadline: float
    future: Future[tuple[A, float]] = field(default_factory=Future)


class Batcher(Generic[Q, A]):
    """A bounded queue and the threads that work on it.

    ``run`` answers a batch. A future gives the answer and the seconds that the request waited.
    """

    def __init__(
        self,
        run: Callable[[list[Q]], Sequence[A | Exception]],
        *,
        max_batch: int = 32,
        max_queue: int = 2048,
        deadline_seconds: float = 10.0,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue), ("workers", workers)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
        self._run, self._max_batch, self._max_queue, self._deadline, self._clock = run, max_batch, max_queue, deadline_seconds, clock
        self._queue: deque[_Entry[Q, A]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._seconds_each = 0.01  # a request's share of a batch, averaged
        self._threads = [threading.Thread(target=self._work, name=f"batch-{number}", daemon=True) for number in range(workers)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Take no more requests, finish those that wait, end the threads."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_seconds)
        with self._wake:
            left, self._queue = list(self._queue), deque()
        for entry in left:
            _fail(entry.future, TransientError("this server is stopping: send the request again"))

    def depth(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def submit(self, query: Q) -> Future[tuple[A, float]]:
        """Queue a request.

        Raises: Overloaded when the queue is full; TransientError when the batcher stops.
        """
        now = self._clock()
        entry: _Entry[Q, A] = _Entry(query, now, now + self._deadline)
        with self._wake:
            if self._stopping:
                raise TransientError("this server is stopping: send the request again")
            if len(self._queue) >= self._max_queue:
                wait = min(max(1.0, len(self._queue) * self._seconds_each), 30.0)
                raise Overloaded(f"{len(self._queue)} requests wait already: try again in {wait:.0f} s, or add serving processes", wait)
            self._queue.append(entry)
            self._wake.notify()
        return entry.future

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            start = self._clock()
            self._answer(batch)
            self._seconds_each += 0.2 * ((self._clock() - start) / max(len(batch), 1) - self._seconds_each)

    def _take(self) -> list[_Entry[Q, A]] | None:
        with self._wake:
            while not self._queue and not self._stopping:
                self._wake.wait()
            if not self._queue:
                return None
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
        now = self._clock()
        batch = []
        for entry in taken:
            if not entry.future.set_running_or_notify_cancel():
                continue
            if now > entry.deadline:
                _fail(
                    entry.future,
                    TransientError(f"the request waited {now - entry.arrived:.1f} s, past its deadline of {self._deadline:.1f} s: try again later"),
                )
                continue
            batch.append(entry)
        return batch

    def _answer(self, batch: list[_Entry[Q, A]]) -> None:
        if not batch:
            return
        start = self._clock()
        try:
            answers = self._run([entry.query for entry in batch])
            assert len(answers) == len(batch), (len(answers), len(batch))
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0].future, error)
                return
            for entry in batch:
                self._answer([entry])
            return
        for entry, result in zip(batch, answers, strict=True):
            if isinstance(result, Exception):
                _fail(entry.future, result)
                continue
            try:
                entry.future.set_result((result, start - entry.arrived))
            except InvalidStateError:
                pass


def _fail(future: Future[A], error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass
