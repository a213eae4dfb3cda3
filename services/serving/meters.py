"""The instruments of serving: requests, seconds per stage, widths, candidates, memory, dead ends, short answers, swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from semantide.services.serving.engine import Group
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.ticket import Passage, Watcher
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.telemetry import meter

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Measured(Protocol):
    """What is read when somebody asks for the metrics."""

    pool: KVPool
    narrowing: Narrowing
    scheduler: Any
    swapper: Any


class Meters(Watcher):
    """Counts what serving does."""

    def __init__(self, measured: Measured) -> None:
        made = meter("serving")

        def gauge(name: str, value: Callable[[], float], description: str, unit: str = "") -> None:
            def observe(_: CallbackOptions) -> Iterable[Observation]:
                yield Observation(value())

            made.create_observable_gauge(name, [observe], unit=unit, description=description)

        def histogram(name: str, description: str, bounds: Sequence[float], unit: str = "") -> Any:
            return made.create_histogram(name, unit=unit, description=description, explicit_bucket_boundaries_advisory=bounds)

        def cache_bytes() -> float:
            return float(sum(bundle.prompts.use().in_use_bytes for bundle in measured.swapper.bundles))

        self._requests = made.create_counter("semantide_recommendations", description="Answered requests, by outcome and variant")
        self._explored = made.create_counter("semantide_items_explored", description="Places of lists that were given to new items")
        self._pages = made.create_counter("semantide_recommendation_pages", description="Further pages of rankings, by outcome")
        self._short = made.create_counter("semantide_recommendations_short", description="Answers with fewer than n items")
        self._narrowed = made.create_counter("semantide_recommendations_narrowed", description="Answers found with fewer beams than asked for")
        self._dropped = made.create_counter("semantide_requests_dropped", description="Requests given up before their answer, by cause")
        self._dead_ends = made.create_counter("semantide_beam_dead_ends", description="Beams below which nothing allowed was left")
        self._candidates = made.create_counter("semantide_beam_candidates", description="Candidates that searches scored")
        self._unknown = made.create_counter("semantide_history_items_unknown", description="History items that the catalog does not have")
        self._prompts = made.create_counter("semantide_prompt_cache", description="Prompts of known users, by whether some of it was kept from before")
        self._tokens = made.create_counter("semantide_prompt_tokens", description="Prompt tokens, by whether they were read or kept from before")
        self._swaps = made.create_counter("semantide_model_swaps", description="Attempts to change the live model, by outcome")
        self._stage = histogram("semantide_serving_stage_seconds", "Time of each stage", _SECONDS, "s")
        self._width = histogram("semantide_beam_width", "Beams of a request", _COUNTS)
        self._batch = histogram("semantide_serving_batch_size", "Requests searched together", _COUNTS)
        gauge("semantide_serving_queue", lambda: measured.scheduler.depth(), "Requests that wait")
        gauge("semantide_serving_groups", lambda: measured.scheduler.running(), "Groups of requests under way")
        gauge("semantide_serving_width_share", lambda: measured.narrowing.share, "Share of the beams asked for that searches get")
        gauge("semantide_kv_bytes", lambda: measured.pool.in_use_bytes, "Keys and values of running requests", "By")
        gauge("semantide_kv_high_water_bytes", lambda: measured.pool.high_water_bytes, "The most keys and values that were held at once", "By")
        gauge("semantide_prompt_cache_bytes", cache_bytes, "Prompts kept of users who may return, of all loaded models", "By")

    def searched(self, group: Group) -> None:
        """A group was searched."""
        hits = group.hits
        assert hits is not None, "told before the end"
        self._batch.record(len(group.requests))
        self._candidates.add(hits.candidates)
        if dead_ends := int(hits.dead_ends_R.sum()):
            self._dead_ends.add(dead_ends)
        for stage, begin, end in group.marks:
            self._stage.record(end - begin, {"stage": stage})
        for place, request in enumerate(group.requests):
            width, found = group.widths[place], int(hits.counts_R[place])
            self._width.record(width)
            if width < request.width:
                self._narrowed.add(1)
            if found < request.query.n:
                self._short.add(1)
            if unknown := len(request.query.history) - request.known:
                self._unknown.add(unknown)
            if request.query.user is not None:
                self._prompts.add(1, {"outcome": "miss" if request.kept is None else "hit"})
        read, all_of_them = sum(request.tokens for request in group.requests), sum(len(request.prompt) for request in group.requests)
        self._tokens.add(read, {"state": "read"})
        self._tokens.add(all_of_them - read, {"state": "kept"})

    def answered(self, passages: Sequence[Passage]) -> None:
        """A group's answers were handed out."""
        for passage in passages:
            for stage in ("queue", "wait"):
                self._stage.record(passage.seconds(stage), {"stage": stage})
        for stage in ("assemble", "format"):
            self._stage.record(passages[0].seconds(stage), {"stage": stage})

    def dropped(self, cause: str) -> None:
        """A request was given up."""
        self._dropped.add(1, {"cause": cause})

    def stage(self, stage: str, seconds: float) -> None:
        """One stage took this long."""
        self._stage.record(seconds, {"stage": stage})

    def request(self, outcome: str, variant: str | None = None) -> None:
        """One request ended so, on this side of a split."""
        self._requests.add(1, {"outcome": outcome, "variant": variant or "none"})

    def explored(self, count: int) -> None:
        """So many new items took places of a list."""
        self._explored.add(count)

    def page(self, outcome: str) -> None:
        """A further page was asked for."""
        self._pages.add(1, {"outcome": outcome})

    def swap(self, outcome: str) -> None:
        """One attempt to change the live model ended so."""
        self._swaps.add(1, {"outcome": outcome})
