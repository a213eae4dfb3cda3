"""What retention has removed so far, and when it looked last, as the broker keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "semantide:retention"
_JOB, _LOOKED, _BYTES = "job", "looked", "bytes"


class RetentionAccount:
    """The account of one stack."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def add(self, job_id: str, counts: Mapping[str, int], num_bytes: int, now: float) -> None:
        """Enter what a job has removed, once however often it is started again. ``now`` is seconds since 1970."""

        def apply(pipe: Any) -> None:
            last = pipe.hget(_KEY, _JOB)
            pipe.multi()
            if last is None or last.decode() != job_id:
                for what, count in counts.items():
                    pipe.hincrby(_KEY, f"removed/{what}", count)
                pipe.hincrby(_KEY, _BYTES, num_bytes)
            pipe.hset(_KEY, mapping={_JOB: job_id, _LOOKED: repr(now)})

        self._broker.transaction(apply, _KEY)

    def looked(self, now: float) -> float:
        """When retention looked last; of a stack that it has not looked at yet, when it was asked for the first time. Seconds since 1970."""
        self._broker.hsetnx(_KEY, _LOOKED, repr(now))
        return float(self._broker.hget(_KEY, _LOOKED))

    def read(self) -> tuple[dict[str, int], int, float | None]:
        """How many were removed of what, their bytes, and when it looked last."""
        found = {name.decode(): value for name, value in self._broker.hgetall(_KEY).items()}
        counts = {name.removeprefix("removed/"): int(value) for name, value in found.items() if name.startswith("removed/")}
        return counts, int(found.get(_BYTES, 0)), float(found[_LOOKED]) if _LOOKED in found else None
