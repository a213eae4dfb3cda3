"""A request on its way through the scheduler, and what the scheduler needs to know of the work itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from semantide.shared.decoding.kv_pool import KVLease

Mark = tuple[str, float, float]
"""A stage, and when it began and ended by the scheduler's clock."""


class Prepared(Protocol):
    """A request with everything about it looked up, ready to join a group.

    ``beams`` is its width, ``tokens`` what its prompt has to read, ``rows`` how many rows go through the model for it in all. Only requests
    of an equal ``family`` go together.
    """

    @property
    def family(self) -> object: ...  # noqa: D102
    @property
    def beams(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102


Q = TypeVar("Q")
Q_contra = TypeVar("Q_contra", contravariant=True)
P = TypeVar("P", bound=Prepared)
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class Passage:
    """When each stage of a request began and ended, in order, by the scheduler's clock."""

    arrived: float
    marks: tuple[Mark, ...]

    def seconds(self, *stages: str) -> float:
        """Time spent in these stages."""
        return sum(end - start for stage, start, end in self.marks if stage in stages)


class SearchAgain:
    """In place of an answer: what was found may not be handed out any more, the request goes back to those that wait."""


class Run(Protocol[A_co]):
    """A group of requests that begin and end together. ``marks`` are the stages so far."""

    marks: list[Mark]

    def next_rows(self) -> int:
        """How many rows the next round computes."""
        ...

    def advance(self) -> bool:
        """Compute one round; whether there is another one."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these requests only (ascending places in the present order)."""
        ...

    def answers(self) -> Sequence[A_co | Exception | SearchAgain]:
        """One for each request, after the last round."""
        ...

    def remember(self) -> None:
        """Keep what may help the next time; called once the answers are handed out."""
        ...

    def close(self) -> None:
        """Give back all that was held; called once, whatever happened."""
        ...


class Stages(Protocol[Q_contra, P, A_co]):
    """The work that is scheduled."""

    def assemble(self, queries: Sequence[Q_contra]) -> Sequence[P | Exception]:
        """Look up what the requests need, or say what is wrong with one."""
        ...

    def admit(self, request: P) -> KVLease | None:
        """Set memory aside for a request; None where there is too little as long as others run.

        Raises: what a request should be told that can never be admitted.
        """
        ...

    def begin(self, requests: Sequence[P], leases: Sequence[KVLease], share: float) -> Run[A_co]:
        """Make a group of admitted requests; each gets ``share`` of its width. The run gives the leases back."""
        ...


class Watcher:
    """What happens in the scheduler, for those who count it; this one counts nothing."""

    def dropped(self, cause: str) -> None:
        """A request was given up: "cancelled" by its client, or "late"."""

    def answered(self, run: Any, passages: Sequence[Passage]) -> None:
        """A run came to its end and its answers were handed out: what its requests went through."""


@dataclass(eq=False)
class Ticket(Generic[Q, P, A]):
    """One request. Its future stays pending until there is an answer, so that its client can cancel it at any time.

    ``alone`` marks one that is tried without others, because a group with it failed.
    """

    query: Q
    arrived: float
    deadline: float
    future: Future[tuple[A, Passage]] = field(default_factory=Future)
    prepared: P | None = None
    alone: bool = False
    since: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more."""
        return self.future.cancelled()

    @property
    def work(self) -> P:
        """What was prepared."""
        assert self.prepared is not None, "asked for before it was assembled"
        return self.prepared

    def note(self, stage: str, start: float, end: float) -> None:
        """Remember a stage; what follows waits from its end on."""
        self.marks.append((stage, start, end))
        self.since = end

    def passage(self) -> Passage:
        """The stages so far."""
        return Passage(self.arrived, tuple(self.marks))

    def succeed(self, answer: A) -> None:
        """Hand out the answer, if somebody still waits."""
        try:
            self.future.set_result((answer, self.passage()))
        except InvalidStateError:
            pass

    def fail(self, error: Exception) -> None:
        """Hand out the cause, if somebody still waits."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            pass


class Begun(Generic[Q, P, A]):
    """Requests that begin together. ``tickets`` stand in the order of the run's requests."""

    run: Run[A]

    def __init__(self, tickets: list[Ticket[Q, P, A]], leases: list[KVLease], urgency: float) -> None:
        self.tickets, self.leases, self.urgency = tickets, leases, urgency
        self.requests = len(tickets)
        self.rows_left = sum(ticket.work.rows for ticket in tickets)
