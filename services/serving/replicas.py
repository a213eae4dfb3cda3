"""Which replica answers a request: the one that is expected to have answered it first, among those that have no more than their share of requests. Pure.

What a request will take is learned (``work_estimate.py``) and depends on the replica: the one that answered the user's last visit has kept its prompt. So a user
stays as long as what he would wait for there is worth less than reading his history anew elsewhere. Who was never seen goes, of several that are alike, to a
replica that is his own: every replica has a number for every user (rendezvous hashing; Thaler and Ravishankar, 1998), and the highest one wins, so that
several routers agree, and a replica that comes or goes moves only its own users. No replica that is busier than another gets more than ``slack`` times the mean of the
requests under way (bounded loads; Mirrokni, Thorup and Zadimoghaddam, SODA 2018): estimates may be wrong, and then nobody waits behind too many.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from semantide.services.serving.work_estimate import WorkEstimate

SLACK = 1.5
_MASK = (1 << 64) - 1
_DEFAULT_WIDTH, _DEFAULT_N = 50, 10
_REMEMBERED_USERS = 100_000
_USUAL_ITEMS = 100.0  # of a history, before any was seen
_USUAL_CHANGES = 0.02  # by each new user's
_PAGE_SECONDS = 0.001  # of what needs no search


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _mixed(number: int) -> int:
    """A number whose bits all depend on all of the given one's (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@dataclass(eq=False)
class Replica:
    """One replica: whether it takes requests, and the work that it has under way, seconds. ``since`` is when it last had nothing to do, or ended a request."""

    address: str
    ready: bool = False
    requests: int = 0
    work: float = 0.0
    since: float = 0.0
    own: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.own = _digest(self.address)

    def backlog(self, now: float) -> float:
        """Seconds until it is expected to have ended what it has; the request that it works on is one of several that are alike."""
        return self.work - min(max(0.0, now - self.since), self.work / self.requests) if self.requests else 0.0


@dataclass(frozen=True)
class Asked:
    """What matters of a request: whose it is, and what makes it long. ``user`` None: nobody's; ``items`` None: as many as are stored of the user. ``searches``
    is False for what is answered from what is there, such as a further page."""

    user: str | None = None
    beams: float = _DEFAULT_WIDTH
    items: int | None = None
    searches: bool = True

    @classmethod
    def of(cls, body: bytes) -> Asked:
        """What a request for recommendations, or for the scores of given items, says; whatever is wrong with it is the replica's to say."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return NOTHING
        if not isinstance(said, dict):
            return NOTHING
        user, history = said.get("user"), said.get("history")
        ranked = _number(said.get("depth")) or _number(said.get("n")) or _DEFAULT_N
        given = said.get("items")
        beams = len(given) if isinstance(given, list) else _number(said.get("beam_width")) or max(_DEFAULT_WIDTH, 1.5 * ranked)
        return cls(
            user if isinstance(user, str) else None,
            beams,
            len(history) if isinstance(history, list) else None if isinstance(user, str) else 0,
            not isinstance(said.get("cursor"), str),
        )


NOTHING = Asked(beams=0, items=0, searches=False)
"""What is no recommendation, or none that can be read."""


@dataclass(frozen=True)
class Given:
    """A request that a replica has: the work that it is expected to be, seconds, and whether the replica was thought to have its prompt."""

    replica: Replica
    asked: Asked
    work: float
    known: bool
    began: float


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1_000_000 else 0.0


class Replicas:
    """All replicas that are known, and what was learned of requests and users. Times are seconds from anywhere."""

    def __init__(self, slack: float = SLACK, remembered: int = _REMEMBERED_USERS) -> None:
        if slack < 1:
            raise ValueError(f"slack is {slack}: below 1 the replicas together could not hold the work; give 1 or more")
        self._slack, self._remembered = slack, remembered
        self._known: dict[str, Replica] = {}
        self._estimate = WorkEstimate()
        self._usual_items = _USUAL_ITEMS
        # By the digest of a user: who answered last, and how long the history was then.
        self._visits: OrderedDict[int, tuple[Replica, int]] = OrderedDict()

    def __iter__(self) -> Any:
        return iter(list(self._known.values()))

    def set(self, addresses: Iterable[str]) -> list[Replica]:
        """Know these replicas and no others; those that are new. What a replica that goes has under way is still answered."""
        wanted = set(addresses)
        self._known = {address: replica for address, replica in self._known.items() if address in wanted}
        new = [Replica(address) for address in sorted(wanted - set(self._known))]
        self._known |= {replica.address: replica for replica in new}
        return new

    def choose(self, asked: Asked, now: float, tried: Collection[str] = ()) -> Replica | None:
        """The replica for a request that those in ``tried`` have not answered; None where no other takes requests."""
        takers = [replica for replica in self._known.values() if replica.ready and replica.address not in tried]
        if not takers:
            return None
        fewest = min(replica.requests for replica in takers)
        most = self._slack * (sum(replica.requests for replica in takers) + 1) / len(takers)
        fitting = [replica for replica in takers if replica.requests == fewest or replica.requests + 1 <= most]
        user = 0 if asked.user is None else _digest(asked.user)
        last, items = self._visit(asked, user)
        new, again = (self._seconds(asked, items, known=known) for known in (False, True))
        ends = ((replica.backlog(now) + (again if replica is last else new), -_mixed(user ^ replica.own), place) for place, replica in enumerate(fitting))
        return fitting[min(ends)[2]]

    def begin(self, replica: Replica, asked: Asked, now: float) -> Given:
        """A replica is given a request."""
        last, items = self._visit(asked, 0 if asked.user is None else _digest(asked.user))
        known = last is replica
        given = Given(replica, asked, self._seconds(asked, items, known=known), known, now)
        if not replica.requests:
            replica.since = now
        replica.requests += 1
        replica.work += given.work
        return given

    def end(self, given: Given, now: float, items: int | None = None) -> None:
        """A request is over; ``items`` is how long the history was that a replica has searched for, None where it has not."""
        replica, asked = given.replica, given.asked
        replica.requests -= 1
        replica.work = max(0.0, replica.work - given.work) if replica.requests else 0.0
        took, replica.since = now - max(given.began, replica.since), now
        if items is None or not asked.searches:
            return
        # Where a replica works on several at once their ends come together: the first has all of the time, the others next to none, and the sum is right.
        self._estimate.saw(asked.beams, items, took, known=given.known)
        if asked.user is not None:
            user = _digest(asked.user)
            if user not in self._visits:
                self._usual_items += _USUAL_CHANGES * (items - self._usual_items)
            self._visits[user] = replica, items
            self._visits.move_to_end(user)
            if len(self._visits) > self._remembered:
                self._visits.popitem(last=False)

    def _visit(self, asked: Asked, user: int) -> tuple[Replica | None, float]:
        """Who answered the user's last visit, and how long the history will be."""
        last, items = self._visits.get(user, (None, self._usual_items)) if asked.user is not None else (None, 0.0)
        return last, items if asked.items is None else asked.items

    def _seconds(self, asked: Asked, items: float, *, known: bool) -> float:
        return self._estimate.seconds(asked.beams, items, known=known) if asked.searches else _PAGE_SECONDS
