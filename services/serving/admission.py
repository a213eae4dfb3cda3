"""Requests that are ready, most urgent first, and which of them begin together.

A group is bounded by requests, beams and prompt tokens, so that a round stays short, and by the memory that is there. Requests are taken in order of urgency; one
that does not fit in beside the others waits for the next group, while those behind it may still fit. Only for memory nobody is passed: what the most
urgent one lacks is not given to others, or a large request would never begin.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from semantide.services.serving.ticket import A, P, Q, Stages, Ticket
from semantide.shared.decoding.kv_pool import KVLease


@dataclass(frozen=True)
class GroupBounds:
    """Most requests of a group, and most beams and prompt tokens of all of them; one request that is larger goes alone."""

    requests: int = 32
    beams: int = 1024
    tokens: int = 16384

    def __post_init__(self) -> None:
        for name in ("requests", "beams", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"a group may have {getattr(self, name)} {name}: give at least 1")


class Admission(Generic[Q, P, A]):
    """The ready requests. Its owner holds a lock around every call; ``drop`` says whether a request is given up."""

    def __init__(self, stages: Stages[Q, P, A], bounds: GroupBounds, drop: Callable[[Ticket[Q, P, A], float], bool]) -> None:
        self._stages, self._bounds, self._drop = stages, bounds, drop
        self._heap: list[tuple[float, int, Ticket[Q, P, A]]] = []
        self._order = itertools.count()
        self.rows = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def urgency(self) -> float:
        """Of the most urgent request: the smaller, the more urgent."""
        return self._heap[0][0]

    def push(self, ticket: Ticket[Q, P, A], urgency: float) -> None:
        """A request is ready."""
        self.rows += ticket.work.rows
        heapq.heappush(self._heap, (urgency, next(self._order), ticket))

    def forget_cancelled(self) -> None:
        """Let go of those whose clients left."""
        self._heap = [entry for entry in self._heap if not entry[2].cancelled]
        heapq.heapify(self._heap)
        self.rows = sum(ticket.work.rows for _, _, ticket in self._heap)

    def clear(self) -> list[Ticket[Q, P, A]]:
        """Take out everything."""
        left = [ticket for _, _, ticket in self._heap]
        self._heap, self.rows = [], 0
        return left

    def take(self, now: float) -> tuple[list[Ticket[Q, P, A]], list[KVLease]] | None:
        """The next group and its memory: None where there is no memory for the most urgent one, an empty group where nobody was left to be taken."""
        bounds = self._bounds
        taken: list[Ticket[Q, P, A]] = []
        leases: list[KVLease] = []
        passed: list[tuple[float, int, Ticket[Q, P, A]]] = []
        beams = tokens = 0
        short = False
        while self._heap and len(taken) < bounds.requests and len(passed) < bounds.requests and not (taken and taken[0].alone):
            entry = heapq.heappop(self._heap)
            ticket = entry[2]
            if self._drop(ticket, now):
                self.rows -= ticket.work.rows
                continue
            work = ticket.work
            small = beams + work.beams <= bounds.beams and tokens + work.tokens <= bounds.tokens
            if taken and not (small and not ticket.alone and work.family == taken[0].work.family):
                passed.append(entry)
                continue
            try:
                lease = self._stages.admit(work)
            except Exception as error:
                self.rows -= work.rows
                ticket.fail(error)
                continue
            if lease is None:
                passed.append(entry)
                short = True
                break
            taken.append(ticket)
            leases.append(lease)
            beams, tokens = beams + work.beams, tokens + work.tokens
            self.rows -= work.rows
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return None if short and not taken else (taken, leases)
