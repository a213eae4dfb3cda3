"""Clients that go on while containers are killed: one sends events until each is accepted, one asks for recommendations and knows the answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from semantide.client import Client, StackError
from semantide.shared.errors import TransientError

_PASSING = (429, 503, 507)  # answers that ask to come again


@dataclass(eq=False)
class Load(threading.Thread):
    """Requests one after the other, until told to end; ``served`` holds when each one was answered, seconds of a clock that only counts, ``told`` what came instead."""

    client: Client
    wrong: list[str] = field(default_factory=list, init=False)
    told: Counter[str] = field(default_factory=Counter, init=False)
    served: list[float] = field(default_factory=list, init=False)
    ended: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        super().__init__(name=type(self).__name__, daemon=True)

    def passes(self, error: TransientError | StackError) -> bool:
        """Whether it may pass: nobody answered, or somebody who said that it may, and what it was. All are counted."""
        if not isinstance(error, StackError):
            self.told["no answer"] += 1
            return True
        self.told[f"{error.status} {error.kind or 'without words'}"] += 1
        return error.status in _PASSING and bool(error.kind)

    def was_served(self, since: float) -> bool:
        """Whether there has been an answer since then."""
        return bool(self.served) and self.served[-1] > since

    def longest_pause(self, begin: float) -> float:
        """Seconds between two answers, at most, since then."""
        served = list(self.served)
        later = [moment for moment in served if moment > begin]
        earlier = served[-len(later) - 1 : len(served) - len(later)]
        times = [*earlier, *later]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


@dataclass(eq=False)
class Sender(Load):
    """Sends batches of events with ids of their own; a batch whose fate is unknown is sent again as it is."""

    items: list[str]
    batch: int = 20
    pause_seconds: float = 0.05
    repeat_every: int = 0  # batches of which one is sent a second time though it was accepted; 0: none
    accepted: int = 0
    again: int = 0
    refused: list[int] = field(default_factory=list)  # numbers of batches that will never be accepted
    number: int = 0  # of the batch that is sent next: all before it are accepted or refused

    def rows(self, number: int) -> list[dict[str, Any]]:
        """The batch of a number; no two events of a sender have the same time."""
        return [
            {
                "user": f"load-{(number + place) % 50}",
                "item": self.items[(number * 7 + place) % len(self.items)],
                "time": 1_767_225_600_000 + number * 1000 + place,
                "action": "click",
                "event_id": f"load-{number}-{place}",
            }
            for place in range(self.batch)
        ]

    def run(self) -> None:
        """Until told to end."""
        while not self.ended.is_set():
            rows = self.rows(self.number)
            if self._send(rows):
                self.accepted += len(rows)
                self.served.append(time.monotonic())
                if self.repeat_every and self.number % self.repeat_every == 0:
                    self._send(rows)
            else:
                self.refused.append(self.number)
            self.number += 1
            time.sleep(self.pause_seconds)

    def _send(self, rows: list[dict[str, Any]]) -> bool:
        # Whatever was begun is brought to its end: an event sent twice must count once.
        while True:
            try:
                answer = self.client.post("/v1/interactions", {"interactions": rows})
                if answer["accepted"] != len(rows):
                    self.wrong.append(str(answer))
                return True
            except (TransientError, StackError) as error:
                if not self.passes(error):
                    self.wrong.append(repr(error))
                    return False
            self.again += 1
            time.sleep(0.2)


@dataclass(eq=False)
class Asker(Load):
    """Asks the same few questions and compares with the first answers.

    ``patient``: it comes again where it was not answered, or by the retriever in the generator's place, which such an answer says; else that is wrong.
    """

    questions: list[dict[str, Any]]
    patient: bool = True
    refused: int = 0
    replaced: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expected = [self._ask(question)[0] for question in self.questions]

    def _ask(self, question: dict[str, Any]) -> tuple[list[str], str | None]:
        answer = self.client.post("/v1/recommendations", question)
        return [item["item"] for item in answer["items"]], answer["fallback"]

    def run(self) -> None:
        """Until told to end."""
        turn = 0
        while not self.ended.is_set():
            place = turn % len(self.questions)
            turn += 1
            try:
                found, fallback = self._ask(self.questions[place])
            except (TransientError, StackError) as error:
                # 503: nothing is live in a process that has just begun, or the broker is away; the client comes again.
                if self.passes(error) and self.patient:
                    self.refused += 1
                    time.sleep(0.2)
                else:
                    self.wrong.append(repr(error))
                continue
            if found == self.expected[place]:
                self.served.append(time.monotonic())
            elif self.patient and fallback == "no generator is live in this process":
                # A process that has just begun and is not ready yet: a balancer would not send it anything.
                self.replaced += 1
            else:
                self.wrong.append(f"{self.questions[place]}: {found} instead of {self.expected[place]}")
            time.sleep(0.05)
