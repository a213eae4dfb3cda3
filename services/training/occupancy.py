"""What the time of a run went into: computing, waiting for a stage that was not done in time, or neither.

A wait of the computing thread is laid to the stage that was at work on the awaited batch then (for the fence: to the update), so that the shares say
which stage to make faster. Waits for other ranks' gradients count as exposed communication of the dense part.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

STAGES = ("load", "route", "fetch", "copy", "dense", "update")
SPARSE = ("route", "fetch", "update")


class Occupancy:
    """Seconds since the last report; threads add to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._busy = dict.fromkeys(STAGES, 0.0)
        self._exposed = dict.fromkeys(STAGES, 0.0)
        self._collided, self._asked = 0, 0

    def worked(self, stage: str, seconds: float, *, exposed: bool = False) -> None:
        """A stage worked that long; ``exposed`` when nothing was computed meanwhile."""
        with self._lock:
            self._busy[stage] += seconds
            if exposed:
                self._exposed[stage] += seconds

    def waited(self, begin: float, end: float, spans: Mapping[str, tuple[float, float]]) -> None:
        """The computing thread waited from ``begin`` to ``end`` for a batch on which the stages worked at ``spans``."""
        with self._lock:
            for stage, (first, last) in spans.items():
                self._exposed["update" if stage == "fence" else stage] += max(0.0, min(last, end) - max(first, begin))

    def exchanged(self, seconds: float) -> None:
        """The computing thread spent that long on other ranks' gradients."""
        with self._lock:
            self._exposed["dense"] += seconds

    def collided(self, rows: int, asked: int) -> None:
        """Of the rows asked for, that many are changed by the batches just before as well."""
        with self._lock:
            self._collided, self._asked = self._collided + rows, self._asked + asked

    def report(self, seconds: float) -> dict[str, float]:
        """Shares of the ``seconds`` since the last report.

        ``compute_share`` + ``exposed_load`` + ``exposed_sparse`` + ``exposed_copy`` + ``exposed_dense`` + ``idle_share`` = 1; ``busy_*`` overlap.
        """
        with self._lock:
            whole = max(seconds, 1e-9)
            exposed = {stage: spent / whole for stage, spent in self._exposed.items()}
            values = {
                "compute_share": max(0.0, self._busy["dense"] / whole - exposed["dense"]),
                "exposed_load": exposed["load"],
                "exposed_sparse": sum(exposed[stage] for stage in SPARSE),
                "exposed_copy": exposed["copy"],
                "exposed_dense": exposed["dense"],
            }
            values["idle_share"] = max(0.0, 1 - sum(values.values()))
            values |= {f"busy_{stage}": spent / whole for stage, spent in self._busy.items() if spent}
            if self._asked:
                values["collision_rate"] = self._collided / self._asked
            self._clear()
        return values
