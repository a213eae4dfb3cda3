"""Which nodes were slower than others in gangs of late: from what jobs' statuses say, with a memory that fades."""

from __future__ import annotations

from collections.abc import Iterable

from semantide.operators.pods import seconds_of
from semantide.operators.resources import NPUJob

HALF_LIFE_SECONDS = 3600.0
"""After so long half of a node's slowness is believed, seconds; it may have been repaired, or its neighbour's fault."""


def slow_nodes(jobs: Iterable[NPUJob], now: float) -> dict[str, float]:
    """Step time over the usual one by node, for those that were slow. A gang that still runs there counts whole."""
    result: dict[str, float] = {}
    for job in jobs:
        told = seconds_of(job.status.slow_time)
        if told is None:
            continue
        fades = 0.5 ** (max(0.0, now - told) / HALF_LIFE_SECONDS) if job.status.phase != "Running" else 1.0
        for slow in job.status.slow:
            result[slow.node] = max(result.get(slow.node, 1.0), 1.0 + (slow.ratio - 1.0) * fades)
    return result
