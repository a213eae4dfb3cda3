"""A thread that calls one function again and again until it is told to stop; and how long it waits before it tries again what failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from semantide.shared.errors import Corrupt, NotFound, PermanentError
from semantide.shared.telemetry import logger

_PASSING_SECONDS = 5.0
_MENDED_SECONDS = 15.0  # to look through a large file again takes seconds


def seconds_until_next(error: Exception) -> float | None:
    """When to load again what could not be loaded; None where that changes nothing. Files that are missing or damaged may be brought back."""
    if isinstance(error, (Corrupt, NotFound)):
        return _MENDED_SECONDS
    return None if isinstance(error, PermanentError) else _PASSING_SECONDS


class Poller:
    """Calls ``function`` every ``interval_seconds``; what it raises is logged once per cause and does not end the thread."""

    def __init__(self, name: str, interval_seconds: float, function: Callable[[], object]) -> None:
        self._name, self._interval, self._function = name, interval_seconds, function
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._log = logger("serving")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """End, after the call that is under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        cause = ""
        while not self._stop.wait(self._interval):
            try:
                self._function()
                cause = ""
            except Exception as error:
                if str(error) != cause:
                    cause = str(error)
                    self._log.warning("poll failed, going on with what is known", poller=self._name, error=cause)
