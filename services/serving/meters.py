"""The instruments of serving: requests, seconds per stage, widths, dead ends, short answers, swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from semantide.services.serving.engine import Answer
from semantide.shared.telemetry import meter

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Meters:
    """Counts what serving does."""

    def __init__(self, depth: Callable[[], int] = lambda: 0) -> None:
        made = meter("serving")

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            yield Observation(depth())

        self._requests = made.create_counter("semantide_recommendations", description="Answered requests, by outcome and variant")
        self._explored = made.create_counter("semantide_items_explored", description="Places of lists that were given to new items")
        self._pages = made.create_counter("semantide_recommendation_pages", description="Further pages of rankings, by outcome")
        self._short = made.create_counter("semantide_recommendations_short", description="Answers with fewer than n items")
        self._dead_ends = made.create_counter("semantide_beam_dead_ends", description="Beams below which nothing allowed was left")
        self._unknown = made.create_counter("semantide_history_items_unknown", description="History items that the catalog does not have")
        self._stage = made.create_histogram(
            "semantide_serving_stage_seconds", unit="s", description="Time of each stage", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._width = made.create_histogram("semantide_beam_width", description="Beams of a request", explicit_bucket_boundaries_advisory=_COUNTS)
        self._batch = made.create_histogram(
            "semantide_serving_batch_size", description="Requests answered together", explicit_bucket_boundaries_advisory=_COUNTS
        )
        self._swaps = made.create_counter("semantide_model_swaps", description="Attempts to change the live model, by outcome")
        made.create_observable_gauge("semantide_serving_queue", [observe], description="Requests that wait")

    def answered(self, answer: Answer) -> None:
        """One answer was made."""
        self._width.record(answer.width)
        if answer.short_reason:
            self._short.add(1)
        if answer.dead_ends:
            self._dead_ends.add(answer.dead_ends)
        if answer.unknown_history_items:
            self._unknown.add(answer.unknown_history_items)

    def batch(self, size: int, seconds: dict[str, float]) -> None:
        """One batch was answered."""
        self._batch.record(size)
        for stage, value in seconds.items():
            self.stage(stage, value)

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
