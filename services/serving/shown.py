"""Notes of the lists that were shown, written to the broker a moment later, so that nobody waits for it."""

from __future__ import annotations

from collections import deque

from semantide.shared.broker import RedisError
from semantide.shared.recommendation import RecommendationAnswer
from semantide.shared.shown_lists import ShownList, ShownLists
from semantide.shared.telemetry import fast_counter

_WAITING = 20_000  # lists that wait for a broker that is away; the oldest go
_TOGETHER = 500


class ShownNotes:
    """Takes answers whose making had a part of chance: a split chose the model, or a draw chose items."""

    def __init__(self, lists: ShownLists, wanted: bool) -> None:
        self._lists, self._wanted = lists, wanted
        self._waiting: deque[ShownList] = deque(maxlen=_WAITING)
        self._lost = fast_counter("semantide_shown_lists_lost", "Lists that could not be kept for their feedback, because the broker was away for long")

    def note(self, answer: RecommendationAnswer) -> None:
        """Keep an answer, if chance had a part in it and there is anything in it."""
        if not self._wanted or not answer.items or (answer.variant is None and all(item.propensity in (1, None) for item in answer.items)):
            return
        if len(self._waiting) == _WAITING:
            self._lost.inc()
        shown = ShownList(
            answer.request_id, tuple(item.item for item in answer.items), tuple(item.propensity for item in answer.items), answer.variant, answer.share
        )
        self._waiting.append(shown)

    def flush(self) -> None:
        """Write what waits.

        Raises: RedisError; then it still waits.
        """
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
            try:
                self._lists.keep(some)
            except RedisError:
                # What was noted meanwhile is newer, and may have taken the room.
                lost = max(0, len(some) + len(self._waiting) - _WAITING)
                if lost:
                    self._lost.inc(lost)
                self._waiting.extendleft(reversed(some[lost:]))
                raise
