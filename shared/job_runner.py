"""Runs a room's jobs as child processes of its worker.

One thread looks twice a second: starts open jobs that nobody holds, renews leases, passes cancellation on, and records crashes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from semantide.shared import broker as broker_door
from semantide.shared.contracts import ENDED, JobRecord, JobState
from semantide.shared.job_ending import end_job
from semantide.shared.jobs import AGAIN, Jobs, end_of_file, now_ms, open_jobs_key
from semantide.shared.room import Room
from semantide.shared.telemetry import logger

LEASE_SECONDS = 10
_LOOK_SECONDS = 0.5
_LOG_TAIL_BYTES = 2000
# Redis: renew or release a lease only while it is still ours.
_RENEW = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('expire',KEYS[1],ARGV[2]) else return 0 end"
_RELEASE = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end"


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    asked_to_stop: float | None = None


class JobRunner:
    """Holds up to ``slots`` jobs of one room."""

    def __init__(self, room: Room, command: list[str] | None = None) -> None:
        self._room, self._jobs = room, Jobs(room.broker)
        self._stop_seconds = room.settings.job_stop_seconds
        self._command = command or [sys.executable, "-m", "semantide.services.local", "job"]
        self._name = f"{room.name}-{uuid.uuid4().hex[:8]}"
        self._children: dict[str, _Child] = {}
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="job-runner", daemon=True)
        self._log = logger("jobs")

    def start(self) -> None:
        """Begin to look for jobs."""
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """Stop all children; what did not end goes on at the next start."""
        self._ending.set()
        self._wake.set()
        self._thread.join(self._stop_seconds + 10)

    def _watch(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            try:
                self._tend()
                if not self._ending.is_set():
                    self._take()
            except broker_door.RedisError as error:
                self._log.warning("the broker is away; running jobs go on", error=str(error))
                self._ending.wait(1.0)
            except Exception:
                self._log.exception("the job runner stumbled and goes on")
                self._ending.wait(1.0)
        self._stop_children()

    def _lease(self, job_id: str) -> str:
        return f"{Jobs.key(job_id)}:lease"

    def _tend(self) -> None:
        for job_id, child in list(self._children.items()):
            if child.process.poll() is not None:
                self._reap(job_id, child)
                continue
            self._room.broker.eval(_RENEW, 1, self._lease(job_id), self._name, LEASE_SECONDS)
            if self._jobs.get(job_id).cancel_requested:
                self._ask_to_stop(child)

    def _ask_to_stop(self, child: _Child) -> None:
        if child.asked_to_stop is None:
            child.asked_to_stop = time.monotonic()
            child.process.terminate()
        elif time.monotonic() - child.asked_to_stop > self._stop_seconds:
            child.process.kill()

    def _reap(self, job_id: str, child: _Child) -> None:
        child.log.close()
        if child.process.stdin is not None:
            child.process.stdin.close()
        record = self._jobs.get(job_id)
        if record.state not in ENDED:
            status = child.process.returncode
            if record.cancel_requested:
                self._end(record, "cancelled", "cancelled; its process had to be killed")
            elif status != AGAIN and record.attempt >= self._room.settings.job_attempts:
                how = f"was killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
                self._end(record, "failed", f"its process {how} in each of {record.attempt} attempts; the end of its log: {self._tail(record)}")
            else:
                if status == AGAIN:
                    self._jobs.write(job_id, attempt=max(0, record.attempt - 1))
                self._log.warning("job's process ended early, it will be started again", job=job_id, status=status, attempt=record.attempt)
        del self._children[job_id]
        self._room.broker.eval(_RELEASE, 1, self._lease(job_id), self._name)

    def _end(self, record: JobRecord, state: JobState, error: str) -> None:
        end_job(self._jobs, record, self._room.store, self._folder(record.id), state, error=error)

    def _folder(self, job_id: str) -> Path:
        return self._room.settings.data_dir.absolute() / "jobs" / job_id

    def _tail(self, record: JobRecord) -> str:
        return end_of_file(self._folder(record.id) / "log.txt", _LOG_TAIL_BYTES).strip() or "(empty)"

    def _take(self) -> None:
        if len(self._children) >= self._room.settings.job_slots:
            return
        waiting = self._jobs.readable(raw.decode() for raw in self._room.broker.smembers(open_jobs_key(self._room.name)))
        for record in sorted(waiting, key=lambda r: (r.created, r.id)):
            if record.id in self._children or len(self._children) >= self._room.settings.job_slots:
                continue
            if not self._room.broker.set(self._lease(record.id), self._name, nx=True, ex=LEASE_SECONDS):
                continue
            record = self._jobs.get(record.id)
            if record.state in ENDED:
                self._room.broker.srem(open_jobs_key(self._room.name), record.id)
                continue
            self._launch(record)

    def _launch(self, record: JobRecord) -> None:
        folder = self._folder(record.id)
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log.txt").open("ab")
        started = {} if record.started else {"started": now_ms()}
        self._jobs.write(record.id, state="running", attempt=record.attempt + 1, **started)
        # Somebody may have cancelled it meanwhile, and closed it: it is open again until its process has seen that.
        self._room.broker.sadd(open_jobs_key(self._room.name), record.id)
        # Jobs side by side share the cores.
        threads = str(max(1, (os.cpu_count() or 1) // self._room.settings.job_slots))
        environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        process = subprocess.Popen([*self._command, record.id], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        self._children[record.id] = _Child(process, log)
        self._log.info("job started", job=record.id, kind=record.spec.kind, attempt=record.attempt + 1, pid=process.pid)

    def _stop_children(self) -> None:
        for child in self._children.values():
            self._ask_to_stop(child)
        deadline = time.monotonic() + self._stop_seconds
        for job_id, child in list(self._children.items()):
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            try:
                # A planned stop is no crash: give the attempt back.
                record = self._jobs.get(job_id)
                if record.state not in ENDED:
                    self._jobs.write(job_id, state="queued", attempt=max(0, record.attempt - 1))
                self._room.broker.eval(_RELEASE, 1, self._lease(job_id), self._name)
            except broker_door.RedisError as error:
                self._log.warning("the broker is away; the job's lease will run out", job=job_id, error=str(error))
            child.log.close()
            self._children.pop(job_id)
