"""The parts of serving, put together for one process: registry, live bundle, availability, scheduler."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch

from semantide.services.serving.admission import GroupBounds
from semantide.services.serving.bundle import Bundle, load_bundle, read_header
from semantide.services.serving.engine import Answer, warm_up
from semantide.services.serving.forgetting import ForgettingWatch
from semantide.services.serving.meters import Meters
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.needed import note_loaded
from semantide.services.serving.pages import Pages
from semantide.services.serving.pinned import Pin, PinnedRegistry
from semantide.services.serving.poller import Poller
from semantide.services.serving.prepared import Prepared
from semantide.services.serving.profile import profile_of
from semantide.services.serving.publishing import Comparisons
from semantide.services.serving.recommending import Asked, Events, Recommending
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair, RegistryState, Split, Variant
from semantide.services.serving.retrieval import Asking, Retrieved, RetrieverWatch, TimedEvents
from semantide.services.serving.scheduler import Scheduler
from semantide.services.serving.scoring import Scored
from semantide.services.serving.shown import ShownNotes
from semantide.services.serving.swap import AvailabilityWatch, Swapper
from semantide.services.serving.ticket import Passage
from semantide.services.serving.variants import Choice, Lineup
from semantide.services.serving.wish import Wish
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.availability import Availability
from semantide.shared.broker import RedisError, connect
from semantide.shared.config import Settings
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.errors import BrokerUnavailable, Conflict, Corrupt, NotFound, PermanentError, TransientError
from semantide.shared.forgetting import LOOK_SECONDS, Forgetting
from semantide.shared.history import Histories, HistoryEvent
from semantide.shared.jobs import Jobs
from semantide.shared.models.linear_memory import Records
from semantide.shared.models.quantised import Weights
from semantide.shared.shown_lists import ShownLists

_POLL_SECONDS = 0.1
_LOADED_SECONDS = 20.0
_COMPARISONS_SECONDS = 1.0
_MOST_WORKERS = 4  # more of them wait for each other's Python
_PAUSE_SECONDS = 1.0  # without look-ups after one that found the broker away
_LOOK_UP_SECONDS = 1.0  # of a look-up: requests with a history of their own wait for it too


def load_and_warm(
    store: ArtifactStore,
    pair: Pair,
    prompt_cache_bytes: int = 0,
    loaded: Sequence[Bundle] = (),
    weights: Weights = "float32",
    records: Records = "float32",
    snapshots: int = 2,
) -> Bundle:
    """A bundle that has answered once.

    Raises: NotFound, Corrupt, Conflict; PermanentError where the model's numbers are broken.
    """
    bundle = load_bundle(store, pair, prompt_cache_bytes, loaded, weights, records, snapshots)
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
        pin = Pin(settings.replica_model, settings.replica_catalog, settings.replica_variant)
        self.registry = PinnedRegistry(broker, pin, self._trained_on) if pin else Registry(broker)
        self._histories = Histories(
            connect(settings.redis_url, check=False, patience_seconds=_LOOK_UP_SECONDS), settings.history_length, settings.history_ttl_seconds
        )
        self.availability = AvailabilityWatch(Availability(broker))
        self.pages = Pages(broker, settings.serving_cursor_seconds, settings.serving_cursor_bytes)
        self.shown = ShownNotes(ShownLists(broker, settings.serving_shown_seconds, settings.serving_shown_bytes), settings.serving_shown_seconds > 0)
        self.pool = KVPool(settings.serving_kv_bytes)
        self.narrowing = Narrowing(settings.serving_narrowing_seconds)
        self.meters = Meters(self)
        stages = Recommending(self._look_up, settings.actions, lambda: self.availability.current, self.pool, clock=time.perf_counter)
        cores = torch.get_num_threads()
        workers = settings.serving_workers or min(max(1, cores // 2), _MOST_WORKERS)
        self.scheduler: Scheduler[Asked, Prepared, Answer | Scored] = Scheduler(
            stages,
            workers=workers,
            bounds=GroupBounds(settings.serving_batch, settings.serving_round_beams, settings.serving_round_tokens),
            max_queue=settings.serving_queue,
            deadline_seconds=settings.serving_deadline_seconds,
            narrowing=self.narrowing,
            watcher=self.meters,
            on_worker=lambda: torch.set_num_threads(max(1, cores // workers)),
        )
        self.swapper = Swapper(self.registry, self._load, self.meters.swap)
        self.retrievers = RetrieverWatch(self.registry, store)
        self.forgetting = ForgettingWatch(Forgetting(broker), lambda: [bundle.prompts for bundle in self.swapper.bundles])
        self._retrieving = threading.BoundedSemaphore(workers)
        self._pollers = [
            Poller("availability", _POLL_SECONDS, self.availability.poll),
            Poller("registry", _POLL_SECONDS, self.swapper.poll),
            Poller("retriever", _POLL_SECONDS, self.retrievers.poll),
            Poller("forgetting", LOOK_SECONDS, self.forgetting.poll),
            Poller("shown", _POLL_SECONDS / 2, self.shown.flush),
            Poller("loaded", _LOADED_SECONDS, lambda: note_loaded(broker, self.registry.read(), time.time())),
            Poller("comparisons", _COMPARISONS_SECONDS, Comparisons(Registry(broker), Jobs(broker)).poll),
        ]

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
        with suppress(RedisError):
            self.shown.flush()

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be answered, and by whom; a stack that has no model yet counts as ready."""
        if self.scheduler.device_error:
            return False, f"serving: its device failed ({self.scheduler.device_error}): this process must be started again"
        status, retriever, source = self.swapper.status, self.retrievers.current, self._settings.serving_source
        if source != "retriever" and self.swapper.bundle is not None and self.swapper.settled:
            return True, f"serving {self.swapper.bundle.pair.model}"
        if source == "retriever" and retriever is not None:
            return True, f"serving {retriever.ref}"
        if source != "retriever" and status.error:
            why = f"serving: the live model cannot be loaded ({status.error})"
            if source == "generator" or retriever is None:
                return False, f"{why}: promote another one"
            return True, f"{why}; the retriever {retriever.ref} answers in its place until another one is promoted"
        try:
            state = self.registry.read() if self.registry.version() else RegistryState()
        except NotFound as error:  # a pinned model or variant is not there yet
            return False, f"serving: {error}"
        if source != "retriever" and state.live is not None:
            # A process that has answered by the retriever goes on; one that has just begun leaves requests to others, whose generator is there.
            if source != "generator" and retriever is not None and self.swapper.settled:
                return True, f"serving: the live model is being loaded; the retriever {retriever.ref} answers meanwhile"
            return False, "serving: the live model is being loaded"
        if source == "generator" or state.retriever is None:
            return True, "serving: no model is live yet"
        if retriever is not None:
            return True, f"serving {retriever.ref}; no generator is live yet"
        if self.retrievers.error:
            return False, f"serving: the retriever cannot be loaded ({self.retrievers.error}): promote another one"
        return False, "serving: the retriever is being loaded"

    def choose(self, who: str | None = None, variant: str | None = None) -> Choice:
        """The bundle that answers somebody; ``variant`` names one instead.

        Raises: TransientError when no model is live, NotFound for an unknown variant.
        """
        return self._lineup().choose(who, variant)

    def submit(self, wish: Wish, bundle: Bundle | None = None) -> Future[tuple[Answer, Passage]]:
        """Queue a request for a bundle, by default its user's; cancel the future to give it up.

        Raises: Overloaded; TransientError when no model is live.
        """
        return cast("Future[tuple[Answer, Passage]]", self.scheduler.submit(Asked(wish, bundle or self.choose(wish.user).bundle)))

    def score(self, wish: Wish, bundle: Bundle) -> Future[tuple[Scored, Passage]]:
        """Queue a request for the scores of the items of a wish.

        Raises: Overloaded.
        """
        assert wish.items, "what is scored is named"
        return cast("Future[tuple[Scored, Passage]]", self.scheduler.submit(Asked(wish, bundle)))

    def hidden(self, user: str | None) -> frozenset[str]:
        """Items that may not be shown now: unavailable, or disliked by this user.

        Raises: BrokerUnavailable, Corrupt.
        """
        unavailable = self.availability.current.items
        if user is None:
            return unavailable
        stored = self._look_up([user])
        events = stored if isinstance(stored, Exception) else stored[user]
        if isinstance(events, Exception):
            raise events
        return unavailable | set(profile_of(((item, action) for item, action, _ in events), self._settings.actions).blocked)

    def promote(self, model: str, catalog: str | None, force: bool, reason: str) -> RegistryState:
        """Load, warm and promote; what cannot be loaded changes nothing.

        Raises: NotFound, Conflict.
        """
        if self._model_type(model) == "retriever":
            with _refusing(model):
                self.retrievers.prepare(model)
            state = self.registry.retrieve(model, reason)
            self.retrievers.poll()
            return state
        with _refusing(model):
            pair = self._resolve(model, catalog, force)
            self.swapper.prepare(pair)
        state = self.registry.promote(pair, reason=reason, forced=force)
        self.swapper.poll()
        return state

    def prepare(self, model: str, catalog: str | None, force: bool) -> Candidate:
        """Load and warm a model that may go live later; nothing changes.

        Raises: NotFound; Conflict for one that cannot be served.
        """
        with _refusing(model):
            if self._model_type(model) == "retriever":
                self.retrievers.prepare(model)
                return Candidate(model=model)
            pair = self._resolve(model, catalog, force)
            self.swapper.prepare(pair)
        return Candidate(model=model, catalog=pair.catalog)

    def divide(self, salt: str | None, wanted: Sequence[tuple[str, str, str | None, float]], force: bool, reason: str) -> RegistryState:
        """Load, warm and set variants (name, model, catalog, share) beside the live model; what cannot be loaded changes nothing.

        Without a salt the present one stays, so that nobody moves who need not.

        Raises: NotFound, Conflict, ValueError.
        """
        state = self.registry.read()
        present = {(variant.pair.model, variant.pair.catalog): variant.pair for variant in state.split.variants}  # was accepted once
        variants = []
        for name, model, catalog, share in wanted:
            with _refusing(model):
                pair = present.get((model, catalog or "")) or self._resolve(model, catalog, force)
            variants.append(Variant(name=name, pair=pair, share=share))
        split = Split(salt=state.split.salt if salt is None else salt, variants=tuple(variants))
        state.divided(split, 0)  # names and shares are checked before anything is loaded
        with _refusing(", ".join(variant.name for variant in variants)):
            self.swapper.prepare(*(variant.pair for variant in variants))
        state = self.registry.divide(split, reason)
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

    def retrieve(self, user: str | None, events: TimedEvents | None, asking: Callable[[TimedEvents], Asking]) -> Retrieved:
        """Answer with the retriever, here and now; without events the user's stored ones count.

        Raises: TransientError when there is no retriever, BrokerUnavailable, Corrupt.
        """
        loaded = self.retrievers.current
        if loaded is None:
            why = f" ({self.retrievers.error})" if self.retrievers.error else ""
            raise TransientError(f"no retriever is loaded{why}: train one (recipe retriever-small) and promote it, or leave `source` out")
        if events is None:
            stored = self._stored([user or ""])
            found = stored if isinstance(stored, Exception) else stored[user or ""]
            if isinstance(found, Exception):
                raise found
            events = [(event.item, event.action, event.time) for event in found]
        with self._retrieving:
            return loaded.answer(asking(events), self._settings.actions, self.availability.current)

    def _model_type(self, model: str) -> str:
        try:
            card = json.loads(self._store.text(model, "semantide.json"))
        except (Corrupt, ValueError):
            return ""
        return str(card.get("model_type") or "generator")

    def _resolve(self, model: str, catalog: str | None, force: bool) -> Pair:
        trained_on = self._trained_on(model) if catalog is None else None
        return self.registry.resolve(model, catalog, force=force, trained_on=trained_on)

    def _trained_on(self, model: str) -> str | None:
        said = read_header(self._store.get(model, files=("semantide.json",))).get("catalog")
        return said if isinstance(said, str) else None

    def _load(self, pair: Pair) -> Bundle:
        settings = self._settings
        kinds = settings.serving_weights, settings.serving_records, settings.serving_snapshots
        return load_and_warm(self._store, pair, settings.serving_prompt_cache_bytes, self.swapper.bundles, *kinds)

    def _lineup(self) -> Lineup:
        lineup = self.swapper.lineup
        if lineup is None:
            status = self.swapper.status
            if status.error:
                raise TransientError(f"the live model cannot be loaded ({status.error}): promote another one with POST /v1/serving/promote")
            if status.wanted is not None:
                raise TransientError("the live model is being loaded: try again in a moment")
            raise TransientError(
                "no model is live: train one (POST /v1/jobs, kind train), then promote it with POST /v1/serving/promote (GET /v1/serving/candidates lists them)"
            )
        return lineup

    def _look_up(self, users: list[str]) -> dict[str, Events | Exception] | Exception:
        """What is stored of these users."""
        found = self._stored(users)
        if isinstance(found, Exception):
            return found
        return {
            user: events if isinstance(events, Exception) else tuple((event.item, event.action, event.time) for event in events)
            for user, events in found.items()
        }

    def _stored(self, users: list[str]) -> Mapping[str, list[HistoryEvent] | Corrupt] | Exception:
        """Stored events of these users in one round trip, or why there are none: an explicit history must not wait for a broker that is away."""
        if not users:
            return {}
        if time.monotonic() < self._pause_until:
            return BrokerUnavailable("stored histories cannot be read, the broker is away: try again, or send the `history` along")
        try:
            return self._histories.get_many(users)
        except RedisError as error:
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            return BrokerUnavailable(f"stored histories cannot be read, the broker is away ({error}): try again, or send the `history` along")
