"""A real network of two tiers on one machine: nodes are network namespaces, each behind a link of its own to one switch, and what stays inside a node is faster.

Every link is a veth pair to a bridge in a namespace of its own, held to its rate in both directions by a token bucket (``tc tbf``); a node's loopback has another one. Needs
root, ``ip`` and ``tc``. Everything is gone when the block ends, since deleting a namespace deletes its links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

BURST_BYTES = 256 * 1024  # above the largest packet that an offloading sender hands down


class TwoTierNetwork:
    """``nodes`` namespaces; rates in bits per second, of each node's link and of each node's inside."""

    def __init__(self, nodes: int, link_rate: int, inside_rate: int) -> None:
        self.nodes, self.link_rate, self.inside_rate = nodes, link_rate, inside_rate
        self._prefix = f"semantide{os.getpid()}"
        self._made: list[str] = []

    @staticmethod
    def missing() -> str:
        """What keeps this machine from having such a network; empty where nothing does."""
        if os.geteuid() != 0:
            return "not root"
        return "".join(f"no {tool} " for tool in ("ip", "tc") if shutil.which(tool) is None).strip()

    def address(self, node: int) -> str:
        """A node's address on the switch."""
        return f"10.88.{node // 250}.{node % 250 + 1}"

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on a node."""
        return subprocess.Popen(["ip", "netns", "exec", self._name(node), *command], env=dict(environment), **options)

    def __enter__(self) -> TwoTierNetwork:
        try:
            switch = self._namespace("switch")
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for node in range(self.nodes):
                name, port = self._namespace(str(node)), f"port{node}"
                _run("ip", "-n", name, "link", "add", "uplink", "type", "veth", "peer", "name", port, "netns", switch)
                _run("ip", "-n", name, "address", "add", f"{self.address(node)}/16", "dev", "uplink")
                _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
                for device in ("lo", "uplink"):
                    _run("ip", "-n", name, "link", "set", device, "up")
                for place, device, rate in ((name, "uplink", self.link_rate), (switch, port, self.link_rate), (name, "lo", self.inside_rate)):
                    _run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate}bit", "burst", str(BURST_BYTES), "latency", "400ms")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _namespace(self, suffix: str) -> str:
        name = f"{self._prefix}-{suffix}"
        _run("ip", "netns", "add", name)
        self._made.append(name)
        return name

    def _remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        self._made.clear()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
