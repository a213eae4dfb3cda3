"""Follows the registry: loads and warms what it wants in the background, then swaps with one assignment.

Requests take the bundle once and keep it until they are answered, so a swap disturbs none of them; the old bundle goes when its last request does.
A bundle that cannot be loaded or warmed never becomes live: the present one stays, and the cause is shown. The same holds for the variants of a split.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.services.serving.poller import seconds_until_next
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Pair, Split
from semantide.services.serving.variants import Lineup
from semantide.shared.availability import Availability
from semantide.shared.telemetry import logger


@dataclass(frozen=True)
class SwapStatus:
    """What the registry wants, what this process serves, and why these differ, if they do; ``variant_errors`` by name."""

    wanted: Pair | None = None
    loaded: Pair | None = None
    error: str | None = None
    variant_errors: Mapping[str, str] = field(default_factory=dict)


class Swapper:
    """Holds the live bundle of this process, and those of the variants.

    ``load`` reads and warms a pair, or raises.
    """

    def __init__(
        self, registry: Registry, load: Callable[[Pair], Bundle], on_swap: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry, self._load, self._on_swap, self._clock = registry, load, on_swap, clock
        self._lock = threading.Lock()  # one load at a time
        self._lineup: Lineup | None = None
        self._prepared: dict[Pair, Bundle] = {}
        self._seen_version: int | None = None
        self._retry_at = 0.0
        self._status = SwapStatus()
        self._log = logger("serving")

    @property
    def bundle(self) -> Bundle | None:
        """The live bundle; take it once per request."""
        return self._lineup.live if self._lineup else None

    @property
    def lineup(self) -> Lineup | None:
        """The live bundle and the variants; take it once per request."""
        return self._lineup

    @property
    def bundles(self) -> list[Bundle]:
        """All that answer, each once."""
        lineup = self._lineup
        return list({id(bundle): bundle for bundle in ([lineup.live, *lineup.bundles.values()] if lineup else [])}.values())

    @property
    def settled(self) -> bool:
        """Whether the registry was followed once, its variants included: before that, their users would be answered by the live model."""
        return self._seen_version is not None

    @property
    def status(self) -> SwapStatus:
        """What is wanted and what is served."""
        return self._status

    def prepare(self, *pairs: Pair) -> None:
        """Load pairs that are about to be promoted, so that a broken one is refused before anything changes.

        Raises: NotFound, Corrupt, Conflict, and what the model itself raises.
        """
        with self._lock:
            held = self._held()
            self._prepared = {pair: held.get(pair) or self._load(pair) for pair in pairs}

    def poll(self) -> None:
        """Do what the registry wants, if it changed since the last look or a passing fault may have passed."""
        version = self._registry.version()
        if version == self._seen_version and not (self._retry_at and self._clock() >= self._retry_at):
            return
        with self._lock:
            state = self._registry.read()
            self._retry_at = 0.0
            self._follow(state.live, state.previous)
            self._follow_split(state.split)
            self._prepared = {}
            self._seen_version = state.version

    def _held(self) -> dict[Pair, Bundle]:
        """Everything that is loaded."""
        return {bundle.pair: bundle for bundle in [*self._prepared.values(), *self.bundles]}

    def _follow(self, wanted: Pair | None, previous: tuple[Pair, ...]) -> None:
        present = self._lineup.live.pair if self._lineup else None
        if wanted is None or wanted == present:
            self._status = SwapStatus(wanted, present)
            return
        # What is said while it is loaded; of one that could not be loaded the cause is known still.
        self._status = SwapStatus(wanted, present, self._status.error if self._status.wanted == wanted else None, self._status.variant_errors)
        error = self._try(wanted)
        if error is None:
            return
        if self._lineup is None:  # a start with a broken live model: better the one before than nothing
            for pair in reversed(previous):
                if self._try(pair) is None:
                    break
        self._status = SwapStatus(wanted, self._lineup.live.pair if self._lineup else None, error)

    def _try(self, pair: Pair) -> str | None:
        """Load, swap, and say what went wrong, if anything."""
        start = self._clock()
        bundle = self._obtain(pair)
        if isinstance(bundle, str):
            return bundle
        self._lineup = replace(self._lineup, live=bundle) if self._lineup else Lineup(bundle)
        self._status = SwapStatus(pair, pair)
        self._log.info("model is live", model=pair.model, catalog=pair.catalog, items=len(bundle.catalog), seconds=round(self._clock() - start, 3))
        self._on_swap("swapped")
        return None

    def _obtain(self, pair: Pair) -> Bundle | str:
        """The pair's bundle, or why there is none."""
        try:
            return self._held().get(pair) or self._load(pair)
        except Exception as error:
            if (pause := seconds_until_next(error)) is not None:
                self._retry_at = self._clock() + pause
            self._log.error("model cannot be loaded, the present one goes on", model=pair.model, catalog=pair.catalog, error=str(error), exc_info=True)
            self._on_swap("refused")
            return f"{type(error).__name__}: {error}"

    def _follow_split(self, split: Split) -> None:
        lineup = self._lineup
        if lineup is None:
            return
        bundles: dict[str, Bundle] = {}
        errors: dict[str, str] = {}
        for variant in split.variants:
            bundle, present = self._obtain(variant.pair), lineup.bundles.get(variant.name)
            if isinstance(bundle, Bundle):
                bundles[variant.name] = bundle
                continue
            errors[variant.name] = bundle
            if present is not None and present.pair.model == variant.pair.model:
                bundles[variant.name] = present  # only its new catalog cannot be had: its users stay where they are
        if split != lineup.split or errors:
            self._log.info("users are divided", shares=split.shares, errors=errors)
        self._lineup = Lineup(lineup.live, split, bundles)
        self._status = replace(self._status, variant_errors=errors)


class AvailabilityWatch:
    """Keeps the set of unavailable items at hand; ``poll`` looks whether it changed."""

    def __init__(self, availability: Availability) -> None:
        self._availability = availability
        self._seen: int | None = None
        self._current = Unavailable()

    @property
    def current(self) -> Unavailable:
        """The set as last seen."""
        return self._current

    def poll(self) -> None:
        """Read the set again if somebody wrote to it."""
        version = self._availability.version()
        if version != self._seen:
            items = frozenset(self._availability.unavailable())
            # A number of our own: the broker's starts again when the broker does.
            self._current = Unavailable(self._current.version + 1, items)
            self._seen = version
