"""Who uses the stack meanwhile: a sender of events, an asker who knows the answers, and a visitor who is recommended items and says what he clicked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ground import NUM_ITEMS, Ground

from semantide.client import StackError
from semantide.shared.errors import TransientError

sys.path.append(str(Path(__file__).resolve().parents[1] / "compose"))
from load import Asker, Load, Sender

ITEMS = tuple(f"item-{n}" for n in range(NUM_ITEMS))
QUESTIONS: tuple[dict[str, Any], ...] = tuple({"history": [f"item-{(5 * n + step) % NUM_ITEMS}" for step in range(5)], "n": 10} for n in range(8))
_FEEDBACK_MS = 1_769_000_000_000
_WANTED = 5


@dataclass(eq=False)
class Visitor(Load):
    """Is recommended items for a user, checks that they are as many as asked for and all different ones of the catalog, and clicks one of them."""

    users: int = 40
    pause_seconds: float = 0.1
    sent: list[dict[str, Any]] = field(default_factory=list)  # feedback that was accepted
    number: int = 0
    step: int = 1  # how many visitors share the numbers

    def run(self) -> None:
        """Until told to end."""
        while not self.ended.is_set():
            self._visit(f"visitor-{self.number % self.users}")
            self.number += self.step
            time.sleep(self.pause_seconds)

    def _visit(self, user: str) -> None:
        try:
            answer = self.client.post("/v1/recommendations", {"user": user, "n": _WANTED})
        except (TransientError, StackError) as error:
            if not self.passes(error):
                self.wrong.append(repr(error))
            time.sleep(0.2)
            return
        items = [item["item"] for item in answer["items"]]
        if len(items) != _WANTED or len(set(items)) != _WANTED or not set(items) <= set(ITEMS):
            self.wrong.append(f"{user} was recommended {items}: {answer['short_reason']}")
            return
        self.served.append(time.monotonic())
        moment = _FEEDBACK_MS + self.number * 1000
        told = {"user": user, "request_id": answer["request_id"]}
        events = [
            {**told, "item": item, "time": moment + place, "action": "exposure", "event_id": f"seen-{self.number}-{place}"} for place, item in enumerate(items)
        ]
        events.append({**told, "item": items[self.number % _WANTED], "time": moment + _WANTED, "action": "click", "event_id": f"clicked-{self.number}"})
        while True:
            try:
                self.client.post("/v1/interactions", {"interactions": events})
            except (TransientError, StackError) as error:
                if not self.passes(error):
                    self.wrong.append(repr(error))
                    return
                time.sleep(0.2)
            else:
                self.sent += events
                return


@dataclass
class Crowd:
    """All of them, and what they know to have been accepted."""

    sender: Sender
    asker: Asker
    visitors: list[Visitor]

    @classmethod
    def of(cls, ground: Ground) -> Crowd:
        """Who uses a stack that has a model live."""
        return cls(
            Sender(ground.client(), list(ITEMS), batch=10, pause_seconds=0.1, repeat_every=10),
            Asker(ground.client(), list(QUESTIONS)),
            [Visitor(ground.client())],
        )

    @property
    def members(self) -> tuple[Load, ...]:
        """Each one."""
        return self.sender, self.asker, *self.visitors

    def accepted(self) -> int:
        """Events that were answered 202."""
        return self.sender.accepted + sum(len(visitor.sent) for visitor in self.visitors)

    def events(self) -> Iterator[tuple[str, str, int, str]]:
        """(user, item, time, action) of all accepted events, once nobody sends any more."""
        refused = set(self.sender.refused)
        batches = [self.sender.rows(number) for number in range(self.sender.number) if number not in refused]
        for rows in (*batches, *(visitor.sent for visitor in self.visitors)):
            for row in rows:
                yield row["user"], row["item"], row["time"], row["action"]

    def wrong(self) -> list[str]:
        """Everything that was no right answer, and no clear word that one may come again."""
        return [f"{type(member).__name__}: {problem}" for member in self.members for problem in member.wrong]

    def told(self) -> dict[str, int]:
        """What came instead of answers, and how often."""
        found: dict[str, int] = {}
        for member in self.members:
            for words, count in list(member.told.items()):
                found[words] = found.get(words, 0) + count
        return found

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """They come as long as the block lasts, and what each began he ends."""
        for member in self.members:
            member.start()
        try:
            yield
        finally:
            for member in self.members:
                member.ended.set()
            for member in self.members:
                member.join(120)
