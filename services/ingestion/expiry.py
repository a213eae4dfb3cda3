"""Events that the log keeps no longer: those that happened too long ago, and the oldest where it has grown too large.

Segments whose events are all too old go whole. One with some of them is written anew when its oldest event is a tenth of that time over: so every segment is written
again at most ten times in the time that events are kept, and no event stays longer than eleven tenths of it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semantide.services.ingestion.eventlog import EventLog
from semantide.shared.errors import Corrupt
from semantide.shared.telemetry import logger

_DAY_MS = 86_400_000
_SLACK = 10
_MOST_ROWS = 1_000_000  # rows a step: accepted batches wait for it


class Expiry:
    """What one log keeps: events of the last ``days``, and ``num_bytes`` at most; 0 is no bound."""

    def __init__(self, log: EventLog, days: float, num_bytes: int) -> None:
        self._log, self._kept_ms, self._num_bytes = log, int(days * _DAY_MS), num_bytes

    def step(self, now_ms: int) -> int:
        """Remove what is due, as much as one step may; how many events. Imports that have not ended keep what is theirs, and the newest segment stays whatever its size."""
        if not (self._kept_ms or self._num_bytes):
            return 0
        oldest = now_ms - self._kept_ms if self._kept_ms else -(1 << 62)
        segments = sorted(self._log.segments(""), key=lambda segment: (segment.last_time, segment.path.name))
        too_large = sum(segment.num_bytes for segment in segments) - self._num_bytes if self._num_bytes else 0
        gone, looked_at = 0, 0
        for segment in segments:
            whole = segment.last_time < oldest or (too_large > 0 and segment is not segments[-1])
            if whole:
                too_large -= segment.num_bytes
            elif segment.first_time >= oldest - self._kept_ms // _SLACK:
                continue
            try:
                gone += self._log.cut(segment, _all if whole else partial(_before, oldest), retired=now_ms)
            except Corrupt as error:
                logger("ingestion").error("a segment is damaged and is kept beyond its time", error=str(error))
                continue
            looked_at += segment.num_rows
            if looked_at >= _MOST_ROWS:
                break
        return gone


def _all(table: pa.Table) -> npt.NDArray[np.bool_]:
    return np.ones(table.num_rows, dtype=np.bool_)


def _before(oldest: int, table: pa.Table) -> npt.NDArray[np.bool_]:
    return np.asarray(table["time"].to_numpy() < oldest)
