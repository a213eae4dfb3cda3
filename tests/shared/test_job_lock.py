"""Of processes that would work for one job only one does, and where nothing could see to that none does."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semantide.shared.contracts import JobSpec
from semantide.shared.errors import PermanentError
from semantide.shared.job_lock import hold
from semantide.shared.job_process import run_job
from semantide.shared.job_ranks import rank_failure, run_rank
from semantide.shared.jobs import AGAIN, JobContext, JobOutcome, Jobs


def test_the_second_is_turned_away(tmp_path: Path) -> None:
    assert hold(tmp_path / "lock")
    assert not hold(tmp_path / "lock"), "another handle of the file, as another process has"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
@pytest.mark.parametrize("wait", [False, True])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, wait: bool) -> None:
    monkeypatch.setattr(fcntl, "flock", _refusing(number))
    with pytest.raises(PermanentError, match=rf"{tmp_path}.*{os.strerror(number)}.*SEMANTIDE_DATA_DIR"):
        hold(tmp_path / "lock", wait=wait)


def _refusing(number: int) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.ENOLCK])
def test_a_job_fails_with_what_to_do_and_is_not_tried_for_ever(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    room = make_room("training")
    jobs = Jobs(room.broker)
    job = jobs.submit(JobSpec(kind="train"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(fcntl, "flock", _refusing(number))

    def never(_: JobContext) -> JobOutcome:
        raise AssertionError("it must not begin")

    status = run_job(job.id, never, room.settings, room.store, room.broker, room.queues)
    record = jobs.get(job.id)
    if number == errno.EWOULDBLOCK:
        assert status == AGAIN and record.state == "queued"
        return
    assert status == 0 and record.state == "failed" and record.error is not None and "SEMANTIDE_DATA_DIR" in record.error
    assert run_rank(job.id, 1, never, room.settings, room.store, room.broker, room.queues) == 1
    said = rank_failure(room.settings.data_dir.absolute() / "jobs" / job.id)
    assert said is not None and "SEMANTIDE_DATA_DIR" in str(said)
