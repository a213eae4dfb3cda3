"""When a request is sent again, and after which pause.

Only what may be repeated is: reading, what names its own outcome (PUT, DELETE, rows with event ids or contents that tell them apart, jobs under an idempotency key), and whatever
never reached the stack or was refused at its door (429).
"""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

REFUSED = 429
"""Too many requests: nothing was done."""


@dataclass(frozen=True)
class Retries:
    """How patient a client is. The pause doubles from ``first_seconds`` to ``most_seconds``, each time by a half or more of it; a stack that says how long to wait is obeyed up to ``obey_seconds``."""

    attempts: int = 5
    first_seconds: float = 0.2
    most_seconds: float = 10.0
    obey_seconds: float = 60.0
    statuses: frozenset[int] = frozenset({REFUSED, 502, 503, 504})

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_seconds <= self.most_seconds:
            raise ValueError(f"{self}: attempts are 1 or more, and 0 <= first_seconds <= most_seconds")

    def pause(self, attempt: int, chance: random.Random) -> float:
        """Seconds after the attempt of this number, from 0."""
        whole = min(self.most_seconds, self.first_seconds * 2.0 ** min(attempt, 60))
        return whole * (0.5 + 0.5 * chance.random())

    def after_answer(self, status: int, headers: Mapping[str, str], attempt: int, *, repeatable: bool, chance: random.Random) -> float | None:
        """Seconds to wait before the request is sent again; None where the answer stands."""
        if attempt + 1 >= self.attempts or status not in self.statuses or not (repeatable or status == REFUSED):
            return None
        told = said_seconds(headers.get("retry-after"), time.time())
        if told is None:
            return self.pause(attempt, chance)
        return max(told, self.pause(attempt, chance)) if told <= self.obey_seconds else None

    def after_silence(self, attempt: int, *, repeatable: bool, sent: bool, chance: random.Random) -> float | None:
        """The same where nobody answered; ``sent`` says whether the request may have reached the stack."""
        if attempt + 1 >= self.attempts or (sent and not repeatable):
            return None
        return self.pause(attempt, chance)


def said_seconds(header: str | None, now: float) -> float | None:
    """What ``Retry-After`` asks for, in seconds or as a date; None where it says nothing that can be read."""
    if header is None:
        return None
    if header.strip().isascii() and header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, TypeError):
        return None
