"""Scores of rollouts between the reward room and the alignment run that waits for them.

A run stores its rollouts, asks (``RolloutsToScore``), and finds the scores when they are there (``errands``); it may ask for several before it takes the
first. What is not there in time it scores itself, and the same. A reward model of another catalog is refused, here as there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import RolloutsToScore
from semantide.shared.errands import AWAY, Errands, store_made
from semantide.shared.rollouts import Rollouts, Scorer, Scores

_ALONE = 20  # rollouts that are scored here without asking, after a room has not answered in time


def store_rollouts(rollouts: Rollouts, run: str, store: ArtifactStore) -> str:
    """Put a run's rollouts into the store; those of another run that draws the same are others."""
    return store_made("rollouts", run, rollouts.save, store, inputs={"dataset": rollouts.dataset})


def store_scores(wanted: RolloutsToScore, scores: Scores, store: ArtifactStore) -> str:
    """Put scores into the store."""
    return store_made("scores", wanted, scores.save, store, inputs={"reward": wanted.reward, "rollouts": wanted.rollouts})


@dataclass(frozen=True)
class Asked:
    """Rollouts on their way; ``wanted`` is None where nobody was asked."""

    rollouts: Rollouts
    wanted: RolloutsToScore | None
    since: float


class QueuedScorer:
    """Asks the reward room, and scores here what does not come in time; ``pause`` waits some seconds, ``clock`` tells those since 1970."""

    def __init__(
        self,
        reward: str,
        run: str,
        store: ArtifactStore,
        broker: Any,
        send: Callable[[RolloutsToScore], None],
        here: Callable[[], Scorer],
        *,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        wait_seconds: float,
    ) -> None:
        """``run`` names who asks; ``here`` loads the same reward model into this process, once, when it is needed."""
        self._reward, self._run, self._store, self._send, self._load = reward, run, store, send, here
        self._errands = Errands(RolloutsToScore, broker, store)
        self._clock, self._pause, self._wait_seconds = clock, pause, wait_seconds
        self._here: Scorer | None = None
        self._alone = 0
        self.from_room = self.scored_here = 0

    def score(self, rollouts: Rollouts) -> Scores:
        """See ``Scorer``: ask and take at once.

        Raises: Conflict for a reward model that does not know these items.
        """
        return self.take(self.ask(rollouts))

    def ask(self, rollouts: Rollouts) -> Asked:
        """Put the rollouts on their way; a room, a broker or a store that is away costs only the time of scoring them here."""
        if self._wait_seconds > 0 and self._alone == 0:
            try:
                wanted = RolloutsToScore(reward=self._reward, rollouts=store_rollouts(rollouts, self._run, self._store))
                self._errands.note(wanted.rollouts, self._clock())
                self._send(wanted)
                return Asked(rollouts, wanted, self._clock())
            except AWAY:
                self._alone = _ALONE
        self._alone = max(0, self._alone - 1)
        return Asked(rollouts, None, self._clock())

    def take(self, asked: Asked) -> Scores:
        """The scores, once they are there or the patience has ended.

        Raises: Conflict for a reward model that does not know these items.
        """
        scores = None if asked.wanted is None else self._fetched(asked, asked.wanted)
        if scores is not None:
            self.from_room += 1
            return scores
        self.scored_here += 1
        if self._here is None:
            self._here = self._load()
        return self._here.score(asked.rollouts)

    def _fetched(self, asked: Asked, wanted: RolloutsToScore) -> Scores | None:
        scores: Scores | None = None
        with suppress(*AWAY):
            folder = self._errands.fetched(wanted, asked.since + self._wait_seconds, self._clock, self._pause)
            with suppress(*AWAY):
                scores = None if folder is None else Scores.load(folder)
            # A room that is late finds its rollouts gone, and has nothing to do.
            self._errands.remove(wanted, wanted.rollouts)
        if scores is not None and scores.gate_BG.shape == asked.rollouts.items_BG.shape:
            return scores
        self._alone = _ALONE
        return None
