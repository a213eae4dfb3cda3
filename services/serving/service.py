"""The parts of serving, put together for one process: registry, live bundle, availability, scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from semantide.services.serving.admission import GroupBounds
from semantide.services.serving.bundle import Bundle, load_bundle, read_header
from semantide.services.serving.engine import Answer, Prepared, warm_up
from semantide.services.serving.meters import Meters
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.poller import Poller
from semantide.services.serving.recommending import Asked, Recommending
from semantide.services.serving.registry import Pair, Registry, RegistryState
from semantide.services.serving.scheduler import Scheduler
from semantide.services.serving.swap import AvailabilityWatch, Swapper
from semantide.services.serving.ticket import Passage
from semantide.services.serving.wish import Wish
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.availability import Availability
from semantide.shared.broker import RedisError
from semantide.shared.config import Settings
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.errors import BrokerUnavailable, Conflict, NotFound, PermanentError, TransientError
from semantide.shared.history import Histories
from semantide.shared.models.quantised import Weights

_POLL_SECONDS = 0.1
_MOST_WORKERS = 4  # more of them wait for each other's Python
_PAUSE_SECONDS = 1.0  # without look-ups after one that found the broker away


def load_and_warm(store: ArtifactStore, pair: Pair, prompt_cache_bytes: int = 0, weights: Weights = "float32") -> Bundle:
    """A bundle that has answered once.

    Raises: NotFound, Corrupt, Conflict; PermanentError where the model's numbers are broken.
    """
    bundle = load_bundle(store, pair, prompt_cache_bytes, weights)
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
        self.pool = KVPool(settings.serving_kv_bytes)
        self.narrowing = Narrowing(settings.serving_narrowing_seconds)
        self.meters = Meters(self)
        stages = Recommending(
            self._look_up, settings.actions, lambda: self.availability.current, self.pool, clock=time.perf_counter, on_end=self.meters.searched
        )
        cores = torch.get_num_threads()
        workers = settings.serving_workers or min(max(1, cores // 2), _MOST_WORKERS)
        self.scheduler: Scheduler[Asked, Prepared, Answer] = Scheduler(
            stages,
            workers=workers,
            bounds=GroupBounds(settings.serving_batch, settings.serving_round_beams, settings.serving_round_tokens),
            max_queue=settings.serving_queue,
            deadline_seconds=settings.serving_deadline_seconds,
            narrowing=self.narrowing,
            watcher=self.meters,
            on_worker=lambda: torch.set_num_threads(max(1, cores // workers)),
        )
        self.swapper = Swapper(
            self.registry, lambda pair: load_and_warm(store, pair, settings.serving_prompt_cache_bytes, settings.serving_weights), self.meters.swap
        )
        self._pollers = [Poller("availability", _POLL_SECONDS, self.availability.poll), Poller("registry", _POLL_SECONDS, self.swapper.poll)]

    def start(self) -> None:
        """Learn what is unavailable, then begin; the live model is loaded in the background."""
        self.availability.poll()
        self.scheduler.start()
        for poller in self._pollers:
            poller.start()

    def stop(self) -> None:
        """Answer what waits and end the threads."""
        self.scheduler.stop()
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

    def submit(self, wish: Wish) -> Future[tuple[Answer, Passage]]:
        """Queue a request; cancel the future to give it up.

        Raises: Overloaded; TransientError when no model is live.
        """
        return self.scheduler.submit(Asked(wish, self._bundle()))

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
