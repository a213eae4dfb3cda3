"""Decides whose work is done next: requests are assembled, gathered into groups, and their groups advanced one round at a time.

A group takes a fixed number of rounds (the prefill, then one for each further code), and all its requests begin and end together. Between two rounds a worker
is free to choose: the next round of a group under way, or the first of a new one, whichever is most urgent. Urgency is the time of arrival plus a multiple of
the time that the request itself will take. So a narrow request passes a wide one that came a little before it, and nobody waits for ever: whoever waits long
enough is the most urgent.

Three things overlap. ``workers`` threads run rounds. A desk thread assembles what arrives and makes the answers of what is done, while the workers compute; a
worker without a round does the same, so that a lone request is carried from end to end by one thread. Every waiting place is bounded: the first by ``max_queue``
(beyond it requests are refused), what is assembled by ``max_ready``, what runs by the memory that is granted before a group begins.

A request whose client left (its future is cancelled) or whose deadline passed is dropped where it stands, between two rounds at the latest. If a round fails, the
requests of its group are tried again one by one, so that one bad request does not take its neighbours along.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NamedTuple

from semantide.services.serving.admission import Admission, GroupBounds
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.pace import Pace
from semantide.services.serving.ticket import A, Begun, P, Passage, Q, SearchAgain, Stages, Ticket, Watcher
from semantide.shared.device_faults import device_failed
from semantide.shared.errors import TransientError
from semantide.shared.telemetry import logger

_PATIENCE = 4.0  # how many times its own duration a request lets others pass


class Overloaded(TransientError):
    """The queue is full. ``retry_after_seconds`` says when there should be room."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class _Task(NamedTuple):
    """Work that a thread took, and the requests that it is for."""

    work: Callable[[], None]
    tickets: Sequence[Ticket[Any, Any, Any]]


class Scheduler(Generic[Q, P, A]):
    """The queue, the groups, and the threads that work on them. A future gives the answer and its ``Passage``."""

    def __init__(
        self,
        stages: Stages[Q, P, A],
        *,
        workers: int = 1,
        bounds: GroupBounds | None = None,
        max_queue: int = 2048,
        deadline_seconds: float = 10.0,
        narrowing: Narrowing | None = None,
        watcher: Watcher | None = None,
        on_worker: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (("workers", workers), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
        self._stages, self._clock, self._on_worker = stages, clock, on_worker
        self._max_queue, self._bounds = max_queue, bounds or GroupBounds()
        self._max_ready = 2 * self._bounds.requests * workers
        self._deadline = deadline_seconds
        self._narrowing = narrowing or Narrowing(0)
        self._watcher = watcher or Watcher()
        lock = threading.RLock()
        self._work, self._desk = threading.Condition(lock), threading.Condition(lock)
        self._arrived: deque[Ticket[Q, P, A]] = deque()
        self._ready: Admission[Q, P, A] = Admission(stages, self._bounds, self._dropped)
        self._paused: list[Begun[Q, P, A]] = []
        self._done: deque[Begun[Q, P, A]] = deque()
        self._assembling = 0
        self._running = 0
        self._rows_under_way = self._requests_under_way = 0
        self._idle_workers = 0
        self._stopping = self._some_left = False
        self.device_error = ""
        """What a device said that failed under a request; nothing is computed on it any more until this process is started again."""
        self._pace = Pace()
        self._workers = workers
        self._threads = [threading.Thread(target=self._run_worker, name=f"serving-worker-{number}", daemon=True) for number in range(workers)]
        self._threads.append(threading.Thread(target=self._run_desk, name="serving-desk", daemon=True))

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Take no more requests, answer those that are there, end the threads."""
        with self._work:
            self._stopping = True
            self._wake_all()
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        with self._work:
            left = [*self._arrived, *self._ready.clear()]
            self._arrived.clear()
        for ticket in left:
            ticket.fail(TransientError("this server is stopping: send the request again"))

    def depth(self) -> int:
        """Requests that wait to begin."""
        return len(self._arrived) + self._assembling + len(self._ready)

    @property
    def workers(self) -> int:
        """Threads that run rounds."""
        return self._workers

    def running(self) -> int:
        """Groups under way."""
        return self._running

    def submit(self, query: Q) -> Future[tuple[A, Passage]]:
        """Queue a request. To give it up, cancel the future.

        Raises: Overloaded when the queue is full or the wait would be longer than the deadline; TransientError when the scheduler stops.
        """
        now = self._clock()
        ticket: Ticket[Q, P, A] = Ticket(query, now, now + self._deadline)
        with self._work:
            if self._stopping:
                raise TransientError("this server is stopping: send the request again")
            if self.depth() >= self._max_queue and self._some_left:
                self._some_left = False
                self._forget_cancelled()
            wait = self._expected_wait() * self._narrowing.share
            # Who would be too late hears it now, not at the deadline; that others have waited for long says that it is no mere burst.
            late = wait > self._deadline and bool(self._arrived) and now - self._arrived[0].arrived > self._deadline / 4
            if (depth := self.depth()) >= self._max_queue or late:
                pause = min(max(1.0, wait - self._deadline if late else wait), 30.0)
                raise Overloaded(f"{depth} requests wait already, for about {wait:.0f} s: try again in {pause:.0f} s, or add serving processes", pause)
            ticket.future.add_done_callback(self._note_left)
            self._arrived.append(ticket)
            (self._work if self._idle_workers else self._desk).notify()
        return ticket.future

    # What a thread does next. Each returns under the lock with what it took, and its work is done without the lock.

    def _run_worker(self) -> None:
        self._on_worker()
        while (task := self._next_for_worker()) is not None:
            self._do(task)

    def _run_desk(self) -> None:
        self._on_worker()  # it copies tensors now and then, and may not take the workers' cores for that
        while (task := self._next_for_desk()) is not None:
            self._do(task)

    def _do(self, task: _Task) -> None:
        try:
            task.work()
        except Exception as error:  # a fault of ours: whoever waits is told, and the thread goes on
            logger("serving").error("a task of the scheduler failed", exc_info=True)
            self._heed(error)
            for ticket in task.tickets:
                ticket.fail(error)

    def _next_for_worker(self) -> _Task | None:
        with self._work:
            while True:
                task = self._take_round() or self._take_desk_work()
                if task is not None:
                    return task
                if self._finished():
                    self._wake_all()
                    return None
                self._idle_workers += 1
                self._work.wait()
                self._idle_workers -= 1

    def _next_for_desk(self) -> _Task | None:
        with self._desk:
            while True:
                # With a worker idle there is nothing to overlap with, and handing the request over would cost more than the work.
                task = self._take_desk_work() if not self._idle_workers or self._stopping else None
                if task is not None:
                    return task
                if self._finished():
                    self._wake_all()
                    return None
                self._desk.wait()

    def _finished(self) -> bool:
        return self._stopping and not (self._arrived or self._assembling or self._ready or self._running)

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._desk.notify_all()

    def _wake_one(self) -> None:
        """Tell one more thread that there is work; the one that calls goes on with some of it itself."""
        if self._idle_workers and (self._ready or self._paused or self._arrived or self._done):
            self._work.notify()
        elif self._arrived or self._done:
            self._desk.notify()

    def _take_desk_work(self) -> _Task | None:
        if self._done:
            group = self._done.popleft()
            self._wake_one()
            return _Task(partial(self._answer, group), group.tickets)
        if self._arrived and len(self._ready) + self._assembling < self._max_ready:
            taken = [self._arrived.popleft() for _ in range(min(len(self._arrived), self._bounds.requests))]
            self._assembling += len(taken)
            self._wake_one()
            return _Task(partial(self._assemble, taken), taken)
        return None

    def _take_round(self) -> _Task | None:
        """The most urgent round: of a group under way, or the first of a new one."""
        group = min(self._paused, key=lambda paused: paused.urgency, default=None)
        while self._ready and (group is None or self._ready.urgency < group.urgency):
            urgency = self._ready.urgency
            admitted = self._ready.take(self._clock())
            if admitted is None:
                break  # there is no memory for it until something ends
            if not admitted[0]:
                continue
            share = self._narrowing.decide(self._expected_wait())
            begun = Begun[Q, P, A](*admitted, urgency)
            self._running += 1
            self._rows_under_way += begun.rows_left
            self._requests_under_way += begun.requests
            self._wake_one()
            return _Task(partial(self._begin, begun, share), begun.tickets)
        if group is None:
            return None
        self._paused.remove(group)
        self._wake_one()
        return _Task(partial(self._advance, group), group.tickets)

    def _dropped(self, ticket: Ticket[Q, P, A], now: float) -> bool:
        if ticket.cancelled:
            self._watcher.dropped("cancelled")
            return True
        if now > ticket.deadline:
            self._watcher.dropped("late")
            ticket.fail(
                TransientError(
                    f"the request was not answered within {now - ticket.arrived:.1f} s, past its deadline of {self._deadline:.1f} s: try again later"
                )
            )
            return True
        return False

    def _note_left(self, future: Future[tuple[A, Passage]]) -> None:
        self._some_left = self._some_left or future.cancelled()

    def _forget_cancelled(self) -> None:
        self._arrived = deque(ticket for ticket in self._arrived if not ticket.cancelled)
        self._ready.forget_cancelled()

    def _expected_wait(self) -> float:
        """Seconds until what is there now will be done."""
        rows = self._ready.rows + self._rows_under_way
        rows += len(self._arrived) * rows // max(len(self._ready) + self._requests_under_way, 1)
        return self._pace.seconds(rows, rows // self._bounds.beams + self._running) / self._workers

    # The work itself, without the lock.

    def _assemble(self, tickets: list[Ticket[Q, P, A]]) -> None:
        start = self._clock()
        with self._work:
            live = [ticket for ticket in tickets if not self._dropped(ticket, start)]
        try:
            assembled: Sequence[P | Exception] = self._stages.assemble([ticket.query for ticket in live]) if live else []
            assert len(assembled) == len(live), (len(assembled), len(live))
        except Exception as error:
            self._heed(error)
            assembled = [error] * len(live)
        end = self._clock()
        good = []
        for ticket, outcome in zip(live, assembled, strict=True):
            ticket.note("queue", ticket.arrived, start)
            ticket.note("assemble", start, end)
            if isinstance(outcome, Exception):
                self._heed(outcome)
                ticket.fail(outcome)
                continue
            ticket.prepared = outcome
            good.append(ticket)
        with self._work:
            self._assembling -= len(tickets)
            self._put_ready(good)
            self._after()

    def _put_ready(self, tickets: Sequence[Ticket[Q, P, A]]) -> None:
        for ticket in tickets:
            self._ready.push(ticket, ticket.arrived + _PATIENCE * ticket.work.rows * self._pace.row_seconds)

    def _after(self) -> None:
        """After work was done: say whether more is there, or that the last was."""
        if self._finished():
            self._wake_all()
        else:
            self._wake_one()

    def _begin(self, group: Begun[Q, P, A], share: float) -> None:
        start = self._clock()
        for ticket in group.tickets:
            ticket.note("wait", ticket.since, start)
        try:
            group.run = self._stages.begin([ticket.work for ticket in group.tickets], group.leases, share)
        except Exception as error:
            for lease in group.leases:
                lease.release()
            self._failed(group, error)
            return
        self._advance(group)

    def _advance(self, group: Begun[Q, P, A]) -> None:
        try:
            self._drop_from(group)
            if not group.tickets:
                group.run.close()
                self._leave(group)
                return
            start, rows = self._clock(), group.run.next_rows()
            more = group.run.advance()
            took = self._clock() - start
        except Exception as error:
            group.run.close()
            self._failed(group, error)
            return
        with self._work:
            self._pace.learn(rows, took)
            done = min(rows, group.rows_left) if more else group.rows_left
            group.rows_left -= done
            self._rows_under_way -= done
            if more:
                self._paused.append(group)
            else:
                self._done.append(group)
            self._after()

    def _drop_from(self, group: Begun[Q, P, A]) -> None:
        """Free the work of those who left or came too late."""
        now = self._clock()
        kept = [place for place, ticket in enumerate(group.tickets) if not self._dropped(ticket, now)]
        if len(kept) < len(group.tickets):
            group.tickets = [group.tickets[place] for place in kept]
            if kept:
                group.run.keep(kept)

    def _failed(self, group: Begun[Q, P, A], error: Exception) -> None:
        """One request alone is the cause; of several each gets a try of its own."""
        self._heed(error)
        if len(group.tickets) == 1:
            group.tickets[0].fail(error)
            self._leave(group)
            return
        for ticket in group.tickets:
            ticket.alone, ticket.since = True, self._clock()
        self._leave(group, group.tickets)

    def _heed(self, error: Exception) -> None:
        if not self.device_error and device_failed(error):
            self.device_error = f"{type(error).__name__}: {error}".splitlines()[0]
            logger("serving").error("a device failed: this process can answer nothing more and must be started again", error=self.device_error)

    def _answer(self, group: Begun[Q, P, A]) -> None:
        start = self._clock()
        try:
            answers = group.run.answers()
            assert len(answers) == len(group.tickets), (len(answers), len(group.tickets))
        except Exception as error:
            group.run.close()
            self._failed(group, error)
            return
        end = self._clock()
        again = []
        for ticket, outcome in zip(group.tickets, answers, strict=True):
            ticket.marks.extend(group.run.marks)
            ticket.note("format", start, end)
            if isinstance(outcome, SearchAgain):
                again.append(ticket)
            elif isinstance(outcome, Exception):
                self._heed(outcome)
                ticket.fail(outcome)
            else:
                ticket.succeed(outcome)
        try:
            group.run.remember()
        except Exception:
            logger("serving").error("what might have helped the next time is not kept", exc_info=True)
        group.run.close()
        self._leave(group, again)
        self._watcher.answered(group.run, [ticket.passage() for ticket in group.tickets])

    def _leave(self, group: Begun[Q, P, A], again: Sequence[Ticket[Q, P, A]] = ()) -> None:
        """A group is over; some of its requests may be tried again."""
        with self._work:
            self._running -= 1
            self._requests_under_way -= group.requests
            self._rows_under_way -= group.rows_left
            self._put_ready(again)
            self._after()
