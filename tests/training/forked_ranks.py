"""One process that has loaded what ranks need, and forks them for the cases of ``fault_run`` and ``world_run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("fault_run.py")


def environment() -> dict[str, str]:
    """What a script of ranks needs to find the package, on one thread."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


class Ranks:
    """Runs cases by name and number of ranks; gives the ranks' exit statuses, and what they complained of in a file."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __call__(self, case: str, size: int, folder: Path, argument: str = "") -> list[int]:
        folder.mkdir(exist_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{case} {size} {folder} {argument}\n")
        self._process.stdin.flush()
        return [int(status) for status in self._process.stdout.readline().split()]

    def close(self) -> None:
        self._process.terminate()  # between two cases it has nothing to end
        self._process.communicate()
        self._errors.close()
