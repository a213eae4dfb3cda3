"""Prepared queries of one bundle under way together, round by round: what a search and the scoring of given items have in common.

The first round reads the prompts. What follows, and what comes of it, is the subclass's business. Legend: T tokens, R requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import torch

from semantide.services.serving.prepared import Prepared
from semantide.services.serving.ticket import A, Mark, SearchAgain
from semantide.shared.decoding.kv_pool import KVLease


class Rounds(ABC, Generic[A]):
    """A group of queries. ``leases`` hold each query's memory until ``keep`` or ``close`` give it back.

    ``tokens_read`` of its ``prompt_tokens``, a merged item counting as one, were not known from elsewhere.
    """

    def __init__(self, requests: Sequence[Prepared], clock: Callable[[], float], leases: Sequence[KVLease]) -> None:
        assert all(request.family == requests[0].family for request in requests), "one group has one model and one kind of scores"
        self._bundle, self._clock = requests[0].bundle, clock
        self.requests, self._leases = list(requests), list(leases)
        self.marks: list[Mark] = []
        self._state: Any = None
        self.prompt_tokens = self.tokens_read = 0

    def next_rows(self) -> int:
        """Rows that the next round puts through the model."""
        if self._state is not None:
            return self._rows_behind()
        prompts: dict[bytes, int] = {}
        for request in self.requests:
            prompts.setdefault(request.prompt.tobytes(), request.tokens)
        return sum(prompts.values()) + len(self.requests) - len(prompts)  # of a prompt that several have, the last token is read for each

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one round; whether there is another one.

        Raises: PermanentError where the model's logits are not numbers, and what the model itself raises.
        """
        start = self._clock()
        if self._state is not None:
            return self._go_on(start)
        model, device = self._bundle.model, self._bundle.trie.device
        tokens_T = torch.as_tensor(np.concatenate([request.prompt for request in self.requests]), device=device)
        offsets_R1 = torch.as_tensor(np.cumsum([0, *(len(request.prompt) for request in self.requests)]), device=device)
        last = [request.last_prompt() for request in self.requests]
        self.prompt_tokens, self.tokens_read = sum(request.places for request in self.requests), self.next_rows()
        remembered = [request.remembered for request in self.requests]
        logits_RK, self._state = model.begin(tokens_T, offsets_R1, last if any(last) else None, self._leases or None, remembered)
        return self._begin(logits_RK, self._mark("prefill", start))

    @abstractmethod
    def _rows_behind(self) -> int:
        """Rows of the next round, once the prompts are read."""

    @abstractmethod
    def _begin(self, logits_RK: torch.Tensor, start: float) -> bool:
        """Take what the prompts gave; whether there is another round."""

    @abstractmethod
    def _go_on(self, start: float) -> bool:
        """A round behind the prompts; whether there is another one."""

    @abstractmethod
    def answers(self) -> Sequence[A | SearchAgain]:
        """One for each query, after the last round."""

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> None:
        """Go on with these queries only; the memory of the others is free at once."""
        gone = set(range(len(self.requests))) - set(places)
        self._keep(places)
        self.requests = [self.requests[place] for place in places]
        for place in gone:
            if self._leases:
                self._leases[place].release()
        self._leases = [self._leases[place] for place in places] if self._leases else []

    @abstractmethod
    def _keep(self, places: Sequence[int]) -> None:
        """Narrow what belongs to the queries, that of the model's state included."""

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent in each stage."""
        seconds: dict[str, float] = {}
        for stage, begin, end in self.marks:
            seconds[stage] = seconds.get(stage, 0.0) + end - begin
        return seconds

    def remember(self) -> None:
        """Keep the users' prompts for the next time."""
        prompts = self._bundle.prompts
        for place, request in enumerate(self.requests):
            if request.remembered:
                prompts.put(request.query.user or "", self._state.prompt_kv(place), self._state.read_R[place])

    def close(self) -> None:
        """Let go of the model's state and give all memory back."""
        self._state = None
        for lease in self._leases:
            lease.release()
        self._leases = []

    def _mark(self, stage: str, start: float) -> float:
        now = self._clock()
        self.marks.append((stage, start, now))
        return now
