"""The parts of serving, put together for one process: registry, live bundle, availability, batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from semantide.services.serving.batcher import Batcher
from semantide.services.serving.bundle import Bundle, load_bundle, read_header
from semantide.services.serving.engine import Answer, Query, answer, warm_up
from semantide.services.serving.exploration import seed_of
from semantide.services.serving.meters import Meters
from semantide.services.serving.pages import Pages
from semantide.services.serving.poller import Poller
from semantide.services.serving.profile import Profile, profile_of
from semantide.services.serving.registry import Pair, Registry, RegistryState, Split, Variant
from semantide.services.serving.swap import AvailabilityWatch, Swapper
from semantide.services.serving.variants import Choice, Lineup
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
    only_new: bool = False

    @property
    def who(self) -> str:
        """Whom draws are seeded by: the user, or the history that was sent."""
        return self.user if self.user is not None else "\n".join(item for item, _ in self.events or ())

    def query(self, profile: Profile) -> Query:
        """What the engine is asked, once the user's profile is known."""
        excluded = (*self.exclude_ids, *profile.blocked, *(profile.seen if self.exclude_seen else ()))
        seed = seed_of(self.who) if self.variety else 0
        return Query(profile.history, self.n, self.width, excluded, self.categories_any, self.categories_all, self.variety, seed, self.only_new)


@dataclass(frozen=True)
class Served:
    """An answer, the bundle that gave it, and the variant that this bundle was chosen as."""

    choice: Choice
    answer: Answer

    @property
    def pair(self) -> Pair:
        """Model and catalog."""
        return self.choice.bundle.pair


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
        self.pages = Pages(broker, settings.serving_cursor_seconds)
        self.batcher: Batcher[tuple[Wish, Choice], Served] = Batcher(
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

    def choose(self, who: str | None = None, variant: str | None = None) -> Choice:
        """The bundle that answers somebody; ``variant`` names one instead.

        Raises: TransientError when no model is live, NotFound for an unknown variant.
        """
        return self._lineup().choose(who, variant)

    def submit(self, wish: Wish, choice: Choice | None = None) -> Future[tuple[Served, float]]:
        """Queue a request, for the chosen bundle or for its user's.

        Raises: Overloaded; TransientError when no model is live.
        """
        return self.batcher.submit((wish, choice or self.choose(wish.user)))

    def hidden(self, user: str | None) -> frozenset[str]:
        """Items that may not be shown now: unavailable, or disliked by this user.

        Raises: BrokerUnavailable.
        """
        unavailable = self.availability.current.items
        if user is None:
            return unavailable
        stored = self._look_up([user])
        if isinstance(stored, Exception):
            raise stored
        return unavailable | set(profile_of(stored[user], self._settings.actions).blocked)

    def promote(self, model: str, catalog: str | None, force: bool, reason: str) -> RegistryState:
        """Load, warm and promote; what cannot be loaded changes nothing.

        Raises: NotFound, Conflict.
        """
        with _refusing(model):
            pair = self._resolve(model, catalog, force)
            self.swapper.prepare(pair)
        state = self.registry.promote(pair, reason=reason, forced=force)
        self.swapper.poll()
        return state

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

    def _resolve(self, model: str, catalog: str | None, force: bool) -> Pair:
        trained_on = read_header(self._store.get(model, verify=False)).get("catalog") if catalog is None else None
        return self.registry.resolve(model, catalog, force=force, trained_on=trained_on)

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

    def _run(self, asked: list[tuple[Wish, Choice]]) -> list[Served | Exception]:
        """Answer a batch, each bundle's part by itself."""
        outcomes: dict[int, Served | Exception] = {}
        for choice in {id(choice.bundle): choice for _, choice in asked}.values():
            places = [place for place, (_, other) in enumerate(asked) if other.bundle is choice.bundle]
            answers = self._run_one([asked[place][0] for place in places], choice.bundle)
            for place, result in zip(places, answers, strict=True):
                outcomes[place] = Served(asked[place][1], result) if isinstance(result, Answer) else result
        return [outcomes[place] for place in range(len(asked))]

    def _run_one(self, wishes: list[Wish], bundle: Bundle) -> list[Answer | Exception]:
        start = time.perf_counter()
        outcomes: list[Answer | Exception] = []
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
            outcomes[place] = result
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
