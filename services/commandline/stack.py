"""``semantide up``: every process of a laptop's stack, watched, and ended together.

Children hold a pipe from this process (``--with-parent``) or, the broker, the kernel's parent-death signal: whatever way this
process ends, none of them outlives it. A child that dies is started again with growing pauses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from semantide.shared import broker
from semantide.shared.api_keys import api_keys
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS
from semantide.shared.errors import Conflict
from semantide.shared.listening import bound_socket, listening_address

_STABLE_SECONDS = 30.0
_READY_SECONDS = 300.0  # a machine that has much else to do takes minutes to begin; who ends meanwhile is noticed at once
_END_SECONDS = 30.0
_LOG_BYTES = 64 * 1024 * 1024  # of a log that a new start puts aside, in the place of the one before


def state_file(data_dir: Path) -> Path:
    """Where a running stack says how to reach it."""
    return data_dir / "stack.json"


def running_stack(data_dir: Path) -> dict[str, Any] | None:
    """What the stack in this folder wrote, if it runs.

    A stack holds a lock as long as it lives, however it ends: a process number alone may long be somebody else's.
    """
    try:
        handle = os.open(_lock_file(data_dir), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pass
    finally:
        os.close(handle)
    try:
        state: dict[str, Any] = json.loads(state_file(data_dir).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return state if isinstance(state.get("pid"), int) else None


def _lock_file(data_dir: Path) -> Path:
    return data_dir / "stack.lock"


def _lock(data_dir: Path) -> int | None:
    """Hold this folder's lock until this process ends; None where another stack has it."""
    handle = os.open(_lock_file(data_dir), os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(20):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            # Somebody may just be looking, which takes a moment.
            time.sleep(0.05)
    os.close(handle)
    return None


def check_port(host: str, port: int) -> None:
    """Make sure that nobody listens there.

    Raises: Conflict, ValueError for an address this machine does not have.
    """
    try:
        bound_socket(host, port).close()
    except PermissionError:
        raise Conflict(f"port {port} may not be used by this account: choose one above 1023 with --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"port {port} on {host} is taken: stop what listens there, or choose another with --port (or SEMANTIDE_PORT)") from None
        raise ValueError(f"cannot listen on {host}:{port} ({error}): give an address of this machine with --host") from None


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass
class Child:
    """One process of the stack."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    next_start: float = 0.0
    own_environment: dict[str, str] = field(default_factory=dict)
    sink: IO[bytes] | None = field(default=None, repr=False)

    def start(self, environment: dict[str, str]) -> None:
        """Start it, with its own variables on top of the stack's; its output is appended to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        self.sink = self.log.open("ab")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=self.sink, stderr=self.sink, env={**environment, **self.own_environment}, start_new_session=True
        )
        self.started = time.monotonic()

    def close(self) -> None:
        """Close what this process holds of it."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        if self.sink is not None:
            self.sink.close()


class Stack:
    """Broker, one worker a room, all APIs on one port."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings, self._say = settings, say
        self.folder = settings.data_dir.absolute()
        host = listening_address(settings.host)
        self.url = f"http://{'[' + host + ']' if ':' in host else host}:{settings.port}"
        self._ending = threading.Event()
        self._lock: int | None = None
        self._broker: broker.OwnBroker | None = None
        self.children: list[Child] = []
        self._environment: dict[str, str] = {}
        self._unwritten = False  # what was started again is not noted yet

    def start(self) -> None:
        """Bring everything up; returns when the APIs answer.

        Raises: Conflict, BrokerUnavailable, ValueError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        if self._lock is None:
            other = running_stack(self.folder)
            where = f"pid {other['pid']}, {other['url']}" if other else "it is just starting or ending"
            raise Conflict(f"a stack already runs in {self.folder} ({where}): use it, or stop it with `semantide down`")
        self.keys = api_keys(self.settings)
        check_port(self.settings.host, self.settings.port)
        redis_url = self.settings.redis_url
        if redis_url:
            broker.connect(redis_url).close()
        else:
            self._broker = broker.OwnBroker(self.folder / "broker", before_start=_die_with_parent).start()
            redis_url = self._broker.url
        self._environment = {
            **os.environ,
            "SEMANTIDE_DATA_DIR": str(self.folder),
            "SEMANTIDE_REDIS_URL": redis_url,
            "SEMANTIDE_HOST": self.settings.host,
            "SEMANTIDE_PORT": str(self.settings.port),
            "SEMANTIDE_JOB_SLOTS": str(self.settings.job_slots),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "SEMANTIDE_IMPORT_ROOTS": self.settings.import_roots or str(Path.cwd()),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"),
        }
        entry = [sys.executable, "-m", "semantide.services.local", "--with-parent"]
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
        api = {"OMP_NUM_THREADS": threads, "SEMANTIDE_METRICS_PORT": "0"}
        self.children = [Child("api", [*entry, "api", "all", "console"], self.folder / "logs" / "api.log", own_environment=api)]
        for number, room in enumerate(ROOMS):
            # One machine, so each worker needs a port of its own.
            port = self.settings.metrics_port + number if self.settings.metrics_port else 0
            log = self.folder / "logs" / f"{room}-worker.log"
            self.children.append(Child(f"{room} worker", [*entry, "worker", room], log, own_environment={"SEMANTIDE_METRICS_PORT": str(port)}))
        for child in self.children:
            child.start(self._environment)
        self._write_state(redis_url)
        self._wait_ready()

    def _write_state(self, redis_url: str) -> None:
        processes = {child.name: child.process.pid for child in self.children if child.process}
        if self._broker is not None and self._broker.process is not None:
            processes["broker"] = self._broker.process.pid
        state = {"pid": os.getpid(), "url": self.url, "data_dir": str(self.folder), "redis_url": redis_url, "processes": processes}
        temporary = state_file(self.folder).with_suffix(".incoming")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            json.dump(state, stream)
        temporary.replace(state_file(self.folder))

    def _wait_ready(self) -> None:
        deadline, said = time.monotonic() + _READY_SECONDS, "nothing answers yet"
        while time.monotonic() < deadline and not self._ending.is_set():
            for child in self.children:
                if child.process is not None and (status := child.process.poll()) is not None:
                    tail = child.log.read_bytes()[-1500:].decode(errors="replace")
                    raise Conflict(f"{child.name} ended with status {status} while starting; the end of {child.log}:\n{tail}")
            try:
                answer = httpx.get(f"{self.url}/readyz", timeout=2)
                if answer.status_code == 200:
                    return
                said = answer.text[:500]
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        if not self._ending.is_set():
            raise Conflict(
                f"the APIs did not become ready within {_READY_SECONDS:.0f} s ({said}): {self.folder}/logs say what they wait for; everything was stopped, start it again"
            )

    def places(self) -> list[tuple[str, str, str]]:
        """(what, where, log) of every process."""
        rows = []
        if self._broker is not None and self._broker.process is not None:
            rows.append(("broker", f"127.0.0.1:{self._broker.port} (pid {self._broker.process.pid})", str(self._broker.folder / "server.log")))
        else:
            rows.append(("broker", broker.without_password(self.settings.redis_url), "its own"))
        for child in self.children:
            where = self.url if child.name == "api" else "queues of its room"
            if (port := child.own_environment["SEMANTIDE_METRICS_PORT"]) != "0":
                where += f", http://127.0.0.1:{port}/metrics"
            rows.append((child.name, f"{where} (pid {child.process.pid if child.process else '-'})", str(child.log)))
        return rows

    def watch(self) -> None:
        """Restart what dies, until ``end`` is called."""
        cause = ""
        while not self._ending.wait(0.5):
            try:
                self._revive_broker()
                for child in self.children:
                    self._revive(child)
                if self._unwritten:
                    self._write_state(self._environment["SEMANTIDE_REDIS_URL"])
                    self._unwritten = False
                cause = ""
            except OSError as error:
                # A full disk keeps us from noting what was started: no reason to end what goes on.
                if str(error) != cause:
                    cause = str(error)
                    self._tell(f"{error}; trying again")

    def _tell(self, text: str) -> None:
        with suppress(OSError):  # where our words go there may be no room either
            self._say(text)

    def _revive_broker(self) -> None:
        if self._broker is None or self._broker.process is None or self._broker.process.poll() is None:
            return
        self._tell("the broker ended; starting it again")
        try:
            self._broker.start()
            self._unwritten = True
        except Exception as error:
            self._tell(f"the broker did not start: {error}")
            self._ending.wait(2)

    def _revive(self, child: Child) -> None:
        now = time.monotonic()
        if child.process is not None:
            status = child.process.poll()
            if status is None or self._ending.is_set():
                return
            child.close()
            child.process = None
            child.failures = 0 if now - child.started > _STABLE_SECONDS else child.failures + 1
            child.next_start = now + min(30.0, 0.5 * 2**child.failures) if child.failures else now
            self._tell(f"{child.name} ended with status {status}; starting it again (log: {child.log})")
        if now >= child.next_start and not self._ending.is_set():
            child.start(self._environment)
            self._unwritten = True

    def end(self) -> None:
        """Stop watching; safe in a signal handler."""
        self._ending.set()

    def stop(self) -> None:
        """End every process: APIs first, then workers, then the broker."""
        self._ending.set()
        for group in (self.children[:1], self.children[1:]):
            for child in group:
                if child.process is not None and child.process.poll() is None:
                    child.process.terminate()
            deadline = time.monotonic() + _END_SECONDS
            for child in group:
                if child.process is None:
                    continue
                try:
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()
                child.close()
        if self._broker is not None:
            self._broker.stop()
        # Only who holds the lock may take the note away: it may be that of another stack.
        if self._lock is not None:
            state_file(self.folder).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def stop_running(data_dir: Path) -> bool:
    """Ask the stack in this folder to end and wait; False when none runs."""
    state = running_stack(data_dir)
    if state is None:
        return False
    os.kill(int(state["pid"]), signal.SIGTERM)
    deadline = time.monotonic() + 2 * _END_SECONDS + 10
    while time.monotonic() < deadline:
        if running_stack(data_dir) is None:
            return True
        time.sleep(0.1)
    raise Conflict(f"the stack with pid {state['pid']} did not end: look at {data_dir}/logs, then kill it")
