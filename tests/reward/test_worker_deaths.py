"""Workers of the reward room that are killed while they score: real processes, a real queue, and runs that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semantide.services.reward import tasks
from semantide.shared.contracts import RolloutsToScore
from semantide.shared.errands import Errands
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.queues import queue_name
from semantide.shared.rollout_scores import QueuedScorer
from semantide.shared.room import Room

from .test_doors import equal, some

UNACKNOWLEDGED = "semantide:queue:unacked"
PATIENCE = 300.0  # seconds until what another process has to do is given up, on however slow a machine

# The room's own worker; what it held when it was killed comes back at once. With a file to write, it writes it in the middle of a rollout and gets no further.
WORKER = """
import signal, sys
from semantide.shared import queues
queues.VISIBILITY_SECONDS = 1
from semantide.services import local
from semantide.services.reward import tasks
from semantide.shared.config import Settings

stored, begun = tasks.store_scores, sys.argv[1:]
def store_scores(*arguments):
    for path in begun:
        open(path, "w").close()
        signal.pause()
    return stored(*arguments)
tasks.store_scores = store_scores
local.work("reward", Settings())
"""


@pytest.fixture
def start(settings: Any) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a worker; all of them end with the test."""
    environment = os.environ | {"SEMANTIDE_DATA_DIR": str(settings.data_dir), "SEMANTIDE_REDIS_URL": settings.redis_url}
    started: list[subprocess.Popen[bytes]] = []

    def begin(*begun: Path) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", WORKER, *map(str, begun)], env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_kill_9_in_the_middle_of_a_rollout_costs_neither_scores_nor_another_run_its_own(
    make_room: Callable[[str], Room], start: Callable[..., subprocess.Popen[bytes]], shop: Path, trained: Path, tmp_path: Path
) -> None:
    """Two runs that draw the same; the one does without the room, the other waits for the worker that comes after."""
    tasks.scorer_of.cache_clear()
    room = make_room("reward")
    dataset, reward = room.store.put("datasets", shop), room.store.put("rewards", trained)
    here = RewardScorer(reward, PreferenceModel.load(trained), dataset, shop)
    late = [0.0]

    def scorer(run: str, clock: Callable[[], float]) -> QueuedScorer:
        return QueuedScorer(reward, run, room.store, room.broker, room.send, lambda: here, clock=clock, pause=time.sleep, wait_seconds=PATIENCE)

    impatient, patient = scorer("align-1", lambda: time.time() + late[0]), scorer("align-2", time.time)
    rollouts = some(dataset)
    asked = [run.ask(rollouts) for run in (impatient, patient)]
    assert len(room.store.list("rollouts")) == 2, "a run's rollouts are its own"
    killed = start(tmp_path / "begun")
    until((tmp_path / "begun").exists)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not room.store.list("scores") and room.broker.hlen(UNACKNOWLEDGED) > 0
    late[0] = 2 * PATIENCE
    assert equal(impatient.take(asked[0]), here.score(rollouts)) and impatient.scored_here == 1
    assert len(room.store.list("rollouts")) == 1, "it took away what was its own"

    start()
    assert equal(patient.take(asked[1]), here.score(rollouts)) and (patient.from_room, patient.scored_here) == (1, 0)
    # The message that the killed worker held came again too, and had nothing to do.
    until(lambda: room.broker.hlen(UNACKNOWLEDGED) == 0 and room.queues.depths(room.broker)[queue_name(RolloutsToScore, "reward")] == 0)
    assert room.store.list("rollouts") == room.store.list("scores") == [] and Errands(RolloutsToScore, room.broker, room.store).waiting() == 0
    assert room.queues.parked(room.broker) == {}
