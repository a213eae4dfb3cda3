"""Clients that go on while containers are killed: one sends events until each is accepted, one asks for recommendations and knows the answers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from semantide.services.commandline.client import Client, StackError
from semantide.shared.errors import TransientError

_BATCH = 20


@dataclass(eq=False)
class Sender(threading.Thread):
    """Sends batches of events with ids of their own; a batch whose fate is unknown is sent again as it is."""

    client: Client
    items: list[str]
    accepted: int = 0
    again: int = 0
    wrong: list[str] = field(default_factory=list)
    last: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(name="sender", daemon=True)
        self.ended = threading.Event()

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
                self.last = time.monotonic()
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
class Asker(threading.Thread):
    """Asks the same few questions and compares with the first answers."""

    client: Client
    questions: list[dict[str, Any]]
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    last: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(name="asker", daemon=True)
        self.ended = threading.Event()
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
            except TransientError:
                self.refused += 1
                time.sleep(0.2)
                continue
            except StackError as error:
                # 503: nothing is live in a process that has just begun, or the broker is away; the client comes again.
                if error.status == 503:
                    self.refused += 1
                    time.sleep(0.2)
                else:
                    self.wrong.append(f"{error.status}: {error}")
                continue
            if found == self.expected[place]:
                self.right += 1
                self.last = time.monotonic()
            else:
                self.wrong.append(f"{self.questions[place]}: {found} instead of {self.expected[place]}")
            time.sleep(0.05)
