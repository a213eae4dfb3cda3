"""Visitors of a Service: they ask for recommendations again and again, and what a model said once with a catalog it must always say.

Each request has a connection of its own, to one of the addresses that are ready at this moment: as kube-proxy, which these nodes lack, does with a new one.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import httpx

from .api import Api, Object, Refused

PORT = 8000
_RECENT = 40
_PAUSE_SECONDS = 0.05

Answers = dict[tuple[str, str, int], list[str]]
"""Items by model, catalog and the question's place; what is not known yet is what is said first, wherever that is."""


class Visitors:
    """``served`` counts right answers by model; ``wrong`` has every other outcome, whatever it was."""

    def __init__(self, api: Api, namespace: str, service: str, key: str, questions: Sequence[Object], answers: Answers, number: int = 2) -> None:
        self.service, self.served, self.wrong = service, Counter[str](), list[str]()
        self._api, self._namespace, self._key = api, namespace, key
        self._questions, self._answers = questions, answers
        self._turns, self._lock, self._ended = itertools.count(), threading.Lock(), threading.Event()
        self._recent: list[str] = []
        self._threads = [threading.Thread(target=self._go_on, args=(random.Random(place),), name=f"visitor-{place}", daemon=True) for place in range(number)]

    def __enter__(self) -> Visitors:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def all_of(self, model: str) -> bool:
        """Whether the newest answers are all by this model: of every replica, since each gave some of them."""
        with self._lock:
            return len(self._recent) == _RECENT and set(self._recent) == {model}

    def forget(self) -> None:
        """Only answers from here on are new ones."""
        with self._lock:
            self._recent.clear()

    def __str__(self) -> str:
        counts = ", ".join(f"{number:,} of {model[-12:]}" for model, number in sorted(self.served.items()))
        return f"  {self.service:<24} {counts or 'no answer'}; {len(self.wrong)} wrong"

    def _go_on(self, draw: random.Random) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            place = next(self._turns) % len(self._questions)
            try:
                said = ask(self._api, self._namespace, self.service, self._key, self._questions[place], draw)
            except (OSError, http.client.HTTPException, Failed) as error:
                self.wrong.append(repr(error))
                continue
            model, items = str(said["model"]), items_of(said)
            expected = self._answers.setdefault((model, str(said["catalog"]), place), items)
            if said["fallback"] is not None or items != expected or len(set(items)) != self._questions[place]["n"]:
                self.wrong.append(f"{self._questions[place]}: {items} of {model} with {said['catalog']} instead of {expected}, {said['fallback']}")
                continue
            with self._lock:
                self.served[model] += 1
                self._recent = [*self._recent, model][-_RECENT:]


def items_of(said: Object) -> list[str]:
    """What an answer recommends."""
    return [str(one["item"]) for one in said["items"]]


class Failed(Exception):
    """No answer, or one that says so."""


def addresses(api: Api, namespace: str, service: str) -> list[str]:
    """Who is ready behind a Service; a control plane that is kept waiting is asked again, for it is not the shop."""
    while True:
        try:
            subsets = api.get("endpoints", service, namespace).get("subsets") or ()
        except (Refused, httpx.HTTPError) as error:
            if isinstance(error, Refused) and error.status < 500:
                raise
            time.sleep(1)
            continue
        return [place["ip"] for subset in subsets for place in subset.get("addresses") or ()]


def ask(api: Api, namespace: str, service: str, key: str, question: Object, draw: random.Random) -> Object:
    """One answer of a Service.

    Raises: Failed; OSError and http.client.HTTPException from the connection.
    """
    while True:
        if not (ready := addresses(api, namespace, service)):
            raise Failed(f"{service} has no ready address")
        connection = http.client.HTTPConnection(chosen := draw.choice(ready), PORT, timeout=600)
        try:
            connection.connect()
        except ConnectionRefusedError:
            # Nobody listens there any more: kube-proxy would not send to an address that has left meanwhile.
            if chosen in addresses(api, namespace, service):
                raise
            continue
        break
    try:
        connection.request("POST", "/v1/recommendations", json.dumps(question), {"X-API-Key": key, "Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Failed(f"{answer.status}: {text.decode(errors='replace')[:300]}")
    said: Object = json.loads(text)
    return said
