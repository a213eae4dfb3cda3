"""How long the processes of a pod have to end: as long as the pod's own period of grace leaves them, which the operator says."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from semantide.shared import pod
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import BadData
from semantide.shared.followed_jobs import FollowedJobs
from semantide.shared.jobs import AGAIN, JobContext, Jobs
from semantide.shared.pod import Children, Place

from .npujob_server import wait_until

# Asked to end, it says so and ends when it may: a checkpoint that takes its time.
_SLOW = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def asked(*_):
    (folder / "asked").touch()
    while not (folder / "may end").exists():
        time.sleep(0.01)
    sys.exit(75)
signal.signal(signal.SIGTERM, asked)
(folder / "runs").touch()
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(("stop_seconds", "status"), [(3600.0, AGAIN), (0.05, -9)])
def test_a_last_checkpoint_has_the_time_that_was_given(tmp_path: Path, stop_seconds: float, status: int) -> None:
    children = Children([([sys.executable, "-c", _SLOW, str(tmp_path)], {})], tmp_path / "log.txt", stop_seconds)
    ends: list[int] = []
    waiting = threading.Thread(target=lambda: ends.append(children.wait((tmp_path / "runs").exists)))
    waiting.start()
    if status == AGAIN:
        wait_until((tmp_path / "asked").exists)
        assert not ends, "it saves"
        (tmp_path / "may end").touch()
    waiting.join(600)
    assert ends == [status]


class _Begun(Exception):
    pass


@pytest.mark.parametrize("place", [Place(), Place(ranks=1, first=0, world=2), Place(ranks=1, first=1, world=2)])
def test_every_pod_goes_by_what_the_operator_says(make_room: Callable[[str], Any], settings: Settings, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    room = make_room("training")
    jobs = Jobs(room.broker)
    job = jobs.submit(JobSpec(kind="train"))
    given: list[float] = []

    def begin(commands: Any, log: Path, stop_seconds: float) -> Children:
        given.append(stop_seconds)
        raise _Begun

    monkeypatch.setattr(pod, "Children", begin)
    monkeypatch.setattr(pod, "run_job", lambda job_id, run, settings, *rest: run(JobContext(jobs.get(job_id), settings, *rest)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("SEMANTIDE_JOB_STOP_SECONDS", "123")
    told = settings.model_copy(update={"job_stop_seconds": Settings().job_stop_seconds})
    with pytest.raises(_Begun):
        pod.run_pod(job.id, place, ["x"], lambda _: nullcontext(), told, room.store, room.broker, room.queues)
    assert given == [123.0]


@pytest.mark.parametrize("told", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "p-0.gang.lab.svc"}])
@pytest.mark.parametrize("written", [True, False])
def test_ranks_hear_of_a_table_only_where_there_is_one(tmp_path: Path, told: dict[str, str], written: bool) -> None:
    address, table = tmp_path / "master-address", tmp_path / "hccl.json"
    said = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "SEMANTIDE_MASTER_ADDRESS_FILE": str(address), "RANK_TABLE_FILE": str(table), **told}
    place = Place.of(said)
    assert place.found(lambda: True).master_file is not None, "nobody begins before the table could be there"
    address.write_text("10.0.0.7")
    if written:
        table.write_text("{}")
    environment = place.found(lambda: False).environment(3)
    assert environment["MASTER_ADDR"] == told.get("MASTER_ADDR", "10.0.0.7") and environment["RANK"] == "3"
    assert environment.get("RANK_TABLE_FILE") == (str(table) if written else None)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"recipe": 5}, "parameters.recipe"),
        ({"inputs": {"jduge": "rewards/sha256-" + "0" * 64}}, "input 'jduge' is unknown to a job of kind align"),
        ({"inputs": {"model": "rewards/sha256-" + "0" * 64}}, "name an artifact of models"),
    ],
)
def test_an_npujob_that_is_no_job_is_refused_with_what_is_wrong(broker: Any, parameters: dict[str, Any], said: str) -> None:
    jobs = FollowedJobs(broker)
    with pytest.raises(BadData, match=said):
        pod.adopted("by-hand", {"SEMANTIDE_GANG_JOB": json.dumps({"kind": "align", "parameters": parameters})}, jobs)
    assert not jobs.recent()
