"""Scores of rollouts between the reward room and the alignment run that waits for them.

A run stores its rollouts, asks (``RolloutsToScore``), and finds the scores' reference in Redis when they are there; it may ask for several before it takes the
first. What is not there in time it computes itself, and the same: the room takes work off a run, and never decides what a run computes.
A room that refuses (a reward model of another catalog) says why on the board, so that nobody waits for what will not come.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semantide.shared import broker as broker_door
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import RolloutsToScore
from semantide.shared.errors import BrokerUnavailable, Conflict, Corrupt, NotFound, StoreUnavailable
from semantide.shared.rollouts import Rollouts, Scorer, Scores

KEPT_SECONDS = 86400  # after which scores that nobody took away belong to a run that is gone
_MADE = "semantide:rewards:made"
_ALONE = 20  # rollouts that are scored here without asking, after a room has not answered in time
_REFUSED = b"refused:"
_AWAY = (broker_door.RedisError, BrokerUnavailable, StoreUnavailable, NotFound, Corrupt, OSError)


def scores_key(wanted: RolloutsToScore) -> str:
    """Where the reference of the scores stands in Redis."""
    return f"semantide:rewards:scores:{hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()}"


def store_rollouts(rollouts: Rollouts, store: ArtifactStore) -> str:
    """Put rollouts into the store."""
    with tempfile.TemporaryDirectory(prefix="semantide-rollouts-") as scratch:
        rollouts.save(Path(scratch))
        return store.put("rollouts", Path(scratch), inputs={"dataset": rollouts.dataset})


def store_scores(wanted: RolloutsToScore, scores: Scores, store: ArtifactStore) -> str:
    """Put scores into the store."""
    with tempfile.TemporaryDirectory(prefix="semantide-scores-") as scratch:
        folder = Path(scratch)
        scores.save(folder)
        # Equal scores may answer several wishes, and each run takes its own away: the wish makes them differ.
        (folder / "wanted.json").write_text(wanted.model_dump_json() + "\n")
        return store.put("scores", folder, inputs={"reward": wanted.reward, "rollouts": wanted.rollouts})


class ScoreBoard:
    """The references of scores that have been computed, and why others never will be, in Redis."""

    def __init__(self, broker: Any, store: ArtifactStore) -> None:
        self._broker, self._store = broker, store

    def find(self, wanted: RolloutsToScore) -> str | None:
        """The reference of the scores, where they have been computed.

        Raises: Conflict where the room has refused.
        """
        value = self._broker.get(scores_key(wanted))
        if value is not None and value.startswith(_REFUSED):
            raise Conflict(value[len(_REFUSED) :].decode(errors="replace"))
        return value.decode() if value else None

    def note(self, wanted: RolloutsToScore, now: float) -> None:
        """Note rollouts that somebody was asked to score, so that they are swept should their run be gone."""
        self._broker.zadd(_MADE, {wanted.rollouts: now})

    def put(self, wanted: RolloutsToScore, ref: str, now: float) -> None:
        """Note scores that have been computed; ``now`` in seconds."""
        pipe = self._broker.pipeline()
        pipe.set(scores_key(wanted), ref, ex=KEPT_SECONDS)
        pipe.zadd(_MADE, {ref: now})
        pipe.execute()

    def refuse(self, wanted: RolloutsToScore, why: str) -> None:
        """Note that these rollouts cannot be scored by that reward model."""
        self._broker.set(scores_key(wanted), _REFUSED + why.encode(), ex=KEPT_SECONDS)

    def remove(self, wanted: RolloutsToScore) -> None:
        """Take scores and their rollouts away once they have been used."""
        value = self._broker.get(scores_key(wanted))
        self._broker.delete(scores_key(wanted))
        for ref in (wanted.rollouts, *([value.decode()] if value and not value.startswith(_REFUSED) else [])):
            self._store.remove(ref)
            self._broker.zrem(_MADE, ref)  # last: what could not be taken away is swept

    def sweep(self, now: float) -> int:
        """Take away what runs have left behind; how many artifacts."""
        left = self._broker.zrangebyscore(_MADE, "-inf", now - KEPT_SECONDS)
        for ref in left:
            self._store.remove(ref.decode())
            self._broker.zrem(_MADE, ref)
        return len(left)

    def waiting(self) -> int:
        """Artifacts that are kept: scores, and the rollouts that they are of."""
        return int(self._broker.zcard(_MADE))


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
        store: ArtifactStore,
        broker: Any,
        send: Callable[[RolloutsToScore], None],
        here: Callable[[], Scorer],
        *,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        wait_seconds: float,
    ) -> None:
        """``here`` loads the same reward model into this process; it is called once, when it is needed."""
        self._reward, self._store, self._send, self._load = reward, store, send, here
        self._board = ScoreBoard(broker, store)
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
                wanted = RolloutsToScore(reward=self._reward, rollouts=store_rollouts(rollouts, self._store))
                self._board.note(wanted, self._clock())
                self._send(wanted)
                return Asked(rollouts, wanted, self._clock())
            except _AWAY:
                self._alone = _ALONE
        self._alone = max(0, self._alone - 1)
        return Asked(rollouts, None, self._clock())

    def take(self, asked: Asked) -> Scores:
        """The scores, once they are there or the patience has ended.

        Raises: Conflict for a reward model that does not know these items.
        """
        scores = self._fetched(asked) if asked.wanted is not None else None
        if scores is not None:
            self.from_room += 1
            return scores
        self.scored_here += 1
        if self._here is None:
            self._here = self._load()
        return self._here.score(asked.rollouts)

    def _fetched(self, asked: Asked) -> Scores | None:
        wanted = asked.wanted
        assert wanted is not None
        try:
            while True:
                ref = self._board.find(wanted)
                if ref is not None or self._clock() - asked.since >= self._wait_seconds:
                    break
                self._pause(0.02)
            scores = Scores.load(self._store.get(ref)) if ref else None
            # A room that is late finds its rollouts gone, and has nothing to do.
            self._board.remove(wanted)
        except _AWAY:
            scores = None
        if scores is not None and scores.gate_BG.shape == asked.rollouts.items_BG.shape:
            return scores
        self._alone = _ALONE
        return None
