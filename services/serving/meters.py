"""The instruments of serving: requests, seconds per stage, widths, candidates, memory, dead ends, short answers, swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from semantide.services.serving.engine import Group
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.rounds import Rounds
from semantide.services.serving.ticket import Passage, Watcher
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.telemetry import fast_counter, fast_histogram, meter

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

        def cache_bytes() -> float:
            return float(sum(bundle.prompts.use().in_use_bytes for bundle in measured.swapper.bundles))

        self._requests = made.create_counter("semantide_recommendations", description="Answered requests, by outcome and variant")
        self._scores = made.create_counter("semantide_scores", description="Answered requests for the scores of given items, by outcome and variant")
        self._scored = fast_counter("semantide_scored_items", "Items that were scored for requests that named them")
        self._explored = made.create_counter("semantide_items_explored", description="Places of lists that were given to new items")
        self._pages = made.create_counter("semantide_recommendation_pages", description="Further pages of rankings, by outcome")
        self._retrieved = made.create_counter("semantide_recommendations_retrieved", description="Answers of the retriever alone, by cause")
        self._short = fast_counter("semantide_recommendations_short", "Answers with fewer than n items")
        self._narrowed = fast_counter("semantide_recommendations_narrowed", "Answers found with fewer beams than asked for")
        self._dropped = made.create_counter("semantide_requests_dropped", description="Requests given up before their answer, by cause")
        self._dead_ends = made.create_counter("semantide_beam_dead_ends", description="Beams below which nothing allowed was left")
        self._candidates = fast_counter("semantide_beam_candidates", "Children of beams that searches chose from")
        self._visited = fast_counter("semantide_beam_visited", "Candidates among them that had to be looked at")
        self._unknown = made.create_counter("semantide_history_items_unknown", description="History items that the catalog does not have")
        self._prompts = fast_counter("semantide_prompt_cache", "Prompts of known users, by whether one was kept from before", "outcome")
        self._tokens = fast_counter("semantide_prompt_tokens", "Prompt tokens, by whether they were read or kept from before", "state")
        self._swaps = made.create_counter("semantide_model_swaps", description="Attempts to change the live model, by outcome")
        self._stage = fast_histogram("semantide_serving_stage_seconds", "Time of each stage", _SECONDS, "stage")
        self._busy = fast_counter("semantide_serving_busy_seconds", "Time that workers spent on rounds, all together")
        self._width = fast_histogram("semantide_beam_width", "Beams of a request", _COUNTS)
        self._batch = fast_histogram("semantide_serving_batch_size", "Requests searched together", _COUNTS)
        gauge("semantide_serving_queue", lambda: measured.scheduler.depth(), "Requests that wait")
        gauge("semantide_serving_workers", lambda: measured.scheduler.workers, "Threads that compute recommendations")
        gauge("semantide_serving_groups", lambda: measured.scheduler.running(), "Groups of requests under way")
        gauge("semantide_serving_width_share", lambda: measured.narrowing.share, "Share of the beams asked for that searches get")
        gauge("semantide_kv_bytes", lambda: measured.pool.in_use_bytes, "Keys and values of running requests", "By")
        gauge("semantide_kv_high_water_bytes", lambda: measured.pool.high_water_bytes, "The most keys and values that were held at once", "By")
        gauge("semantide_prompt_cache_bytes", cache_bytes, "Prompts kept of users who may return, of all loaded models", "By")

    def answered(self, run: Rounds[Any], passages: Sequence[Passage]) -> None:
        """A group came to its end and its answers were handed out."""
        self._batch.observe(len(run.requests))
        if isinstance(run, Group):
            self._found(run)
        for stage, begin, end in run.marks:
            self.stage(stage, end - begin)
            self._busy.inc(end - begin)
        for passage in passages:
            self.stage("queue", passage.seconds("queue"))
            self.stage("wait", passage.seconds("wait"))
        for stage in ("assemble", "format"):
            self.stage(stage, passages[0].seconds(stage))
        for request in run.requests:
            self._scored.inc(len(request.given))
            if unknown := len(request.query.history) - request.known:
                self._unknown.add(unknown)
            if request.query.user is not None:
                self._prompts.labels("hit" if request.kept else "miss").inc()
        self._tokens.labels("read").inc(run.tokens_read)
        self._tokens.labels("kept").inc(run.prompt_tokens - run.tokens_read)

    def _found(self, run: Group) -> None:
        """What a search has come by."""
        hits = run.hits
        assert hits is not None, "told before the end"
        self._candidates.inc(hits.candidates)
        self._visited.inc(hits.visited)
        if dead_ends := int(hits.dead_ends_R.sum()):
            self._dead_ends.add(dead_ends)
        for request, width, found in zip(run.requests, run.widths, hits.counts_R.tolist(), strict=True):
            self._width.observe(width)
            if width < request.width:
                self._narrowed.inc()
            if found < request.query.n and not request.query.only_new:
                self._short.inc()

    def dropped(self, cause: str) -> None:
        """A request was given up."""
        self._dropped.add(1, {"cause": cause})

    def stage(self, stage: str, seconds: float) -> None:
        """One stage took this long."""
        self._stage.labels(stage).observe(seconds)

    def request(self, outcome: str, variant: str | None = None) -> None:
        """One request ended so, on this side of a split."""
        self._requests.add(1, {"outcome": outcome, "variant": variant or "none"})

    def scores(self, outcome: str, variant: str | None = None) -> None:
        """One request for scores ended so, on this side of a split."""
        self._scores.add(1, {"outcome": outcome, "variant": variant or "none"})

    def explored(self, count: int) -> None:
        """So many new items took places of a list."""
        self._explored.add(count)

    def retrieved(self, cause: str) -> None:
        """The retriever answered: it was "asked", or it was the "fallback"."""
        self._retrieved.add(1, {"cause": cause})

    def page(self, outcome: str) -> None:
        """A further page was asked for."""
        self._pages.add(1, {"outcome": outcome})

    def swap(self, outcome: str) -> None:
        """One attempt to change the live model ended so."""
        self._swaps.add(1, {"outcome": outcome})
