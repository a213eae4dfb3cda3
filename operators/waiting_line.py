"""Who starts next, and who makes room.

The line stands by priority, and waiting is worth priority: so long a wait, one step. Between two that wait the order never changes, so
everybody comes to the head in the end. From the head down each gang starts if it finds room (backfill: smaller ones go
past one that does not fit). What a gang may take from others, all of it after a checkpoint:

    higher priority    from running gangs of lower priority (what those waited for counts for them), at once
    head of the line   from gangs that went past it while it waited, after ``patience_seconds``
    drain              after ``drain_seconds`` the nodes that will be free first take nobody any more whose room could not be taken back

Replicas of services that found no room come before everybody, and take from running gangs of lower priority alone. They hold up nobody else.

Room that is being given back is promised to whom it is for; a promise is not stored anywhere, it comes out the same at every look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from semantide.operators.fleet import Fleet
from semantide.operators.placement import Placement, fits, place
from semantide.operators.refusal import Refusal, Survey
from semantide.operators.request import Request, Shape
from semantide.operators.resources import PodPlacement

_SEARCHES = 16  # gangs that look for victims at one look
_NAMES = 3  # victims named in a reason


@dataclass(frozen=True)
class Policy:
    """How the line moves. ``ageing_seconds`` of waiting are worth one step of priority."""

    ageing_seconds: float = 600.0
    patience_seconds: float = 60.0
    drain_seconds: float = 1800.0
    regrow_seconds: float = 900.0


@dataclass(frozen=True)
class Waiting:
    """A gang without room. ``since`` is when it joined the line, ``waited`` what it waited before (seconds), ``after`` the end of its pause.

    ``restartable``: it would go on from a checkpoint, so its room can be taken again. ``holds``: nothing says that it could not use room; where its
    last placings came to nothing, for whatever else it lacks, nobody makes room for it and nobody is held up.
    """

    request: Request
    priority: int = 0
    since: float = 0.0
    waited: float = 0.0
    after: float = 0.0
    restartable: bool = True
    holds: bool = True


@dataclass(frozen=True)
class Running:
    """A gang with room. ``since`` and ``waited`` are those it had in the line, ``started`` when it left it.

    ``restartable``: it goes on from a checkpoint, so its room may be taken. ``leaving``: it was told to go and still holds its
    room. ``ends``: when it is thought to end.
    """

    request: Request
    pods: tuple[PodPlacement, ...]
    priority: int = 0
    since: float = 0.0
    waited: float = 0.0
    started: float = 0.0
    restartable: bool = True
    leaving: bool = False
    ends: float | None = None

    @property
    def npus(self) -> int:
        """NPUs it holds."""
        return sum(len(pod.npus) for pod in self.pods)


@dataclass(frozen=True)
class Preemption:
    """``victim`` shall save a checkpoint and go, so that ``beneficiary`` can start (which may be itself, in another size)."""

    victim: str
    beneficiary: str


@dataclass(frozen=True)
class Decision:
    """What one look at the line decides; ``reasons`` says for everybody who goes on waiting why."""

    starts: tuple[Placement, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def standing(gang: Waiting, policy: Policy) -> float:
    """Place in the line, the larger the nearer to its head; the difference of two does not change while both wait."""
    return gang.priority + (gang.waited - gang.since) / policy.ageing_seconds


def _place_in_line(gang: Waiting, policy: Policy) -> tuple[float, float, str]:
    return -standing(gang, policy), gang.since, gang.request.key


def in_order(waiting: Iterable[Waiting], policy: Policy) -> list[Waiting]:
    """The line, head first."""
    return sorted(waiting, key=lambda gang: _place_in_line(gang, policy))


def _earned(gang: Running, policy: Policy) -> float:
    """What a waiting gang's priority must be above to take this one's room: its own and what it waited for."""
    return gang.priority + max(0.0, gang.waited + gang.started - gang.since) / policy.ageing_seconds


def may_take(head: Waiting, victim: Running, policy: Policy, overtakers: bool) -> bool:
    """Whether a waiting gang may have a running one's room."""
    if not victim.restartable or victim.leaving:
        return False
    if head.priority > _earned(victim, policy):
        return True
    stood = Waiting(victim.request, victim.priority, victim.since, victim.waited)
    return overtakers and head.since < victim.started and _place_in_line(head, policy) < _place_in_line(stood, policy)


def _without(fleet: Fleet, victims: Iterable[Running]) -> Fleet:
    after = fleet.copy()
    for victim in victims:
        after.give_back(victim.pods, victim.request.shape)
    return after


def victims_for(request: Request, candidates: Sequence[Running], fleet: Fleet) -> list[Running]:
    """The fewest of ``candidates`` (cheapest first) whose room lets the gang start; none when all together do not."""
    on_nodes = {fleet.nodes[number].name for _, _, numbers in fleet.candidates(request.shape).kinds for number in numbers}
    useful = [victim for victim in candidates if any(pod.node in on_nodes for pod in victim.pods)]
    if not fits(request, _without(fleet, useful)):
        return []
    low, high = 0, len(useful)  # so many of the cheapest are enough: more room never makes a gang fit less
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(request, _without(fleet, useful[:middle])) else (middle + 1, high)
    # Those without whom it would fit as well stay, the dearest first.
    kept, chosen = _without(fleet, useful[:low]), list(useful[:low])
    for victim in reversed(useful[:low]):
        trial = kept.copy()
        trial.occupy(victim.pods, victim.request.shape)
        if fits(request, trial):
            kept = trial
            chosen.remove(victim)
    return chosen


def decide(
    waiting: Iterable[Waiting],
    running: Sequence[Running],
    nodes: Fleet,
    now: float,
    policy: Policy = Policy(),
    serving: Iterable[Waiting] = (),
) -> Decision:
    """Look at the line once; ``nodes`` is left as it is. ``serving`` are replicas without room; where room is made for them the reasons say so."""
    look = _Look(running, nodes, now, policy)
    look.serve(sorted(serving, key=lambda gang: (-gang.priority, gang.request.key)))
    return look.decide(in_order(waiting, policy))


class _Look:
    """One look: ``free`` is what can be used now, ``soon`` what will be when those that leave have left; promises are taken from both.

    ``undrained`` is what gangs may use that could not be moved again: all that is free but the nodes which are drained.
    """

    def __init__(self, running: Sequence[Running], nodes: Fleet, now: float, policy: Policy) -> None:
        self.now, self.policy, self.running = now, policy, running
        self.free = nodes.copy()
        self.soon = _without(nodes, (gang for gang in running if gang.leaving))
        self.undrained: Fleet | None = None
        self.starts: list[Placement] = []
        self.preemptions: list[Preemption] = []
        self.reasons: dict[str, str] = {}
        self._victims: set[str] = set()
        self._surveys: dict[Shape, Survey] = {}
        self._room_soon: dict[Shape, int] = {}
        self._weakest = min((_earned(gang, policy) for gang in running if gang.restartable and not gang.leaving), default=math.inf)
        self._giving = any(gang.leaving for gang in running)
        self._blocked = 0
        self._searches = _SEARCHES

    def serve(self, replicas: list[Waiting]) -> None:
        """Promise room to replicas, or make some."""
        for gang in replicas:
            if way := self._make_way(gang, overtakers=False):
                self.reasons[gang.request.key] = way

    def decide(self, line: list[Waiting]) -> Decision:
        for gang in line:
            key = gang.request.key
            if gang.after > self.now:
                self.reasons[key] = f"pauses for another {math.ceil(gang.after - self.now)} seconds before it starts again"
                continue
            found = self._place(gang.request, gang.restartable)
            if isinstance(found, Placement):
                self.starts.append(found)
                self._promise(found, gang.request)
            else:
                self.reasons[key] = self._wait(gang, found)
        if not self.starts and not self.preemptions and not self._blocked:
            self._regrow()
        return Decision(tuple(self.starts), tuple(self.preemptions), self.reasons)

    def _place(self, request: Request, restartable: bool) -> Placement | Refusal:
        """Room now; what had too little of it for others of the same shape is not searched again, since room only shrinks during a look."""
        survey = self._surveys.get(request.shape)
        if survey is not None and survey.fitting < request.fewest:
            return survey.refusal(request)
        if self.undrained is not None and not restartable:
            return place(request, self.undrained)
        found = place(request, self.free)
        if isinstance(found, Refusal):
            self._surveys[request.shape] = found.survey
        return found

    def _place_soon(self, request: Request) -> Placement | None:
        if not self._giving or self._room_soon.get(request.shape, request.fewest) < request.fewest:
            return None
        found = place(request, self.soon)
        if isinstance(found, Placement):
            return found
        self._room_soon[request.shape] = found.survey.fitting
        return None

    def _promise(self, found: Placement, request: Request) -> None:
        for fleet in (self.free, self.soon, self.undrained):
            if fleet is not None:
                fleet.occupy(found.pods, request.shape)

    def _wait(self, gang: Waiting, refusal: Refusal) -> str:
        """Find other ways to room; says why the gang does not start now."""
        request, waited = gang.request, gang.waited + self.now - gang.since
        if not refusal.survey.ever(request):
            return refusal.reason  # nor does it hold up those behind it
        if not gang.holds:
            return f"{refusal.reason}; its last placing failed, so for now nobody makes room for it"
        if way := self._make_way(gang, overtakers=not self._blocked and waited >= self.policy.patience_seconds):
            return f"{refusal.reason}; {way}"
        self._blocked += 1
        if self._blocked == 1 and waited >= self.policy.drain_seconds:
            return f"{refusal.reason}; {self._drain(request):,} nodes take only gangs that can be moved until it starts"
        behind = f"; {self._blocked - 1:,} ahead of it in line" if self._blocked > 1 else ""
        return refusal.reason + behind

    def _make_way(self, gang: Waiting, *, overtakers: bool) -> str:
        """Promise the gang what is being given back, or let others give room; how, in words, and nothing where neither helps."""
        if (found := self._place_soon(gang.request)) is not None:
            self._promise(found, gang.request)
            return "room for it is being given back"
        victims = self._take(gang, overtakers) if overtakers or gang.priority > self._weakest else []
        if not victims:
            return ""
        names = ", ".join(victim.request.key for victim in victims[:_NAMES]) + (f" and {len(victims) - _NAMES} more" if len(victims) > _NAMES else "")
        return f"{names} {'saves its' if len(victims) == 1 else 'save their'} state and {'makes' if len(victims) == 1 else 'make'} room"

    def _take(self, gang: Waiting, overtakers: bool) -> list[Running]:
        if self._searches == 0:
            return []
        candidates = [other for other in self.running if other.request.key not in self._victims and may_take(gang, other, self.policy, overtakers)]
        if not candidates:
            return []
        self._searches -= 1
        candidates.sort(key=lambda other: (other.priority, -other.started, other.request.key))
        victims = victims_for(gang.request, candidates, self.soon)
        for victim in victims:
            self._victims.add(victim.request.key)
            self.preemptions.append(Preemption(victim.request.key, gang.request.key))
            self.soon.give_back(victim.pods, victim.request.shape)
        if victims:
            self._giving, self._room_soon = True, {}
            found = place(gang.request, self.soon)
            assert isinstance(found, Placement), "the victims' room is enough"
            self._promise(found, gang.request)
        return victims

    def _drain(self, request: Request) -> int:
        """Keep the nodes with the least left to end for this gang; whatever ends there, they only become freer."""
        empty = _without(self.soon, (gang for gang in self.running if not gang.leaving and gang.ends != math.inf and gang.request.key not in self._victims))
        room, missing, kept = empty.room(request.shape), request.fewest, 0
        busy = {number: (empty.free[number] & ~self.soon.free[number]).bit_count() / room[number] for number in room}
        self.undrained = self.free.copy()
        for number in sorted(room, key=lambda number: (busy[number], number)):
            if missing <= 0:
                break
            self.undrained.close(number)
            missing, kept = missing - room[number], kept + 1
        return kept

    def _regrow(self) -> None:
        """Let one elastic gang that runs smaller than it would like start again larger, where nobody waits for the room."""
        for gang in sorted(self.running, key=lambda gang: (-gang.priority, gang.started, gang.request.key)):
            wanted, have = len(gang.request.pods), len(gang.pods)
            if have >= wanted or gang.leaving or not gang.restartable or self.now - gang.started < self.policy.regrow_seconds:
                continue
            found = place(gang.request, _without(self.soon, (gang,)))
            if isinstance(found, Placement) and len(found.pods) > have:
                self.preemptions.append(Preemption(gang.request.key, gang.request.key))
                return
