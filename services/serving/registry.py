"""Which models serve a deployment with which catalog, what served before, and what waits: one JSON document in Redis.

Every change is applied in an optimistic transaction; a reader asks for the whole document only when its version moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from semantide.services.serving import registry_document
from semantide.services.serving.registry_state import Candidate, Decision, Following, Pair, RegistryState, Split
from semantide.shared.contracts import CandidateJudged, Contract
from semantide.shared.errors import NotFound

_NOTES: Mapping[str, type[Contract]] = {"decisions": Decision, "candidates": Candidate}


class Registry:
    """The state of one deployment in Redis."""

    def __init__(self, broker: Any, deployment: str = "default", clock: Callable[[], float] = time.time) -> None:
        self._broker, self._clock = broker, clock
        self._key = f"semantide:serving:{deployment}:registry"
        self._version_key = f"semantide:serving:{deployment}:version"

    def version(self) -> int:
        """Changes with every change of the state."""
        return int(self._broker.get(self._version_key) or 0)

    def read(self) -> RegistryState:
        """The whole state."""
        return self._parse(self._broker.get(self._key))

    @staticmethod
    def _parse(raw: bytes | None) -> RegistryState:
        return registry_document.read(raw, RegistryState, _NOTES) if raw else RegistryState()

    def change(self, function: Callable[[RegistryState], RegistryState]) -> RegistryState:
        """Apply a pure function to the state, again if somebody else was quicker; what it raises changes nothing."""

        def apply(pipe: Any) -> RegistryState:
            old = self._parse(pipe.get(self._key))
            new = function(old)
            pipe.multi()
            if new != old:
                pipe.set(self._key, registry_document.written(new, _NOTES))
                pipe.set(self._version_key, new.version)
            return new

        result: RegistryState = self._broker.transaction(apply, self._key, value_from_callable=True)
        return result

    def register(self, candidate: Candidate) -> RegistryState:
        """Remember a trained model; its catalog becomes the newest of its line."""
        stamped = candidate.model_copy(update={"registered": candidate.registered or self._now()})
        return self.change(lambda state: state.registered(stamped.model_copy(update={"catalog": stamped.catalog and state.newest(stamped.catalog)})))

    def resolve(self, model: str, catalog: str | None, *, force: bool = False, trained_on: str | None = None) -> Pair:
        """What a wish to promote means: the catalog given, else the newest of the line that the model was trained on.

        Raises: NotFound when the model is no candidate and ``force`` is not set.
        """
        state = self.read()
        candidate = state.candidate(model)
        if candidate is None and not force:
            known = ", ".join(c.model[:20] + "..." for c in state.candidates[-5:]) or "none"
            raise NotFound(f"model {model} is no candidate (the latest: {known}): promote one of GET /v1/serving/candidates, or set force to true")
        chosen = catalog or (candidate.catalog if candidate else None) or (state.newest(trained_on) if trained_on else None)
        if chosen is None:
            raise NotFound(f"model {model} does not say which catalog it was trained for: name one in `catalog`")
        return Pair(model=model, catalog=chosen)

    def promote(self, pair: Pair, *, reason: str = "", forced: bool = False) -> RegistryState:
        """Make a pair live. Load it first: the registry does not."""
        return self.change(lambda state: state.promoted(pair, self._now(), reason, forced))

    def judging(self, model: str, job_id: str) -> RegistryState:
        """Note the evaluation that decides on a candidate."""
        return self.change(lambda state: state.judging(model, job_id))

    def reopened(self, model: str, job_id: str) -> RegistryState:
        """Wait again for an evaluation that was resumed."""
        return self.change(lambda state: state.reopened(model, job_id))

    def judged(self, verdict: CandidateJudged) -> RegistryState:
        """Carry out what an evaluation has found, where it is waited for. Load what may go live first: the registry does not.

        Raises: Conflict where another model has gone live meanwhile.
        """
        return self.change(lambda state: state.judged(verdict, self._now()))

    def hold(self, model: str, reason: str, evaluation: str = "") -> RegistryState:
        """Keep why a candidate does not go live."""
        return self.change(lambda state: state.held(model, reason, self._now(), evaluation=evaluation))

    def rollback(self, reason: str = "") -> RegistryState:
        """Make the previous pair live again.

        Raises: Conflict.
        """
        return self.change(lambda state: state.rolled_back(self._now(), reason))

    def divide(self, split: Split, reason: str = "") -> RegistryState:
        """Divide users between the live pair and variants. Load these first: the registry does not.

        Raises: Conflict, ValueError.
        """
        return self.change(lambda state: state.divided(split, self._now(), reason))

    def retrieve(self, model: str | None, reason: str = "") -> RegistryState:
        """Make a retriever the second source. Load it first: the registry does not."""
        return self.change(lambda state: state.retrieving(model, self._now(), reason))

    def advance(self, model: str, following: Following, promote: bool) -> RegistryState:
        """Take a training run's newer table, in whatever order and however often its messages come."""
        return self.change(lambda state: state.advanced(model, following, promote))

    def extend(self, old: str, new: str) -> RegistryState:
        """Let ``new`` take the place of ``old``, to which it added items."""
        return self.change(lambda state: state.extended(old, new, self._now()))

    def _now(self) -> int:
        return int(self._clock() * 1000)
