"""What a serving replica's metrics page says of its load.

Counters grow for ever, so a load is the difference of two looks at the same process; after a restart, when they are smaller than before, the second look alone counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from semantide.operators.balancing import ReplicaLoad

_QUEUE = "semantide_serving_queue"
_WORKERS = "semantide_serving_workers"
_BUSY = "semantide_serving_busy_seconds_total"
_STAGE = "semantide_serving_stage_seconds_bucket"
_PATIENCE_SECONDS = 4.0  # for a whole page
_PAGE_BYTES = 8 << 20


@dataclass(frozen=True)
class Look:
    """One reading of a page. ``answered`` counts answers by the upper bound of their time, cumulated; ``at`` is in seconds of any clock."""

    at: float
    queue_depth: float = 0.0
    workers: float = 0.0
    busy_seconds: float = 0.0
    answered: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, page: str, at: float) -> Look:
        """What a page in Prometheus' text format says.

        Raises: ValueError for another format.
        """
        queue, workers, busy, answered = 0.0, 0.0, 0.0, {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise ValueError(f"{sample.name} is {sample.value}: a finite number was expected")
                if sample.name == _QUEUE:
                    queue += sample.value
                elif sample.name == _WORKERS:
                    workers += sample.value
                elif sample.name == _BUSY:
                    busy += sample.value
                elif sample.name == _STAGE and sample.labels.get("stage") == "total":
                    answered[float(sample.labels["le"])] = sample.value
        return cls(at, queue, workers, busy, answered)


def load_between(pod: str, before: Look | None, now: Look) -> ReplicaLoad:
    """The load between two looks at one replica; without a first one its queue alone is known."""
    if before is None:
        return ReplicaLoad(pod, now.queue_depth)
    restarted = now.busy_seconds < before.busy_seconds or any(now.answered.get(bound, 0.0) < count for bound, count in before.answered.items())
    since = Look(now.at) if restarted else before
    counts = {bound: count - since.answered.get(bound, 0.0) for bound, count in now.answered.items()}
    seconds = now.at - before.at
    busy = (now.busy_seconds - since.busy_seconds) / (seconds * now.workers) if seconds > 0 and now.workers else None
    return ReplicaLoad(pod, now.queue_depth, 1000 * quantile(counts, 0.99), None if busy is None else min(1.0, busy))


def quantile(counts: Mapping[float, float], share: float) -> float:
    """The value that ``share`` of all observations stay below, from counts cumulated by upper bound; 0 without observations.

    Within a bucket observations are taken to lie evenly; above the last finite bound that bound is all that is known.
    """
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return 0.0
    wanted, lower, below = share * total, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / max(counts[bound] - below, 1e-12)
        lower, below = bound, counts[bound]
    return lower


class LoadReader:
    """What a service's replicas say of their load, against the last look at each."""

    def __init__(self, key: str, clock: Callable[[], float], client: httpx.Client) -> None:
        self._clock, self._http = clock, client
        self._headers = {"X-API-Key": key} if key else {}
        self._last: dict[str, Look] = {}
        self.unheard: dict[str, str] = {}
        """Why the last look at a pod brought nothing: the HTTP status of its answer, or what happened instead."""

    def ask(self, address: str) -> Look | str:
        """A replica's page at its base address, as in http://10.1.2.3:8000, or why there is none; any thread may ask."""
        try:
            return Look.parse(self._page(f"{address}/metrics"), self._clock())
        except httpx.HTTPStatusError as error:
            return str(error.response.status_code)
        except (httpx.HTTPError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _page(self, address: str) -> str:
        began, page = self._clock(), bytearray()
        with self._http.stream("GET", address, headers=self._headers) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                page += part
                if len(page) > _PAGE_BYTES or self._clock() - began > _PATIENCE_SECONDS:
                    raise ValueError(f"the page is longer than {_PAGE_BYTES} bytes, or takes longer than {_PATIENCE_SECONDS:.0f} seconds")
        return page.decode(errors="replace")

    def loads(self, answers: Mapping[str, Look | str]) -> list[ReplicaLoad]:
        """The loads of the replicas that answered, by their pods; who did not has no load, and balance() shrinks nothing then."""
        looks = {pod: look for pod, look in answers.items() if isinstance(look, Look)}
        self.unheard = {pod: look for pod, look in answers.items() if isinstance(look, str)}
        loads = [load_between(pod, self._last.get(pod), look) for pod, look in looks.items()]
        self._last = {pod: look for pod, look in {**self._last, **looks}.items() if pod in answers}
        return loads
