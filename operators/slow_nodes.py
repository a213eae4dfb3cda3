"""Which nodes were slower than others in gangs of late: from what jobs' statuses say, with a memory that fades."""

from __future__ import annotations

from collections.abc import Iterable

from semantide.operators.pods import seconds_of
from semantide.operators.resources import NPUJob

HALF_LIFE_SECONDS = 3600.0
"""After so long half of a node's slowness is believed, seconds; it may have been repaired, or its neighbour's fault."""


def faded(ratio: float, told: str | None, now: float) -> float:
    """What is still believed of a ratio that was told at ``told``."""
    age = max(0.0, now - (seconds_of(told) or now))
    return float(1.0 + (ratio - 1.0) * 0.5 ** (age / HALF_LIFE_SECONDS))


def slow_nodes(jobs: Iterable[NPUJob], now: float) -> dict[str, float]:
    """Step time over the usual one by node, for those that were slow. On nodes where the gang still runs it counts whole."""
    result: dict[str, float] = {}
    for job in jobs:
        status = job.status
        if status.slow_time is None:
            continue
        here = {place.node for place in status.placement} if status.phase == "Running" else set()
        for slow in status.slow:
            ratio = slow.ratio if slow.node in here else faded(slow.ratio, status.slow_time, now)
            result[slow.node] = max(result.get(slow.node, 1.0), ratio)
    return result
