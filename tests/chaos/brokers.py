"""A broker with two replicas, and three sentinels that put one of these in its place when it does not answer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redis import Redis, RedisError, ResponseError
from redis.sentinel import Sentinel

from semantide.shared.broker import free_port, server_binary

_NAME, _PASSWORD = "semantide", "chaos"
_DOWN_MS = 2000
_PATIENCE_SECONDS = 60.0


@dataclass
class _Server:
    port: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Brokers:
    """Real servers in folders below ``folder``; ``url`` is what a stack is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ports = [free_port() for _ in range(3)]
        self._servers = [self._server(port, ports[0] if number else 0) for number, port in enumerate(ports)]
        self._sentinels = [self._sentinel(free_port(), ports[0]) for _ in range(3)]
        places = [("127.0.0.1", sentinel.port) for sentinel in self._sentinels]
        self.url = f"redis+sentinel://:{_PASSWORD}@" + ",".join(f"{host}:{port}" for host, port in places) + f"/{_NAME}/0"
        self._asked = Sentinel(places, socket_timeout=1.0, sentinel_kwargs={"socket_timeout": 1.0})

    def _write(self, name: str, lines: list[str]) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        path = folder / "server.conf"
        path.write_text("\n".join([*lines, "bind 127.0.0.1", f'dir "{folder}"', f'logfile "{folder / "server.log"}"', ""]))
        return path

    def _server(self, port: int, primary: int) -> _Server:
        lines = [f"port {port}", f"requirepass {_PASSWORD}", f"masterauth {_PASSWORD}", "appendonly yes", "appendfsync always", 'save ""']
        lines += ["maxmemory-policy noeviction", "repl-diskless-sync-delay 0"]
        if primary:
            lines.append(f"replicaof 127.0.0.1 {primary}")
        return _Server(port, [server_binary(), str(self._write(f"server-{port}", lines))])

    def _sentinel(self, port: int, primary: int) -> _Server:
        monitor = [f"sentinel monitor {_NAME} 127.0.0.1 {primary} 2", f"sentinel auth-pass {_NAME} {_PASSWORD}"]
        monitor += [f"sentinel down-after-milliseconds {_NAME} {_DOWN_MS}", f"sentinel failover-timeout {_NAME} 10000"]
        return _Server(port, [server_binary(), str(self._write(f"sentinel-{port}", [f"port {port}", *monitor])), "--sentinel"])

    def start(self) -> None:
        """Start all and wait until the replicas follow and the sentinels know each other."""
        for server in (*self._servers, *self._sentinels):
            server.start()
        self.wait_whole()

    def primary(self) -> int:
        """Port of the server that the sentinels call the primary."""
        return int(self._asked.discover_master(_NAME)[1])

    def _whole(self) -> bool:
        with Redis(port=self.primary(), password=_PASSWORD, socket_timeout=1.0) as client:
            if int(client.info("replication")["connected_slaves"]) < 2:
                return False
        known = [dict(sentinel.sentinel_master(_NAME)) for sentinel in self._asked.sentinels]  # type: ignore[arg-type]
        return min(int(each["num-other-sentinels"]) for each in known) >= 2

    def wait_whole(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Return when both replicas follow the primary."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self._whole():
                    return
            except RedisError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"no primary with two replicas within {seconds:.0f} s: see {self._folder}")
            time.sleep(0.2)

    def fail_over(self) -> None:
        """Ask the sentinels to put a replica in the primary's place, as soon as they know one that is fit for it."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                self._asked.sentinels[0].sentinel_failover(_NAME)
            except ResponseError as error:
                if "NOGOODSLAVE" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def kill_primary(self) -> Callable[[], None]:
        """Kill it with SIGKILL; what starts it again, as somebody's supervisor would."""
        port = self.primary()
        server = next(server for server in self._servers if server.port == port)
        server.kill()
        return server.start

    def remove(self) -> None:
        """End them all."""
        for server in (*self._sentinels, *self._servers):
            server.kill()
