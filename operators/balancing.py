"""How many replicas a service should have, and which of them should go elsewhere, from measured load. Pure.

    grow     at once when queues or answers are above the target, by as much as they are above it in the replicas that work already
    shrink   by one, after a long calm, when the rest would still be well below the target
    move     one replica that lags behind the others, while the service as a whole is within its target

The thresholds of growing and shrinking lie apart and every change is followed by a pause, so that a load near a threshold changes nothing to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from semantide.operators.resources import NPUServiceSpec, ServiceLoad


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica measured since the last look.

    Units: ``queue_depth`` waiting requests; ``p99_milliseconds`` 0 where nothing was answered; ``busy`` share of its workers' time, None where unknown.
    """

    pod: str
    queue_depth: float
    p99_milliseconds: float = 0.0
    busy: float | None = None


@dataclass(frozen=True)
class Hysteresis:
    """When a load counts as too much or too little, in shares of the target, and how long nothing is changed after a change."""

    grow_above: float = 1.1
    shrink_below: float = 0.6
    most_growth: float = 2.0
    most_busy: float = 0.7
    lagging: float = 2.0
    pause_seconds: float = 30.0
    calm_seconds: float = 300.0


@dataclass(frozen=True)
class Balance:
    """What should be: a number of replicas, and a pod whose replica should run elsewhere. ``reason`` says why, in plain words; empty: all stays."""

    replicas: int
    move: str | None = None
    reason: str = ""


def service_load(loads: Sequence[ReplicaLoad]) -> ServiceLoad:
    """The load of a service: mean queue, the worst replica's 99th percentile, and the fullest queue over the mean one."""
    if not loads:
        return ServiceLoad()
    mean = sum(load.queue_depth for load in loads) / len(loads)
    fullest = max(load.queue_depth for load in loads)
    return ServiceLoad(
        queue_depth=mean,
        p99_milliseconds=max(load.p99_milliseconds for load in loads),
        imbalance=fullest / mean if mean else 1.0,
    )


def balance(
    spec: NPUServiceSpec,
    current: int,
    loads: Sequence[ReplicaLoad],
    seconds_since_change: float = math.inf,
    hysteresis: Hysteresis | None = None,
    seconds_settled: float = math.inf,
) -> Balance:
    """What should change of a service that has ``current`` replicas, of which those in ``loads`` have said how they fare; all have been ready for ``seconds_settled``."""
    rules = hysteresis or Hysteresis()
    least, most = spec.replicas.min, spec.replicas.max
    if not least <= current <= most:
        wanted = min(max(current, least), most)
        return Balance(wanted, reason=f"{current} replicas are outside replicas {least} to {most}")
    if not loads or not current:
        return Balance(current)
    load, target = service_load(loads), spec.target
    queue = load.queue_depth / target.queue_depth
    late = load.p99_milliseconds / target.p99_milliseconds if target.p99_milliseconds else 0.0
    # Without waiting requests more replicas would make no answer faster, nor would they one that a slow node gives: that replica is to be moved.
    lagging = _lagging(loads, target.queue_depth, rules)
    usual = median([one.p99_milliseconds for one in loads if one.pod != lagging and one.p99_milliseconds] or [0.0])
    slow = usual / target.p99_milliseconds if target.p99_milliseconds and load.queue_depth >= 0.1 * target.queue_depth else 0.0
    pressure = max(queue, slow)
    if pressure > rules.grow_above and current < most and seconds_since_change >= rules.pause_seconds:
        # Those that said nothing may only be loading: what those that work lack is all that is known to be missing.
        wanted = min(most, math.ceil(len(loads) * min(pressure, rules.most_growth)))
        if wanted > current:
            return Balance(wanted, reason=_above(load.queue_depth, usual, spec, queue >= slow))
    # The first answers of a replica, and those given beside one that starts, say little of its node.
    if min(seconds_since_change, seconds_settled) < rules.calm_seconds or len(loads) < current:
        return Balance(current)  # a replica that says nothing may be the one in trouble
    if current > max(least, 1) and late < rules.shrink_below and _rest_is_enough(loads, current, queue, rules):
        return Balance(current - 1, reason=f"queues hold {load.queue_depth:.1f} requests on average, target {target.queue_depth:g}: one replica less will do")
    if lagging is not None:
        return Balance(current, lagging, f"replica {lagging} lags behind the others: it should run on another node")
    return Balance(current)


def _above(queue_depth: float, p99_milliseconds: float, spec: NPUServiceSpec, queues: bool) -> str:
    if queues:
        return f"queues hold {queue_depth:.1f} requests on average, target {spec.target.queue_depth:g}"
    return f"99 of 100 answers take up to {p99_milliseconds:.0f} ms on most replicas, target {spec.target.p99_milliseconds:g} ms, while requests wait"


def _rest_is_enough(loads: Sequence[ReplicaLoad], current: int, queue: float, rules: Hysteresis) -> bool:
    grows = current / (current - 1)
    busy = [load.busy for load in loads if load.busy is not None]
    # Queues stay short until replicas are nearly busy, and then grow at once: where their time is known, it decides too.
    return queue * grows < rules.shrink_below and (not busy or sum(busy) / len(busy) * grows < rules.most_busy)


def _lagging(loads: Sequence[ReplicaLoad], target: float, rules: Hysteresis) -> str | None:
    """The one replica whose queue is over the target and much longer than the others', or whose answers take much longer under alike queues."""
    if len(loads) < 2:
        return None

    def beyond(figure: float, others: list[float], least: float) -> bool:
        return figure > least and figure > rules.lagging * median(others) and figure > max(others) * math.sqrt(rules.lagging)

    longest = max(loads, key=lambda load: load.queue_depth)
    if beyond(longest.queue_depth, [load.queue_depth for load in loads if load is not longest], target):
        return longest.pod
    slowest = max(loads, key=lambda load: load.p99_milliseconds)
    if beyond(slowest.p99_milliseconds, [load.p99_milliseconds for load in loads if load is not slowest], 0.0) and all(load.p99_milliseconds for load in loads):
        return slowest.pod
    return None
