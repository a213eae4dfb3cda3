"""Requests go where they are expected to be answered first: mostly to the replica of their user's last visit, bounded by its share of the requests."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.replicas import NOTHING, Asked, Given, Replica, Replicas

addresses = st.lists(st.integers(1, 10_000).map(lambda number: f"10.0.0.1:{number}"), min_size=1, max_size=12, unique=True)
asks = st.lists(st.builds(Asked, st.none() | st.integers(0, 20).map(str), st.floats(1, 512), st.none() | st.integers(0, 500)), min_size=1, max_size=60)


def known(names: list[str]) -> Replicas:
    replicas = Replicas()
    for replica in replicas.set(names):
        replica.ready = True
    return replicas


def visit(replicas: Replicas, asked: Asked, now: float = 0.0, seconds: float = 0.02, items: int = 100) -> Replica:
    """One request from its beginning to its end."""
    replica = replicas.choose(asked, now)
    assert replica is not None
    replicas.end(replicas.begin(replica, asked, now), now + seconds, items)
    return replica


@given(addresses, asks, st.data())
def test_no_replica_that_is_busier_than_another_gets_more_than_its_share(names: list[str], asked: list[Asked], data: st.DataObject) -> None:
    replicas = known(names)
    under_way: list[Given] = []
    for now, each in enumerate(asked):
        before = {replica.address: replica.requests for replica in replicas}
        chosen = replicas.choose(each, float(now))
        assert chosen is not None
        busy = before[chosen.address]
        assert busy == min(before.values()) or busy + 1 <= 1.5 * (sum(before.values()) + 1) / len(names) + 1e-9
        under_way.append(replicas.begin(chosen, each, float(now)))
        if data.draw(st.booleans()):
            replicas.end(under_way.pop(data.draw(st.integers(0, len(under_way) - 1))), now + 0.5, 100)
        for replica in replicas:
            assert replica.requests >= 0 and replica.work >= 0 and 0 <= replica.backlog(now + 0.5) <= replica.work + 1e-9
    for given_one in under_way:
        replicas.end(given_one, 1e6)
    assert all((replica.requests, replica.work) == (0, 0.0) for replica in replicas)


@given(addresses, st.integers(0, 1000).map(str))
def test_a_user_stays_as_long_as_there_is_room(names: list[str], user: str) -> None:
    replicas = known(names)
    first = visit(replicas, Asked(user))
    assert all(visit(replicas, Asked(user), float(now)) is first for now in range(1, 4))


def test_a_user_goes_elsewhere_where_that_is_worth_reading_his_history_anew() -> None:
    replicas = known(["a:1", "b:1", "c:1"])
    for now in range(400):  # histories take long, and what is kept takes nothing
        seen = replicas.choose(Asked(f"u{now % 7}"), float(now))
        assert seen is not None
        given_one = replicas.begin(seen, Asked(f"u{now % 7}"), float(now))
        replicas.end(given_one, now + (0.01 if given_one.known else 0.2), 200)
    home = visit(replicas, Asked("u1"), 1000.0)
    small = Asked("u2", items=0)
    replicas.begin(home, small, 1000.0)
    for other in replicas:
        if other is not home:
            replicas.begin(other, Asked("u3", items=0), 1000.0)
    assert replicas.choose(Asked("u1"), 1000.0) is home, "who waits there for little is answered sooner than anywhere"
    replicas.begin(home, replace(small, beams=500.0, items=5000), 1000.0)
    assert replicas.choose(Asked("u1"), 1000.0) is not home


def test_what_was_learned_makes_long_work_count_for_more() -> None:
    replicas = known(["a:1", "b:1"])
    for now in range(200):
        beams = 500.0 if now % 2 else 10.0
        visit(replicas, Asked(beams=beams, items=0), float(now), seconds=beams / 1000, items=0)
    first, second = replicas
    replicas.begin(first, Asked(beams=500.0, items=0), 1000.0)
    replicas.begin(second, Asked(beams=10.0, items=0), 1000.0)
    assert first.work > 10 * second.work
    assert replicas.choose(Asked(beams=50.0, items=0), 1000.0) is second


def test_routers_agree_on_users_that_neither_has_seen() -> None:
    names = [f"10.0.0.{number}:8000" for number in range(8)]
    one, other = known(names), known(list(reversed(names)))
    for user in map(str, range(50)):
        assert one.choose(Asked(user), 0.0).address == other.choose(Asked(user), 0.0).address  # type: ignore[union-attr]


def test_only_the_users_of_a_replica_that_goes_move() -> None:
    names, users = [f"10.0.0.{number}:8000" for number in range(8)], [str(number) for number in range(400)]
    replicas = known(names)
    before = {user: visit(replicas, Asked(user)).address for user in users}
    spread = Counter(before.values())
    assert len(spread) == 8 and max(spread.values()) < 2 * 400 / 8
    replicas.set(names[1:])
    after = {user: visit(replicas, Asked(user)).address for user in users}
    assert {user for user in users if before[user] != after[user]} == {user for user in users if before[user] == names[0]}
    (back,) = replicas.set(names)
    assert not back.ready
    back.ready = True
    assert {user: visit(replicas, Asked(user)).address for user in users} == after, "whose prompts are kept elsewhere now stay there"


def test_users_are_forgotten_beyond_a_number() -> None:
    replicas = Replicas(remembered=10)
    for replica in replicas.set(["a:1", "b:1"]):
        replica.ready = True
    for number in range(100):
        visit(replicas, Asked(str(number)))
    assert len(replicas._visits) == 10


@given(addresses, st.data())
def test_those_that_are_not_ready_or_were_tried_get_nothing(names: list[str], data: st.DataObject) -> None:
    replicas = known(names)
    away = data.draw(st.sets(st.sampled_from(names)))
    for replica in replicas:
        replica.ready = replica.address not in away
    tried: set[str] = set()
    for _ in range(len(names) - len(away)):
        chosen = replicas.choose(Asked("somebody"), 0.0, tried)
        assert chosen is not None and chosen.address not in away | tried
        tried.add(chosen.address)
    assert replicas.choose(Asked("somebody"), 0.0, tried) is None


def test_nobodys_requests_go_where_least_work_is() -> None:
    replicas = known(["a:1", "b:1", "c:1"])
    for replica, beams in zip(replicas, (500.0, 10.0, 300.0), strict=True):
        replicas.begin(replica, Asked(beams=beams, items=0), 0.0)
    chosen = replicas.choose(Asked(), 0.0)
    assert chosen is not None and chosen.address == "b:1"


def test_a_body_is_read_as_far_as_it_can_be_and_what_is_wrong_with_it_is_not_judged_here() -> None:
    assert Asked.of(b'{"user": "u"}') == Asked("u", 50.0, None)
    assert Asked.of(b'{"history": ["i1", "i2"], "split_by": "s", "beam_width": 500}') == Asked(None, 500.0, 2)
    assert Asked.of(b'{"user": "u", "n": 100}').beams == 150.0
    assert not Asked.of(b'{"cursor": "c", "n": 10}').searches
    for wrong in (b"", b"[]", b"\xff", b"[" * 100_000):
        assert Asked.of(wrong) is NOTHING
    for odd in (b'{"user": 3, "n": "x"}', b'{"n": 1e400, "history": 7, "user": {}}', b'{"n": true}'):
        assert Asked.of(odd) == Asked(None, 50.0, 0)


def test_below_its_share_a_slack_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="slack"):
        Replicas(0.5)
