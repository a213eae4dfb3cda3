"""Rollouts are scored by whoever is there, once, and the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from semantide.shared.contracts import RolloutsToScore
from semantide.shared.errands import KEPT_SECONDS, Errands
from semantide.shared.errors import BrokerUnavailable, Conflict
from semantide.shared.rollout_scores import QueuedScorer, store_scores
from semantide.shared.rollouts import Rollouts, Scores, rollouts_of
from semantide.shared.room import Room

REWARD = "rewards/sha256-" + "a" * 64


def some(seed: int) -> Rollouts:
    items_BG = np.random.default_rng(seed).integers(-1, 9, (3, 4))
    return rollouts_of(
        "datasets/sha256-" + "b" * 64,
        [0, 1, -1],
        [np.array([1, 2]), np.array([3]), np.array([], dtype=np.int64)],
        [np.array([5, 6]), np.array([7]), np.array([])],
        items_BG,
    )


class Judge:
    """Prefers small rows."""

    asked = 0

    def score(self, rollouts: Rollouts) -> Scores:
        self.asked += 1
        items_BG = rollouts.items_BG
        valid_BG = items_BG >= 0
        preference_BG = (valid_BG / (1.0 + items_BG.clip(0))).astype(np.float32)
        return Scores(preference_BG, preference_BG.copy(), valid_BG & (items_BG < 8), valid_BG)


class Clock:
    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def room(make_room: Callable[[str], Room]) -> Room:
    return make_room("reward")


def scorer(room: Room, send: Callable[[RolloutsToScore], None], here: Judge, clock: Clock, wait: float = 5, run: str = "align-1") -> QueuedScorer:
    return QueuedScorer(REWARD, run, room.store, room.broker, send, lambda: here, clock=clock, pause=clock.pause, wait_seconds=wait)


def worker(room: Room, judge: Judge) -> Callable[[RolloutsToScore], None]:
    def work(wanted: RolloutsToScore) -> None:
        scores = judge.score(Rollouts.load(room.store.get(wanted.rollouts)))
        Errands(RolloutsToScore, room.broker, room.store).put(wanted, store_scores(wanted, scores, room.store), 0.0)

    return work


def equal(one: Scores, other: Scores) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("preference_BG", "relevance_BG", "gate_BG", "valid_BG"))


def test_several_are_asked_for_before_the_first_is_taken_and_nothing_is_left(room: Room) -> None:
    sent: list[RolloutsToScore] = []
    far, here = Judge(), Judge()
    work = worker(room, far)
    asking = scorer(room, sent.append, here, Clock(lambda: work(sent.pop(0)) if sent else None))
    asked = [asking.ask(some(seed)) for seed in range(3)]
    for seed in (2, 0, 1):
        assert equal(asking.take(asked[seed]), Judge().score(some(seed)))
    assert (far.asked, here.asked, asking.from_room, asking.scored_here) == (3, 0, 3, 0)
    assert room.store.list("rollouts") == room.store.list("scores") == [] and Errands(RolloutsToScore, room.broker, room.store).waiting() == 0


def test_a_room_that_does_not_answer_costs_one_wait(room: Room) -> None:
    sent: list[RolloutsToScore] = []
    here, clock = Judge(), Clock()
    asking = scorer(room, sent.append, here, clock)
    for seed in range(6):
        assert equal(asking.score(some(seed)), Judge().score(some(seed)))
    assert 5 <= clock.now < 5.1 and len(sent) == 1 and asking.scored_here == 6
    assert room.store.list("rollouts") == []


@pytest.mark.parametrize("how", ["broker", "never", "foreign"])
def test_what_is_away_or_odd_is_scored_here(room: Room, how: str) -> None:
    def send(wanted: RolloutsToScore) -> None:
        if how == "broker":
            raise BrokerUnavailable("away")
        assert how == "foreign", "nobody was to be asked"
        other = Scores(*(np.zeros((1, 1), dtype) for dtype in (np.float32, np.float32, bool, bool)))  # type: ignore[arg-type]
        Errands(RolloutsToScore, room.broker, room.store).put(wanted, store_scores(wanted, other, room.store), 0.0)

    asking = scorer(room, send, Judge(), Clock(), wait=0 if how == "never" else 5)
    assert equal(asking.score(some(1)), Judge().score(some(1))) and asking.scored_here == 1


def test_a_refusal_ends_the_wait(room: Room) -> None:
    clock = Clock()
    asking = scorer(
        room, lambda wanted: Errands(RolloutsToScore, room.broker, room.store).refuse(wanted, f"{REWARD} knows none of these items"), Judge(), clock
    )
    with pytest.raises(Conflict, match="knows none of these items"):
        asking.score(some(0))
    assert clock.now == 0


def test_what_runs_leave_behind_is_swept_after_a_day(room: Room) -> None:
    sent: list[RolloutsToScore] = []
    scorer(room, sent.append, Judge(), Clock()).ask(some(0))
    worker(room, Judge())(sent[0])
    board = Errands(RolloutsToScore, room.broker, room.store)
    assert board.sweep(KEPT_SECONDS - 1) == 0 and board.sweep(KEPT_SECONDS + 1) == 2
    assert room.store.list("rollouts") == room.store.list("scores") == []
    assert board.waiting() == 0
