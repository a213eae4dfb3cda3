"""Which replica answers a request: the user's own, as long as it has no more than its share of the work under way. Pure.

A user's requests go to one replica, where the prompt of the last visit is kept. Every replica has a number for every user (rendezvous hashing; Thaler and
Ravishankar, 1998), and the highest one wins, so a replica that comes or goes moves only its own users. A replica that is busy may hold ``slack`` times the mean
of the requests and of the work under way at most (bounded loads; Mirrokni, Thorup and Zadimoghaddam, SODA 2018): what goes beyond it is the next one's, in the
user's order. Who has no user goes where least work is. Work counts beside requests because a wide search or a long history takes as long as many small ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

SLACK = 1.25
_MASK = (1 << 64) - 1
_WIDTH_OF_ONE = 50  # beams, and
_ITEMS_OF_ONE = 200  # items of a history, that take about as long as everything else of a request
_DEFAULT_WIDTH, _DEFAULT_N = 50, 10


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _mixed(number: int) -> int:
    """A number whose bits all depend on all of the given one's (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@dataclass
class Replica:
    """One replica: whether it takes requests, and the work that it has under way."""

    address: str
    ready: bool = False
    requests: int = 0
    work: float = 0.0
    own: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.own = _digest(self.address)

    def begin(self, work: float) -> None:
        """A request was given to it."""
        self.requests += 1
        self.work += work

    def end(self, work: float) -> None:
        """A request is over."""
        self.requests -= 1
        self.work = self.work - work if self.requests else 0.0


@dataclass(frozen=True)
class Asked:
    """What matters of a request: whose it is, and how much work. ``user`` None: nobody's."""

    user: str | None = None
    work: float = 1.0

    @classmethod
    def of(cls, body: bytes) -> Asked:
        """What a recommendation request says; whatever is wrong with it is the replica's to say."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(said, dict):
            return cls()
        user = said.get("user", said.get("split_by"))
        history = said.get("history")
        ranked = _number(said.get("depth")) or _number(said.get("n")) or _DEFAULT_N
        width = _number(said.get("beam_width")) or max(_DEFAULT_WIDTH, 1.5 * ranked)
        return cls(user if isinstance(user, str) else None, 1 + width / _WIDTH_OF_ONE + (len(history) / _ITEMS_OF_ONE if isinstance(history, list) else 0))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1_000_000 else 0.0


class Replicas:
    """All replicas that are known."""

    def __init__(self, slack: float = SLACK) -> None:
        if slack < 1:
            raise ValueError(f"slack is {slack}: below 1 the replicas together could not hold the work; give 1 or more")
        self._slack = slack
        self._known: dict[str, Replica] = {}

    def __iter__(self) -> Any:
        return iter(list(self._known.values()))

    def set(self, addresses: Iterable[str]) -> list[Replica]:
        """Know these replicas and no others; those that are new. What a replica that goes has under way is still answered."""
        wanted = set(addresses)
        self._known = {address: replica for address, replica in self._known.items() if address in wanted}
        new = [Replica(address) for address in sorted(wanted - set(self._known))]
        self._known |= {replica.address: replica for replica in new}
        return new

    def choose(self, asked: Asked, tried: Collection[str] = ()) -> Replica | None:
        """The replica for a request that those in ``tried`` have not answered; None where no other takes requests."""
        takers = [replica for replica in self._known.values() if replica.ready and replica.address not in tried]
        if not takers:
            return None
        if asked.user is None:
            return min(takers, key=lambda replica: (replica.work, replica.requests, replica.address))
        most = self._slack * (sum(replica.work for replica in takers) + asked.work) / len(takers)
        most_requests = self._slack * (sum(replica.requests for replica in takers) + 1) / len(takers)
        user = _digest(asked.user)
        own = sorted(takers, key=lambda replica: _mixed(user ^ replica.own), reverse=True)
        fitting = (replica for replica in own if not replica.requests or (replica.work + asked.work <= most and replica.requests + 1 <= most_requests))
        # An idle replica takes anything: a request that is larger than everybody's share must go somewhere.
        return next(fitting, None) or min(own, key=lambda replica: replica.work)
