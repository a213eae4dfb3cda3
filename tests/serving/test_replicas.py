"""Requests go to their user's replica, bounded by its share of the work."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.replicas import Asked, Replica, Replicas

addresses = st.lists(st.integers(1, 10_000).map(lambda number: f"10.0.0.1:{number}"), min_size=1, max_size=12, unique=True)
asks = st.lists(st.builds(Asked, st.none() | st.integers(0, 20).map(str), st.floats(1, 100)), min_size=1, max_size=60)


def known(names: list[str]) -> Replicas:
    replicas = Replicas()
    for replica in replicas.set(names):
        replica.ready = True
    return replicas


@given(addresses, asks)
def test_no_replica_that_is_busy_gets_more_than_its_share(names: list[str], asked: list[Asked]) -> None:
    replicas = known(names)
    for each in asked:
        before = {replica.address: (replica.requests, replica.work) for replica in replicas}
        chosen = replicas.choose(each)
        assert chosen is not None
        total = sum(work for _, work in before.values()) + each.work
        busy, work = before[chosen.address]
        mean_requests = (sum(requests for requests, _ in before.values()) + 1) / len(names)
        bounded = work + each.work <= 1.25 * total / len(names) + 1e-9 and busy + 1 <= 1.25 * mean_requests
        assert not busy or bounded or work == min(other for _, other in before.values())
        chosen.begin(each.work)


@given(addresses, st.integers(0, 1000).map(str))
def test_a_user_stays_as_long_as_there_is_room(names: list[str], user: str) -> None:
    replicas = known(names)
    first = replicas.choose(Asked(user))
    assert first is not None and all(replicas.choose(Asked(user)) is first for _ in range(3))


def test_only_the_users_of_a_replica_that_goes_move() -> None:
    names, users = [f"10.0.0.{number}:8000" for number in range(8)], [str(number) for number in range(400)]
    replicas = known(names)
    before = {user: replicas.choose(Asked(user)).address for user in users}  # type: ignore[union-attr]
    spread = Counter(before.values())
    assert len(spread) == 8 and max(spread.values()) < 2 * 400 / 8
    replicas.set(names[1:])
    after = {user: replicas.choose(Asked(user)).address for user in users}  # type: ignore[union-attr]
    assert {user for user in users if before[user] != after[user]} == {user for user in users if before[user] == names[0]}
    (back,) = replicas.set(names)
    assert not back.ready
    back.ready = True
    assert {user: replicas.choose(Asked(user)).address for user in users} == before  # type: ignore[union-attr]


@given(addresses, st.data())
def test_those_that_are_not_ready_or_were_tried_get_nothing(names: list[str], data: st.DataObject) -> None:
    replicas = known(names)
    away = data.draw(st.sets(st.sampled_from(names)))
    for replica in replicas:
        replica.ready = replica.address not in away
    tried: set[str] = set()
    for _ in range(len(names) - len(away)):
        chosen = replicas.choose(Asked("somebody"), tried)
        assert chosen is not None and chosen.address not in away | tried
        tried.add(chosen.address)
    assert replicas.choose(Asked("somebody"), tried) is None


def test_nobodys_requests_go_where_least_work_is() -> None:
    replicas = known(["a:1", "b:1", "c:1"])
    for replica, work in zip(replicas, (5.0, 1.0, 3.0), strict=True):
        replica.begin(work)
    chosen = replicas.choose(Asked())
    assert chosen is not None and chosen.address == "b:1"


def test_work_is_estimated_and_whatever_is_wrong_with_a_body_is_not_judged_here() -> None:
    assert Asked.of(b'{"user": "u"}') == Asked("u", 2.0)
    assert Asked.of(b'{"history": ["i1", "i2"], "split_by": "s", "beam_width": 500}').work == pytest.approx(11.01)
    assert Asked.of(b'{"user": "u", "n": 100}').work == 4.0
    for wrong in (b"", b"[]", b'{"user": 3, "n": "x"', b'{"n": 1e400, "history": 7, "user": {}}', b"\xff", b'{"n": true}', b"[" * 100_000):
        assert Asked.of(wrong).user is None and Asked.of(wrong).work >= 1


def test_counts_come_back_to_nothing() -> None:
    replica = Replica("a:1")
    for work in (0.1, 0.2, 0.7):
        replica.begin(work)
    for work in (0.7, 0.1, 0.2):
        replica.end(work)
    assert (replica.requests, replica.work) == (0, 0.0)
    with pytest.raises(ValueError, match="slack"):
        Replicas(0.5)
