"""Clients that go on while containers are killed: one sends events until each is accepted, one asks for recommendations and knows the answers."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from semantide.services.commandline.client import Client, StackError
from semantide.shared.errors import TransientError

_BATCH = 20


@dataclass(eq=False)
class Load(threading.Thread):
    """Requests one after the other, until told to end; ``served`` holds when each one was answered, seconds of a clock that only counts."""

    client: Client
    wrong: list[str] = field(default_factory=list, init=False)
    served: list[float] = field(default_factory=list, init=False)
    ended: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        super().__init__(name=type(self).__name__, daemon=True)

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
    accepted: int = 0
    again: int = 0

    def run(self) -> None:
        """Until told to end."""
        number = 0
        while not self.ended.is_set():
            rows = [
                {
                    "user": f"load-{(number + place) % 50}",
                    "item": self.items[(number * 7 + place) % len(self.items)],
                    "time": 1_767_225_600_000 + number * 1000 + place,
                    "action": "click",
                    "event_id": f"load-{number}-{place}",
                }
                for place in range(_BATCH)
            ]
            if self._send(rows):
                self.accepted += _BATCH
                self.served.append(time.monotonic())
            number += 1
            time.sleep(0.05)

    def _send(self, rows: list[dict[str, Any]]) -> bool:
        # Whatever was begun is brought to its end: an event sent twice must count once.
        while True:
            try:
                answer = self.client.post("/v1/interactions", {"interactions": rows})
                if answer["accepted"] != len(rows):
                    self.wrong.append(str(answer))
                return True
            except TransientError:
                pass
            except StackError as error:
                if error.status != 503:
                    self.wrong.append(f"{error.status}: {error}")
                    return False
            self.again += 1
            time.sleep(0.2)


@dataclass(eq=False)
class Asker(Load):
    """Asks the same few questions and compares with the first answers. ``patient``: it comes again where it was not answered, else that is wrong."""

    questions: list[dict[str, Any]]
    patient: bool = True
    refused: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expected = [self._ask(question) for question in self.questions]

    def _ask(self, question: dict[str, Any]) -> list[str]:
        return [item["item"] for item in self.client.post("/v1/recommendations", question)["items"]]

    def run(self) -> None:
        """Until told to end."""
        turn = 0
        while not self.ended.is_set():
            place = turn % len(self.questions)
            turn += 1
            try:
                found = self._ask(self.questions[place])
            except (TransientError, StackError) as error:
                # 503: nothing is live in a process that has just begun, or the broker is away; the client comes again.
                if self.patient and (isinstance(error, TransientError) or error.status == 503):
                    self.refused += 1
                    time.sleep(0.2)
                else:
                    self.wrong.append(repr(error))
                continue
            if found == self.expected[place]:
                self.served.append(time.monotonic())
            else:
                self.wrong.append(f"{self.questions[place]}: {found} instead of {self.expected[place]}")
            time.sleep(0.05)
