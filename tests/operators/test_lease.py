"""At most one process is sure to lead at any time, whatever their clocks say of the time of day."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semantide.operators.lease import Lease
from semantide.shared.errors import TransientError
from tests.operators.fake_cluster import FakeCluster

SECONDS = 10.0


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0


def lease(cluster: FakeCluster, clock: Clock, name: str, wrong_by: float = 0.0) -> Lease:
    return Lease(cluster, "lab", name, SECONDS, lambda: clock.seconds, lambda: 1_800_000_000.0 + wrong_by)


def test_the_first_leads_until_it_is_silent() -> None:
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    first, second = lease(cluster, clock, "first"), lease(cluster, clock, "second", wrong_by=1e6)
    assert first.renew() and not second.renew()
    clock.seconds = 5.0
    assert first.renew() and not second.renew()
    clock.seconds = 5.0 + SECONDS - 1
    assert not first.held(), "it stops to act before another may begin"
    assert not second.renew()
    clock.seconds = 5.0 + SECONDS + 1
    assert second.renew() and not first.renew() and not first.held()


def test_who_stops_in_order_hands_over_at_once() -> None:
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    first, second = lease(cluster, clock, "first"), lease(cluster, clock, "second")
    assert first.renew() and not second.renew()
    first.release()
    assert not first.held() and second.renew()
    first.release()
    assert second.held()


def test_an_api_server_that_is_away_costs_the_lead_only_after_a_while() -> None:
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    first = lease(cluster, clock, "first")
    assert first.renew()

    def away(verb: str, kind: str, name: str) -> None:
        raise TransientError("away")

    cluster.fails = away
    clock.seconds = 3.0
    assert first.renew()
    clock.seconds = 8.0
    assert not first.renew()


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 4), st.booleans()), max_size=80))
def test_never_two_are_sure(steps: list[tuple[int, float, bool]]) -> None:
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    several = [lease(cluster, clock, f"number-{number}", wrong_by=number * 1e5) for number in range(3)]
    for who, seconds, away in steps:
        clock.seconds += seconds

        def fail(verb: str, kind: str, name: str, away: bool = away) -> None:
            if away:
                raise TransientError("away")

        cluster.fails = fail
        several[who].renew()
        assert sum(one.held() for one in several) <= 1


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 4), st.floats(0, 12), st.integers(1, 2), st.sampled_from(["get", "replace"])), max_size=60))
@example(steps=[(0, 0.0, 0.0, 1, "get"), (1, 0.0, 6.0, 2, "get"), (1, 4.0, 0.0, 1, "get")])
def test_never_two_are_sure_where_calls_stall(steps: list[tuple[int, float, float, int, str]]) -> None:
    """While one's call is on its way time passes, and another one renews."""
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    several = [lease(cluster, clock, f"number-{number}") for number in range(3)]
    for who, seconds, stall, beside, stalls in steps:
        clock.seconds += seconds

        def stalled(verb: str, kind: str, name: str, stall: float = stall, other: Lease = several[(who + beside) % 3], stalls: str = stalls) -> None:
            if verb == stalls:
                cluster.fails = lambda *_: None
                clock.seconds += stall
                other.renew()
                assert sum(one.held() for one in several) <= 1

        cluster.fails = stalled
        several[who].renew()
        assert sum(one.held() for one in several) <= 1


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": None}, {"holderIdentity": ""}, {"leaseDurationSeconds": None}])
def test_a_lease_that_others_made_is_taken(spec: dict[str, object]) -> None:
    clock, cluster = Clock(), FakeCluster(lambda: 0.0)
    metadata = {"name": "semantide-operator", "namespace": "lab"}
    cluster.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})
    assert lease(cluster, clock, "first").renew()
