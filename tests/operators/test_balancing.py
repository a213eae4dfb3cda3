"""Replicas follow the load without swinging: pure decisions, and a service that is driven by them."""

import math
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.balancing import Balance, Hysteresis, ReplicaLoad, balance, service_load
from semantide.operators.resources import LoadTarget, NPUServiceSpec, Replicas
from semantide.operators.service_load import LoadReader, Look, load_between, quantile

PAGE = """# TYPE semantide_serving_queue gauge
semantide_serving_queue{otel_scope_name="semantide.serving"} %(queue)s
# TYPE semantide_serving_workers gauge
semantide_serving_workers{otel_scope_name="semantide.serving"} 2
# TYPE semantide_serving_busy_seconds counter
semantide_serving_busy_seconds_total %(busy)s
# TYPE semantide_serving_stage_seconds histogram
semantide_serving_stage_seconds_bucket{le="0.1",stage="total"} %(fast)s
semantide_serving_stage_seconds_bucket{le="0.2",stage="total"} %(all)s
semantide_serving_stage_seconds_bucket{le="+Inf",stage="total"} %(all)s
semantide_serving_stage_seconds_bucket{le="0.1",stage="queue"} 999
"""


def spec(least: int = 1, most: int = 10, queue: float = 8.0, p99: float = 0.0) -> NPUServiceSpec:
    return NPUServiceSpec(replicas=Replicas(min=least, max=most), target=LoadTarget(queue_depth=queue, p99_milliseconds=p99))


def alike(count: int, queue: float, p99: float = 0.0, busy: float | None = None) -> list[ReplicaLoad]:
    return [ReplicaLoad(f"pod-{number}", queue, p99, busy) for number in range(count)]


loads = st.lists(
    st.builds(ReplicaLoad, st.uuids().map(str), st.floats(0, 1000), st.floats(0, 1e5), st.none() | st.floats(0, 1)),
    min_size=0,
    max_size=12,
)


@given(loads, st.integers(0, 20), st.integers(0, 5), st.integers(1, 20), st.floats(0, 1000))
def test_bounds_hold_and_one_thing_changes_at_a_time(replicas: list[ReplicaLoad], current: int, least: int, most: int, pause: float) -> None:
    wanted = balance(spec(min(least, most), most, p99=100), current, replicas, pause)
    assert min(least, most) <= wanted.replicas <= most
    assert wanted.move is None or (wanted.replicas == current and wanted.move in {load.pod for load in replicas})
    assert (wanted.replicas == current and wanted.move is None) == (not wanted.reason)


@given(st.integers(1, 9), st.floats(9, 1000))
def test_a_long_queue_grows_a_service_at_most_twofold(current: int, queue: float) -> None:
    wanted = balance(spec(), current, alike(current, queue))
    assert current < wanted.replicas <= min(10, 2 * current) and "target 8" in wanted.reason


def test_replicas_that_still_load_are_no_reason_for_more() -> None:
    assert balance(spec(most=64), 2, alike(2, 20)).replicas == 4
    assert balance(spec(most=64), 4, alike(2, 20)) == Balance(4), "two of them load still"
    assert balance(spec(most=64), 4, alike(3, 20)).replicas == 6, "what three cannot do is not what four could"
    assert balance(spec(most=64), 4, alike(4, 20)).replicas == 8


def test_slow_answers_grow_a_service_only_while_requests_wait() -> None:
    assert balance(spec(p99=100), 2, alike(2, 4, 300)).replicas == 4
    assert balance(spec(p99=100), 2, alike(2, 0, 300)) == Balance(2)
    assert "300 ms" in balance(spec(p99=100), 2, alike(2, 4, 300)).reason


@pytest.mark.parametrize("others", [1, 3])
def test_one_slow_replica_is_moved_and_grows_nothing(others: int) -> None:
    replicas = [*alike(others, 4, 20), ReplicaLoad("slow", 4, 500)]
    asked = spec(most=64, p99=50)
    assert balance(asked, others + 1, replicas, seconds_since_change=60) == Balance(others + 1)
    assert balance(asked, others + 1, replicas).move == "slow"
    assert balance(asked, others + 1, [*alike(others, 4, 80), ReplicaLoad("slow", 4, 500)], seconds_since_change=60).replicas > others + 1


def test_a_service_shrinks_by_one_after_a_calm_and_never_on_missing_word() -> None:
    assert balance(spec(), 4, alike(4, 0.1)).replicas == 3
    assert balance(spec(), 4, alike(4, 0.1), seconds_since_change=100).replicas == 4
    assert balance(spec(), 4, alike(3, 0.1)).replicas == 4
    assert balance(spec(), 4, alike(4, 0.1, busy=0.6)).replicas == 4, "the others would be too busy"
    assert balance(spec(), 4, alike(4, 0.1, busy=0.3)).replicas == 3
    assert balance(spec(p99=100), 4, alike(4, 0.1, p99=80)).replicas == 4
    assert balance(spec(least=0), 1, alike(1, 0)).replicas == 1, "a service that answers keeps one replica"


def test_who_lags_behind_alone_is_moved() -> None:
    replicas = [*alike(3, 5), ReplicaLoad("slow", 30)]
    assert balance(spec(most=4, queue=12), 4, replicas).move == "slow"
    assert balance(spec(most=4, queue=12), 4, replicas, seconds_since_change=10).move is None
    assert balance(spec(most=4, queue=12), 4, replicas, seconds_settled=10).move is None, "all have only begun"
    assert balance(spec(queue=12), 4, alike(4, 11)).move is None
    slow = [*alike(3, 5, p99=100, busy=0.6), ReplicaLoad("slow", 5, 400, 0.6)]
    assert balance(spec(), 4, slow).move == "slow"


def test_the_load_of_a_service_is_its_mean_queue_and_its_fullest() -> None:
    load = service_load([ReplicaLoad("a", 2, 100), ReplicaLoad("b", 6, 50)])
    assert (load.queue_depth, load.p99_milliseconds, load.imbalance) == (4, 100, 1.5)
    assert service_load([]).imbalance == service_load(alike(2, 0)).imbalance == 1.0


@pytest.mark.parametrize("rate", [0.3, 2.0, 5.7, 9.5])
def test_under_a_steady_load_the_number_settles(rate: float) -> None:
    """Each replica does one unit of work a second; queues are those of an M/M/1 with an equal share, growing where there is none."""
    current, changed, clock, counts = 1, -math.inf, 0.0, []
    backlog = 0.0
    for _ in range(1500):
        clock += 10
        use = rate / current
        backlog = max(0.0, backlog + 10 * (rate - current))
        queue = backlog / current if use >= 1 else min(50.0, use * use / (1 - use)) + backlog / current
        wanted = balance(spec(most=16, queue=4), current, alike(current, queue, busy=min(1.0, use)), clock - changed)
        if wanted.replicas != current:
            current, changed = wanted.replicas, clock
        counts.append(current)
    assert len(set(counts[-200:])) == 1, counts[-200:]
    assert rate < counts[-1] <= math.ceil(rate / 0.7) + 1


def test_a_page_is_read_and_two_looks_make_a_load() -> None:
    first = Look.parse(PAGE % {"queue": 3, "busy": 10, "fast": 100, "all": 100}, at=0)
    second = Look.parse(PAGE % {"queue": 5, "busy": 13, "fast": 150, "all": 200}, at=10)
    load = load_between("a", first, second)
    assert (load.queue_depth, load.busy) == (5, pytest.approx(3 / 20))
    assert 100 < load.p99_milliseconds <= 200
    restarted = Look.parse(PAGE % {"queue": 1, "busy": 1, "fast": 10, "all": 10}, at=20)
    assert load_between("a", second, restarted) == ReplicaLoad("a", 1, pytest.approx(99), pytest.approx(1 / 20))
    assert load_between("a", None, second) == ReplicaLoad("a", 5)


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = [0.1, 0.25, 0.5, 1.0, math.inf]
    counts = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    upper = next(bound for bound in bounds if true <= bound)
    lower = max([0.0, *(bound for bound in bounds if bound < true)])
    assert lower <= quantile(counts, share) <= upper
    assert quantile({}, share) == 0.0


def test_replicas_that_do_not_answer_have_no_load() -> None:
    pages = {
        "10.0.0.1": PAGE % {"queue": 2, "busy": 1, "fast": 1, "all": 1},
        "10.0.0.2": "not a page {",
        "10.0.0.4": PAGE % {"queue": "+Inf", "busy": 1, "fast": 1, "all": 1},
    }

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["X-API-Key"] == "k"
        if request.url.host == "10.0.0.3":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, text=pages[request.url.host])

    clock = iter(range(100))
    reader = LoadReader("k", lambda: float(next(clock)), httpx.Client(transport=httpx.MockTransport(answer)))
    addresses: dict[str, Any] = {f"pod-{number}": f"http://10.0.0.{number}:9100" for number in (1, 2, 3, 4)}

    def read(pods: dict[str, Any]) -> list[ReplicaLoad]:
        return reader.loads({pod: reader.ask(address) for pod, address in pods.items()})

    assert [load.pod for load in read(addresses)] == ["pod-1"] and set(reader.unheard) == {"pod-2", "pod-3", "pod-4"}
    assert read(addresses)[0].busy == 0.0
    assert read({}) == []
    assert read(addresses)[0].busy is None, "a replica that was gone begins anew"


def test_thresholds_are_of_one_kind() -> None:
    rules = Hysteresis()
    assert rules.shrink_below < 1 < rules.grow_above
