"""The six stages of a step, each with a thread of its own, so that batches follow each other as on a belt.

    load     histories of this rank, and which rows of the tables they need (negatives are drawn here)
    route    each row once, and whose it is: the exchange of ids
    fetch    look-up, and the exchange of vectors; waits at the fence for updates that it must see
    copy     host to device
    dense    forward and backward of the model, and its optimiser: the thread that calls ``take`` and ``give_back``
    update   the exchange of the rows' gradients, and their optimiser; waits at the fence for fetches that must not see it

Every stage takes the batches in order and nothing depends on how fast it is: the numbers are those of one thread that does one thing after another,
which is what happens with one batch in flight. A stage that fails stops all others, and its error is what ``take``, ``settle`` or the end of the
``with`` block raises.
Source: TurboGR (arXiv 2605.13433), fine-grained pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Semaphore, Thread
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semantide.services.training.change_log import ChangeLog
from semantide.services.training.fence import Fence, Staleness, Stopped
from semantide.services.training.flight import Ferry, Flight
from semantide.services.training.load_balancing import Share
from semantide.services.training.objective import Objective
from semantide.services.training.occupancy import Occupancy
from semantide.shared.errors import RankLost

_JOIN_SECONDS = 5.0
"""How long a stage may take to end after an error: one that waits for a rank that is gone must not keep the error from being told."""


class Pipeline:
    """The batches of one epoch, from step ``first`` on; used as a context."""

    def __init__(
        self,
        objective: Objective,
        share: Callable[[int], Share],
        device: torch.device,
        *,
        start: int,
        first: int,
        end: int,
        seed: int = 0,
        in_flight: int = 6,
        staleness: Staleness | None = None,
        kept: Mapping[str, Tensor] | None = None,
        num_ranks: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
        occupancy: Occupancy | None = None,
        logs: Mapping[str, ChangeLog] | None = None,
    ) -> None:
        """``share`` gives the batch of a step; ``start`` and ``end`` are the epoch's steps; ``kept`` is what ``on_the_way`` gave at ``first``; ``logs`` hear which rows
        of the tables change.

        With more than one of ``num_ranks`` the stages talk to those of the other ranks, and none of them ends in the middle of a talk.
        """
        self._objective, self._share, self._device, self._seed = objective, share, device, seed
        self._tables = dict(sorted(objective.tables.items()))
        self.staleness = (staleness or Staleness()) if self._tables else Staleness()
        self._fence = Fence(self.staleness, start, first, end)
        self._first, self._end, self._kept, self._clock = first, end, kept or {}, clock
        self.occupancy = occupancy or Occupancy()
        self._ferry = Ferry(device)
        self._recent: deque[dict[str, Tensor]] = deque(maxlen=max(1, self.staleness.batches))
        self._flights: dict[int, Flight] = {}
        self._loaded, self._prepared, self._taken, self._returned = first, first, first, first
        self._moved = Condition()
        self._num_ranks, self._logs = num_ranks, logs or {}
        self._error: BaseException | None = None
        before: list[tuple[str, Callable[[Flight], None]]] = [("route", self._route), ("fetch", self._fetch)] if self._tables else []
        self._before = [*before, ("copy", self._ferry.bring)]
        # An epoch's rest may be shorter; the fence needs the stale batches and the one that is computed.
        self.room = max(in_flight, self.staleness.batches + 1)
        self._threaded = in_flight > 1
        self._threads: list[Thread] = []
        self._places = Semaphore(self.room)
        self._belts: list[SimpleQueue[Flight | None]] = [SimpleQueue() for _ in range(len(self._before) + 1)]
        self._done: SimpleQueue[Flight | None] = SimpleQueue()

    def __enter__(self) -> Pipeline:
        if self._threaded:
            self._threads = [Thread(target=self._guard, args=(self._load_all,), name="load", daemon=True)]
            for place, (stage, work) in enumerate(self._before):
                self._threads.append(Thread(target=self._guard, args=(self._work_all, stage, work, place), name=stage, daemon=True))
            if self._tables:
                self._threads.append(Thread(target=self._guard, args=(self._update_all,), name="update", daemon=True))
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.settle()
            elif self._num_ranks > 1 and self._threaded and not isinstance(error, RankLost):
                self._land()
        finally:
            self._stop()
            patience = _JOIN_SECONDS
            for thread in self._threads:
                thread.join(patience)
                if thread.is_alive():
                    patience = 0.0  # it waits for another rank, and so may the rest

    def take(self) -> Flight:
        """The next batch, ready to be computed with."""
        step, began = self._taken, self._clock()
        if self._threaded:
            flight = self._belts[-1].get()
            if flight is None:
                raise self._cause()
            self.occupancy.waited(began, self._clock(), flight.spans)
        else:
            self._load_until(step)
            flight = self._flights[step]
        assert flight.step == step
        self.occupancy.collided(flight.collided, flight.asked)
        self._taken += 1
        self._ferry.arrive(flight)
        return flight

    def give_back(self, flight: Flight, rate: float) -> None:
        """The batch has been computed with: its rows may be updated, with learning rate ``rate``."""
        flight.rate = rate
        self._returned += 1
        self._ferry.depart(flight)
        if not self._tables:
            self._flights.pop(flight.step)
            self._fence.fetched(flight.step)
            self._fence.updated(flight.step)
        elif self._threaded:
            self._done.put(flight)
        else:
            self._load_until(self._fence.last_before(flight.step))
            self._update(flight)
        self._places.release()

    def settle(self) -> None:
        """Wait until the updates of all batches given back are in the tables, and nobody is at the tables before the next is given back.

        Raises: the error of a stage.
        """
        began = self._clock()
        try:
            (self._fence.rest if self._threaded and self._tables else self._fence.settle)(self._taken)
        except Stopped:
            raise self._cause() from None
        self.occupancy.waited(began, self._clock(), {"update": (began, self._clock())})

    def on_the_way(self) -> dict[str, Tensor]:
        """Rows that the batches to come have read already and would no longer find as they were: with the tables, what a settled run goes on from."""
        step = self._taken
        kept: dict[str, Tensor] = {}
        while self._tables and step < self._end and self._fence.seen(step) < self._taken:
            flight = self._flights[step]
            for name, vectors_UD in flight.vectors.items():
                kept |= {f"{step}.{name}.ids": flight.routes[name].ids_U, f"{step}.{name}.vectors": vectors_UD}
            step += 1
        return kept

    def _land(self) -> None:
        """Let the stages come to where those of every rank can come without the batch that is not computed any more."""
        bound = min(self._returned + self.room, self._end)
        with self._moved:
            self._moved.wait_for(lambda: self._error is not None or self._prepared >= bound, _JOIN_SECONDS)
        with suppress(Stopped):
            self._fence.land(min(self._fence.last_before(self._returned) + 1, bound), self._returned, _JOIN_SECONDS)

    def _load(self, step: int) -> Flight:
        began = self._clock()
        share = self._share(step)
        ids: Mapping[str, Tensor] = {}
        if self._tables:
            # What is drawn depends on seed and step alone: not on the thread, its time, or how many ranks there are.
            generator = torch.Generator().manual_seed(int(np.random.SeedSequence([self._seed, step]).generate_state(1, np.uint64)[0]))
            ids = self._objective.draw(share.batch, generator)
        flight = Flight(step, share, ids, share.batch)
        self._worked(flight, "load", began)
        return flight

    def _route(self, flight: Flight) -> None:
        began = self._clock()
        for name, table in self._tables.items():
            flight.routes[name] = table.route(flight.ids[name])
        touched = {name: _touched(route) for name, route in flight.routes.items()}
        for name, ids_U in touched.items():
            flight.asked += len(ids_U)
            if self._recent:
                before = torch.cat([earlier[name] for earlier in self._recent])
                flight.collided += int(torch.isin(ids_U, before).sum())
        self._recent.append(touched)
        self._worked(flight, "route", began)

    def _fetch(self, flight: Flight) -> None:
        began = self._clock()
        self._fence.before_fetch(flight.step)
        passed = self._clock()
        flight.spans["fence"] = (began, passed)
        for name, table in self._tables.items():
            ids_U, key = flight.routes[name].ids_U, f"{flight.step}.{name}"
            vectors_UD = table.fetch(flight.routes[name])
            # With another number of ranks, or other rates of them, this rank may have other rows than were kept: then the newest ones serve.
            kept_U = self._kept.get(f"{key}.ids")
            if kept_U is not None and torch.equal(kept_U.to(ids_U.device), ids_U):
                vectors_UD = self._kept[f"{key}.vectors"].to(vectors_UD)
            flight.vectors[name] = vectors_UD
        self._fence.fetched(flight.step)
        self._worked(flight, "fetch", passed)

    def _update(self, flight: Flight) -> None:
        self._ferry.take_home(flight)
        self._fence.before_update(flight.step)
        began = self._clock()
        for name, table in self._tables.items():
            table.update(flight.routes[name], flight.gradients[name], flight.rate)
            if name in self._logs:
                self._logs[name].touch(_touched(flight.routes[name]))
        self._flights.pop(flight.step)
        self._worked(flight, "update", began)
        self._fence.updated(flight.step)

    def _worked(self, flight: Flight, stage: str, began: float) -> None:
        ended = self._clock()
        flight.spans[stage] = (began, ended)
        self.occupancy.worked(stage, ended - began, exposed=not self._threaded)

    def _load_until(self, last: int) -> None:
        """All that comes before the dense part, up to a step, one after another."""
        while self._loaded <= last:
            flight = self._load(self._loaded)
            self._flights[self._loaded] = flight
            for _, work in self._before:
                work(flight)
            self._loaded += 1

    def _load_all(self) -> None:
        for step in range(self._first, self._end):
            self._places.acquire()
            if self._error is not None:
                return
            flight = self._load(step)
            self._flights[step] = flight
            self._belts[0].put(flight)

    def _work_all(self, stage: str, work: Callable[[Flight], None], place: int) -> None:
        while (flight := self._belts[place].get()) is not None:
            began = self._clock()
            work(flight)
            if stage == "copy":
                self._worked(flight, stage, began)
            if place == 0:
                with self._moved:
                    self._prepared = flight.step + 1
                    self._moved.notify_all()
            self._belts[place + 1].put(flight)

    def _update_all(self) -> None:
        while (flight := self._done.get()) is not None:
            self._update(flight)

    def _guard(self, loop: Callable[..., None], *arguments: Any) -> None:
        try:
            loop(*arguments)
        except Stopped:
            pass
        except BaseException as error:  # told to whoever computes
            self._stop(error)

    def _stop(self, error: BaseException | None = None) -> None:
        if self._error is None:
            self._error = error or Stopped()
        self._fence.stop()
        with self._moved:
            self._moved.notify_all()
        self._places.release()
        for belt in (*self._belts, self._done):
            belt.put(None)

    def _cause(self) -> BaseException:
        assert self._error is not None
        return self._error


def _touched(route: Any) -> Tensor:
    """The rows of this process's memory that a route reads and its update changes: of a sharded table what all ranks ask of this one."""
    while hasattr(route, "share"):
        route = route.share
    ids_U: Tensor = route.ids_U
    return ids_U
