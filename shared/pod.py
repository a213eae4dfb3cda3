"""One pod's part of a job on a cluster: what ``semantide pod ID`` does.

    one rank in all       ``services.local job ID`` as a child
    several               ``services.local rank ID`` once for each rank of this pod; the first pod records the outcome of all
    exit status           0 succeeded, 75 (AGAIN) shall be started again, 65 (FAILED) shall not be; anything else: started again and counted as a crash

The operator says where this pod stands, as torchrun would: WORLD_SIZE (ranks of all pods), LOCAL_WORLD_SIZE (ranks of this one), RANK (its first), MASTER_PORT, and MASTER_ADDR
or a file that will hold it, since no address is known before all pods have one; beside that file lies RANK_TABLE_FILE, where there is a table. An NPUJob that was made by hand has no record yet: the operator says what it is about.
A rank that is lost ends its pod, whereupon the operator starts all pods again. All pods see one data folder, where ranks leave what they have to say of their end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import ENDED, JobRecord, JobSpec
from semantide.shared.errors import BadData, BrokerUnavailable, JobCancelled, NotFound, RankLost
from semantide.shared.followed_jobs import FollowedJobs
from semantide.shared.job_process import run_job
from semantide.shared.job_ranks import forget_ranks, rank_failure, rank_outcome
from semantide.shared.jobs import AGAIN, FAILED, JobContext, JobOutcome
from semantide.shared.queues import Queues
from semantide.shared.telemetry import logger

_LOOK_SECONDS = 0.1
_MASTER_FILE = "SEMANTIDE_MASTER_ADDRESS_FILE"
_GANG_JOB = "SEMANTIDE_GANG_JOB"
_TABLE_FILE = "RANK_TABLE_FILE"
# A rank is told its own.
_OF_THE_POD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", _MASTER_FILE, _TABLE_FILE, _GANG_JOB)
_RANK_FOLDERS = ("checkpoints", "model", "ranks", "beats*")

WatchRanks = Callable[[Path], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Place:
    """Where a pod stands among those that do one job together. ``master`` is empty until ``master_file`` says it; ``table_file`` is read by ranks, once it is there."""

    ranks: int = 1
    first: int = 0
    world: int = 1
    master: str = "127.0.0.1"
    master_file: Path | None = None
    table_file: Path | None = None

    def __post_init__(self) -> None:
        if not (0 < self.ranks <= self.world and 0 <= self.first <= self.world - self.ranks and self.first % self.ranks == 0):
            raise ValueError(f"RANK {self.first} with LOCAL_WORLD_SIZE {self.ranks} is no place among WORLD_SIZE {self.world}: the operator sets all three")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """What the operator says; without it this pod is alone.

        Raises: ValueError for numbers that do not go together.
        """
        ranks, first, world = (int(environment.get(name) or default) for name, default in (("LOCAL_WORLD_SIZE", 1), ("RANK", 0), ("WORLD_SIZE", 1)))
        told, table = (Path(said) if (said := environment.get(name)) and world > 1 else None for name in (_MASTER_FILE, _TABLE_FILE))
        return cls(ranks, first, world, environment.get("MASTER_ADDR") or ("127.0.0.1" if told is None else ""), told, table)

    def found(self, stopping: Callable[[], bool]) -> Place:
        """Once all pods have an address, with the first rank's; when ``stopping`` says so, without."""
        address = ""
        while self.master_file is not None and not address and not stopping():
            with suppress(OSError):
                address = self.master_file.read_text().strip()
            if not address:
                time.sleep(_LOOK_SECONDS)
        return replace(self, master=self.master or address, master_file=None) if address else self

    @property
    def pod(self) -> int:
        """Number of this pod, from 0."""
        return self.first // self.ranks

    @property
    def leads(self) -> bool:
        """Whether this pod records the outcome."""
        return self.first == 0

    def environment(self, local: int) -> dict[str, str]:
        """What torchrun would tell a rank of this pod."""
        return {
            "MASTER_ADDR": self.master,
            "RANK": str(self.first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.pod),
            # Without it HCCL asks around; told of a file that is not there it would fail.
            **({_TABLE_FILE: str(self.table_file)} if self.table_file is not None and self.table_file.exists() else {}),
        }


class Children:
    """Processes that do one thing together: when one of them fails, all end, those killed that take longer than ``stop_seconds``. What they say goes to this
    process's own output and to the job's log."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path, stop_seconds: float) -> None:
        self._log, self._stop_seconds = log.open("ab"), stop_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[threading.Thread] = []
        for command, own in commands:
            environment = {**{name: value for name, value in os.environ.items() if name not in _OF_THE_POD}, **own}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            assert process.stdout is not None
            self._processes.append(process)
            self._pipes.append(threading.Thread(target=self._copy, args=(process.stdout,), daemon=True))
            self._pipes[-1].start()

    def wait(self, stopping: Callable[[], bool]) -> int:
        """The first status that is not 0, or 0 once all have ended well; when ``stopping`` says so, all are asked to end."""
        try:
            while True:
                statuses = [process.poll() for process in self._processes]
                if failed := [status for status in statuses if status]:
                    return failed[0]
                if all(status == 0 for status in statuses):
                    return 0
                if stopping():
                    self._end()
                    return next((process.returncode for process in self._processes if process.returncode), 0)
                time.sleep(_LOOK_SECONDS)
        finally:
            self._end()
            self._close()

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + self._stop_seconds
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.join(5)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._log.close()

    def _copy(self, stream: IO[bytes]) -> None:
        for line in stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._log.write(line)
            self._log.flush()


def adopted(job_id: str, environment: Mapping[str, str], jobs: FollowedJobs) -> JobRecord:
    """The job's record; one that is made now where the operator says what the job is about.

    Raises: NotFound without either, BadData for parameters that are no job's.
    """
    with suppress(NotFound):
        return jobs.get(job_id)
    told = environment.get(_GANG_JOB)
    if not told:
        return jobs.get(job_id)
    said = json.loads(told)
    try:
        spec = JobSpec.model_validate({"kind": said["kind"], **said["parameters"]})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadData(f"NPUJob {job_id}: parameters.{where}: {first['msg']} (got {str(first['input'])[:80]!r}): give recipe, config, inputs, seed") from error
    if wrong := spec.wrong_inputs():
        raise BadData(f"NPUJob {job_id}: {wrong}")
    return jobs.adopt(job_id, spec)


def run_pod(job_id: str, place: Place, command: Sequence[str], watch: WatchRanks, settings: Settings, store: ArtifactStore, client: Any, queues: Queues) -> int:
    """Do this pod's part; the exit status.

    ``command`` starts a process of ours, verb and job follow; ``watch`` looks after the ranks of this pod.
    """
    jobs = FollowedJobs(client)
    record = jobs.get(job_id)
    if record.state in ENDED:
        return 0 if record.state == "succeeded" else FAILED
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    folder = settings.data_dir.absolute() / "jobs" / job_id
    folder.mkdir(parents=True, exist_ok=True)
    place = place.found(stopped.is_set)
    if place.master_file is not None:
        return AGAIN
    if place.world == 1:
        status = Children([([*command, "job", job_id], {})], folder / "log.txt", settings.job_stop_seconds).wait(stopped.is_set)
    elif place.leads:

        def lead(context: JobContext) -> JobOutcome:
            return _lead(context, jobs, place, command, watch)

        status = run_job(job_id, lead, settings, store, client, queues)
    else:
        with watch(folder):
            status = _ranks(job_id, place, command, folder / f"log-{place.pod}.txt", settings).wait(stopped.is_set)
    if status:
        # Killed by signal 9 is 137, as a shell has it.
        return status if status > 0 else 128 - status
    # The first pod has recorded the end before it ended, and the others' ranks have ended well.
    return FAILED if place.leads and jobs.get(job_id).state != "succeeded" else 0


def _ranks(job_id: str, place: Place, command: Sequence[str], log: Path, settings: Settings) -> Children:
    return Children([([*command, "rank", job_id], place.environment(local)) for local in range(place.ranks)], log, settings.job_stop_seconds)


def _lead(context: JobContext, jobs: FollowedJobs, place: Place, command: Sequence[str], watch: WatchRanks) -> JobOutcome:
    """The first pod's ranks, and the outcome of all.

    Raises: what a rank of any pod has said of its end, JobCancelled, RankLost.
    """
    # Said in an attempt whose first pod was gone before it could tell.
    if said := rank_failure(context.workdir):
        forget_ranks(context.workdir)
        raise said
    forget_ranks(context.workdir)
    jobs.forget_step_seconds(context.id)
    with watch(context.workdir):
        status = _ranks(context.id, place, command, context.workdir / "log.txt", context.settings).wait(lambda: context.stopping)
    if said := rank_failure(context.workdir):
        forget_ranks(context.workdir)
        raise said
    if context.stopping:
        raise JobCancelled(f"job {context.id} was asked to stop")
    if status == AGAIN:
        raise BrokerUnavailable("a rank found the broker away: all pods start again from the last checkpoint")
    if status:
        raise RankLost(f"a rank ended with status {status}: all pods start again from the last checkpoint")
    outcome = rank_outcome(context.workdir)
    for pattern in _RANK_FOLDERS:
        for folder in context.workdir.glob(pattern):
            context.discard(folder)
    logger("jobs").info("all ranks have ended well", job=context.id, ranks=place.world)
    return outcome
