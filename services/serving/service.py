"""The parts of serving, put together for one process: registry, live bundle, availability, batches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from semantide.services.serving.batcher import Batcher
from semantide.services.serving.bundle import Bundle, load_bundle, read_header
from semantide.services.serving.engine import Answer, Query, answer, warm_up
from semantide.services.serving.meters import Meters
from semantide.services.serving.poller import Poller
from semantide.services.serving.profile import Profile, profile_of
from semantide.services.serving.registry import Pair, Registry, RegistryState
from semantide.services.serving.swap import AvailabilityWatch, Swapper
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.availability import Availability
from semantide.shared.broker import RedisError
from semantide.shared.config import Settings
from semantide.shared.errors import BrokerUnavailable, Conflict, NotFound, PermanentError, TransientError
from semantide.shared.history import Histories

_POLL_SECONDS = 0.1
_PAUSE_SECONDS = 1.0  # without look-ups after one that found the broker away


@dataclass(frozen=True)
class Wish:
    """A request as it waits in the queue. ``events`` are (item, action) in order of time; None stands for what is stored of ``user``."""

    user: str | None
    events: tuple[tuple[str, str], ...] | None
    n: int
    width: int
    exclude_ids: tuple[str, ...] = ()
    exclude_seen: bool = False
    categories_any: tuple[str, ...] = ()
    categories_all: tuple[str, ...] = ()
    variety: float = 0.0

    def query(self, profile: Profile) -> Query:
        """What the engine is asked, once the user's profile is known."""
        excluded = (*self.exclude_ids, *profile.blocked, *(profile.seen if self.exclude_seen else ()))
        return Query(profile.history, self.n, self.width, excluded, self.categories_any, self.categories_all, self.variety, self._seed())

    def _seed(self) -> int:
        if not self.variety:
            return 0
        who = self.user if self.user is not None else "\n".join(item for item, _ in self.events or ())
        return int.from_bytes(hashlib.sha256(who.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Served:
    """An answer and the pair that gave it."""

    pair: Pair
    answer: Answer


def load_and_warm(store: ArtifactStore, pair: Pair) -> Bundle:
    """A bundle that has answered once.

    Raises: NotFound, Corrupt, Conflict; PermanentError where the model's numbers are broken.
    """
    bundle = load_bundle(store, pair)
    warm_up(bundle, time.perf_counter)
    return bundle


@contextmanager
def _refusing(model: str) -> Iterator[None]:
    """Turn what is wrong with a model's or catalog's files or numbers into a refusal of the request that named it."""
    try:
        yield
    except (NotFound, Conflict):
        raise
    except PermanentError as error:
        raise Conflict(f"{model} cannot be served and nothing was changed: {error}") from error


class Service:
    """Serving in one process. ``start`` it, ``submit`` wishes, ``stop`` it."""

    def __init__(self, settings: Settings, broker: Any, store: ArtifactStore) -> None:
        self._settings, self._store = settings, store
        self._pause_until = 0.0
        self.registry = Registry(broker)
        self._histories = Histories(broker, settings.history_length, settings.history_ttl_seconds)
        self.availability = AvailabilityWatch(Availability(broker))
        self.batcher: Batcher[Wish, Served] = Batcher(
            self._run, max_batch=settings.serving_batch, max_queue=settings.serving_queue, deadline_seconds=settings.serving_deadline_seconds
        )
        self.meters = Meters(self.batcher.depth)
        self.swapper = Swapper(self.registry, lambda pair: load_and_warm(store, pair), self.meters.swap)
        self._pollers = [Poller("availability", _POLL_SECONDS, self.availability.poll), Poller("registry", _POLL_SECONDS, self.swapper.poll)]

    def start(self) -> None:
        """Learn what is unavailable, then begin; the live model is loaded in the background."""
        self.availability.poll()
        self.batcher.start()
        for poller in self._pollers:
            poller.start()

    def stop(self) -> None:
        """Finish what waits and end the threads."""
        self.batcher.stop()
        for poller in self._pollers:
            poller.stop()

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be answered; a stack that has no model yet counts as ready."""
        status = self.swapper.status
        if self.swapper.bundle is not None:
            return True, f"serving {self.swapper.bundle.pair.model}"
        if status.error:
            return False, f"serving: the live model cannot be loaded ({status.error}): promote another one"
        if self.registry.version() == 0 or self.registry.read().live is None:
            return True, "serving: no model is live yet"
        return False, "serving: the live model is being loaded"

    def submit(self, wish: Wish) -> Future[tuple[Served, float]]:
        """Queue a request.

        Raises: Overloaded; TransientError when no model is live.
        """
        self._bundle()
        return self.batcher.submit(wish)

    def promote(self, model: str, catalog: str | None, force: bool, reason: str) -> RegistryState:
        """Load, warm and promote; what cannot be loaded changes nothing.

        Raises: NotFound, Conflict.
        """
        with _refusing(model):
            trained_on = read_header(self._store.get(model, verify=False)).get("catalog") if catalog is None else None
            pair = self.registry.resolve(model, catalog, force=force, trained_on=trained_on)
            self.swapper.prepare(pair)
        state = self.registry.promote(pair, reason=reason, forced=force)
        self.swapper.poll()
        return state

    def rollback(self, reason: str) -> RegistryState:
        """Load, warm and bring back the pair that was live before.

        Raises: NotFound, Conflict.
        """
        state = self.registry.read()
        if state.previous:
            with _refusing(state.previous[-1].model):
                self.swapper.prepare(state.previous[-1])
        state = self.registry.rollback(reason)
        self.swapper.poll()
        return state

    def _bundle(self) -> Bundle:
        bundle = self.swapper.bundle
        if bundle is None:
            status = self.swapper.status
            if status.error:
                raise TransientError(f"the live model cannot be loaded ({status.error}): promote another one with POST /v1/serving/promote")
            if status.wanted is not None:
                raise TransientError("the live model is being loaded: try again in a moment")
            raise TransientError(
                "no model is live: train one (POST /v1/jobs, kind train), then promote it with POST /v1/serving/promote (GET /v1/serving/candidates lists them)"
            )
        return bundle

    def _run(self, wishes: list[Wish]) -> list[Served | Exception]:
        bundle = self._bundle()
        start = time.perf_counter()
        outcomes: list[Served | Exception] = []
        asked: list[tuple[int, Query]] = []
        stored = self._look_up(list(dict.fromkeys(wish.user for wish in wishes if wish.user is not None and wish.events is None)))
        for place, wish in enumerate(wishes):
            if wish.events is None and isinstance(stored, Exception):
                outcomes.append(stored)
                continue
            events = wish.events if wish.events is not None or isinstance(stored, Exception) else stored[wish.user or ""]
            asked.append((place, wish.query(profile_of(events or (), self._settings.actions, bundle.reading))))
            outcomes.append(TransientError("not answered yet"))
        looked_up = time.perf_counter()
        answers = answer(bundle, [query for _, query in asked], lambda: self.availability.current, time.perf_counter)
        for (place, _), result in zip(asked, answers, strict=True):
            outcomes[place] = Served(bundle.pair, result)
            self.meters.answered(result)
        self.meters.batch(len(wishes), {"lookup": looked_up - start, "search": time.perf_counter() - looked_up} | (answers[0].seconds if answers else {}))
        return outcomes

    def _look_up(self, users: list[str]) -> dict[str, tuple[tuple[str, str], ...]] | Exception:
        """Stored events of these users in one round trip, or why there are none: an explicit history must not wait for a broker that is away."""
        if not users:
            return {}
        if time.monotonic() < self._pause_until:
            return BrokerUnavailable("stored histories cannot be read, the broker is away: try again, or send the `history` along")
        try:
            found = self._histories.get_many(users)
        except RedisError as error:
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            return BrokerUnavailable(f"stored histories cannot be read, the broker is away ({error}): try again, or send the `history` along")
        return {user: tuple((event.item, event.action) for event in events) for user, events in found.items()}
