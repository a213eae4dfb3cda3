"""The operator as its own process, which a test may kill."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from .control_plane import Server, free_ports


class OperatorProcess:
    """``python -m semantide.operators`` with some credentials; ``settings`` are its environment without the prefix."""

    def __init__(self, kubeconfig: Path, folder: Path, **settings: str) -> None:
        self._folder, self.started = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        # As the chart says it where no Ascend device plugin is.
        own = {
            "port": str(self.port),
            "lease_seconds": "2",
            "round_seconds": "0.5",
            "node_grace_seconds": "2",
            "backoff_limit_seconds": "2",
            "device_info_namespace": "",
        } | settings
        path = os.pathsep.join(path for path in sys.path if path)
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": path}
        self._environment |= {f"SEMANTIDE_OPERATOR_{name.upper()}": value for name, value in own.items()}
        self.server: Server | None = None

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.stop()

    def start(self) -> None:
        """Start it, with a name of its own: nothing tells it that it was here before."""
        self.started += 1
        environment = {**self._environment, "SEMANTIDE_OPERATOR_IDENTITY": f"{self._folder.name}-{self.started}"}
        self.server = Server("operator", [sys.executable, "-m", "semantide.operators"], self._folder, environment)

    def check(self) -> None:
        """Raises: AssertionError with the end of its log, where it has ended by itself."""
        assert self.server is not None
        self.server.check()

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        assert self.server is not None
        self.server.check()
        self.server.stop(signal.SIGKILL)

    def log(self) -> str:
        """What it has written, of all its lives."""
        assert self.server is not None
        return self.server.log.read_text(errors="replace")
