"""Signs of life: a rank that hangs is found, named with the place where it hangs, and ended, so that all ranks start again.

    beats/0    one file per rank, touched at every step; its process id is in it
    stack-0    where the rank's threads were when it was asked (SIGUSR1), written without the interpreter's help

Ranks that wait for a hanging one give no signs either: whose main thread waits in a collective is not to blame.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import IO

_LOOKS = 10
"""How often within the limit the watch looks."""
_ANSWER_SECONDS = 1.0
"""How long a rank may take to write where it is."""
# Where a rank is that waits for others.
_WAITING = ("training/world.py", "torch/distributed/")


def beats_folder(workdir: Path, host: int) -> Path:
    """Where the ranks of one host have their beats, which those of another cannot look after."""
    return workdir / ("beats" if host == 0 else f"beats-{host}")


class Heartbeat:
    """One rank's signs of life; close it."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / str(rank)
        self._stack: IO[str] = (folder / f"stack-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, self._stack, all_threads=True)
        # Last: from here on the rank is watched.
        aside = folder / f".incoming-{rank}"
        aside.write_text(str(os.getpid()))
        aside.replace(self._path)

    def beat(self) -> None:
        """This rank is alive and gets on."""
        os.utime(self._path)

    def close(self) -> None:
        """This rank is watched no more."""
        self._path.unlink(missing_ok=True)
        faulthandler.unregister(signal.SIGUSR1)
        self._stack.close()


@dataclass
class Watch:
    """Looks after the ranks whose beats are in ``folder``; as a context it does so on a thread of its own.

    ``said`` is what it found of the ranks that it ended.
    """

    folder: Path
    limit_seconds: float
    clock: Callable[[], float]
    kill: Callable[[int, int], None] = os.kill
    said: str = ""
    _ending: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def __post_init__(self) -> None:
        if self.limit_seconds <= 0:
            raise ValueError(f"limit_seconds is {self.limit_seconds}: give a number above 0")

    def __enter__(self) -> Watch:
        self.said = ""
        for path in self.folder.glob("*"):
            path.unlink()
        self._ending.clear()
        self._thread = Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self.limit_seconds / _LOOKS):
            self.look()

    def look(self) -> None:
        """End the ranks that hang, if any rank has been silent for too long."""
        processes: dict[int, int] = {}
        silent: dict[int, float] = {}
        for path in sorted(self.folder.glob("[0-9]*")):
            with suppress(OSError, ValueError):  # it has just ended
                processes[int(path.name)] = int(path.read_text())
                silent[int(path.name)] = self.clock() - path.stat().st_mtime
        if not silent or max(silent.values()) <= self.limit_seconds:
            return
        for process in processes.values():
            with suppress(ProcessLookupError):
                self.kill(process, signal.SIGUSR1)
        self._ending.wait(_ANSWER_SECONDS)
        places = {rank: self._place(rank) for rank in processes}
        hanging = [rank for rank, place in places.items() if not any(known in place for known in _WAITING)]
        for rank in hanging or [max(silent, key=lambda rank: silent[rank])]:
            self.said = f"rank {rank} has given no sign of life for {silent.get(rank, 0):.0f} seconds and was ended; it was at {places[rank]}"
            with suppress(ProcessLookupError):
                self.kill(processes[rank], signal.SIGKILL)

    def _place(self, rank: int) -> str:
        """Where a rank's main thread is: its topmost frame, or that of the collective it waits in."""
        with suppress(OSError):
            # Threads come one after another, the main one last; frames from the innermost outwards.
            main = (self.folder / f"stack-{rank}").read_text().rsplit("hread 0x", 1)[-1]
            frames = [line.strip().removeprefix("File ") for line in main.splitlines() if line.strip().startswith("File ")]
            if frames:
                return next((frame for frame in frames if any(known in frame for known in _WAITING)), frames[0])
        return "a place that it could not tell, stopped or in the kernel"
