"""A serving API in a process of its own, as a deployment starts it, and what can be read of it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from semantide.shared.broker import free_port

KEY = "benchmark-key"
PRODUCT = ["-m", "semantide.services.local", "api", "serving"]


class ServingProcess:
    """One process. Use as a context manager: it is ready inside."""

    def __init__(self, folder: Path, redis_url: str, *, command: list[str] = PRODUCT, threads: int = 1, settings: dict[str, Any] | None = None) -> None:
        self._command = [sys.executable, *command]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        own = {
            "SEMANTIDE_REDIS_URL": redis_url,
            "SEMANTIDE_DATA_DIR": str(folder / "data"),
            "SEMANTIDE_PORT": str(port),
            "SEMANTIDE_API_KEYS": KEY,
            "SEMANTIDE_LOG_LEVEL": "WARNING",
            "SEMANTIDE_HISTORY_LENGTH": "1000",
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            **{f"SEMANTIDE_{name.upper()}": str(value) for name, value in (settings or {}).items()},
        }
        self._environment = os.environ | own
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServingProcess:
        self.process = subprocess.Popen(self._command, env=self._environment)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"the serving process ended with status {self.process.returncode}")
            try:
                if self.get("/readyz")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        self.__exit__()
        raise SystemExit("the serving process did not become ready within 120 s")

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        request = urllib.request.Request(self.url + path, headers={"X-API-Key": KEY})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self, prefix: str = "semantide_") -> dict[str, float]:
        """The samples on ``/metrics``: name with its labels to value, without buckets."""
        _, page = self.get("/metrics")
        found = {}
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                if sample.name.startswith(prefix) and not sample.name.endswith("_bucket"):
                    labels = {name: value for name, value in sample.labels.items() if not name.startswith("otel_")}
                    found[sample.name + (json.dumps(labels, sort_keys=True) if labels else "")] = sample.value
        return found

    def stage_seconds(self) -> dict[str, float]:
        """Seconds spent in each stage so far."""
        prefix = "semantide_serving_stage_seconds_sum"
        return {json.loads(name[len(prefix) :])["stage"]: value for name, value in self.metrics(prefix).items() if name != prefix}

    def cpu_seconds(self) -> float:
        """Processor time of the process so far: unlike the clock's, it hardly depends on what else the machine does."""
        assert self.process is not None
        threads = Path(f"/proc/{self.process.pid}/task")
        try:
            return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads.iterdir()) / 1e9
        except OSError:  # no Linux, or a thread that just ended: the coarse figure
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """Resident memory of the process and its children."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (parent, *parent.children(recursive=True)))
