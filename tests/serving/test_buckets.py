from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.buckets import BUCKETS, allocate, bucket, owner
from semantide.services.serving.registry_state import LIVE, Pair, RegistryState, Split, Variant
from semantide.shared.errors import Conflict

PAIR = Pair(model=f"models/sha256-{'1' * 64}", catalog=f"catalogs/sha256-{'2' * 64}")
USERS = [f"user-{number}" for number in range(10_000)]
NAMES = ("b", "c", "d")

shares = st.lists(st.integers(0, BUCKETS // 3), min_size=0, max_size=3).map(
    lambda counts: dict(zip(NAMES, (count / BUCKETS for count in counts), strict=False))
)


def owners(ranges):
    names = [None] * BUCKETS
    for first, end, name in ranges:
        assert names[first:end] == [None] * (end - first)
        names[first:end] = [name] * (end - first)
    return names


def state(**wanted: float) -> RegistryState:
    variants = tuple(Variant(name=name, pair=PAIR, share=share) for name, share in wanted.items())
    return RegistryState().promoted(PAIR, 1).divided(Split(variants=variants), 2)


@given(shares, shares)
def test_a_change_moves_no_more_than_it_must(before, after):
    old, new = owners(allocate((), before)), owners(allocate(allocate((), before), after))
    for name, share in after.items():
        assert new.count(name) == round(share * BUCKETS)
    moved = Counter((a, b) for a, b in zip(old, new, strict=True) if a != b)
    for a, b in moved:
        grows = b is not None and after[b] > before.get(b, 0)
        shrinks = a is not None and after.get(a, 0) < before[a]
        assert grows or shrinks
    changes = {name: round(after.get(name, 0) * BUCKETS) - round(before.get(name, 0) * BUCKETS) for name in {*before, *after}}
    assert moved.total() <= sum(abs(change) for change in changes.values())


@given(shares)
def test_the_owner_of_a_bucket_is_the_one_whose_range_holds_it(wanted):
    ranges = allocate((), wanted)
    names = owners(ranges)
    for number in range(0, BUCKETS, 97):
        assert owner(ranges, number) == names[number]


def test_a_tenth_of_ten_thousand_users_is_a_tenth_and_everybody_stays():
    split = state(b=0.1).split
    sides = [split.assign(user) for user in USERS]
    assert abs(sides.count("b") - 1000) <= 100 and set(sides) == {"b", LIVE}
    assert [split.assign(user) for user in USERS] == sides
    again = Split.model_validate_json(split.model_dump_json())
    assert [again.assign(user) for user in USERS] == sides


def test_users_move_only_into_a_share_that_grows():
    small = state(b=0.1, c=0.1)
    grown = small.divided(Split(variants=(small.split.variants[0].model_copy(update={"share": 0.3}), small.split.variants[1])), 3)
    for user in USERS:
        before, after = small.split.assign(user), grown.split.assign(user)
        assert before == after or (before, after) == (LIVE, "b")
    other = small.divided(small.split.model_copy(update={"salt": "anew"}), 4)
    kept = sum(small.split.assign(user) == other.split.assign(user) == "b" for user in USERS)
    assert kept < 200


def test_salt_and_user_do_not_run_together():
    assert bucket("bc", "a") != bucket("c", "ab")


def test_shares_are_those_of_the_buckets_so_whoever_answers_has_one():
    split = state(b=1 / 3, c=1 / 3, d=1 / 3).split
    assert split.shares == {LIVE: 0.0001, "b": 0.3333, "c": 0.3333, "d": 0.3333}
    sides = Counter(split.assign(f"user-{number}") for number in range(50_000))
    assert sides[LIVE] and all(split.shares[name] > 0 for name in sides)


@given(shares)
def test_shares_are_counts_of_buckets(wanted):
    ranges = allocate((), wanted)
    split = Split(variants=tuple(Variant(name=name, pair=PAIR, share=share) for name, share in wanted.items()), ranges=ranges)
    counts = Counter(name or LIVE for name in owners(ranges))
    assert split.shares == {name: counts[name] / BUCKETS for name in (LIVE, *wanted)}


def test_a_split_is_a_decision_and_ends():
    divided = state(b=0.25, c=0.5)
    assert divided.decisions[-1].action == "split" and divided.decisions[-1].shares == {LIVE: 0.25, "b": 0.25, "c": 0.5}
    assert divided.divided(Split(variants=divided.split.variants), 3) is divided
    ended = divided.divided(Split(), 4)
    assert ended.split == Split() and ended.decisions[-1].shares == {LIVE: 1.0}
    assert {ended.split.assign(user) for user in USERS[:100]} == {LIVE}


def test_what_does_not_go_together_is_refused():
    one = Variant(name="b", pair=PAIR, share=0.6)
    with pytest.raises(Conflict, match="no model is live"):
        RegistryState().divided(Split(variants=(one,)), 1)
    live = RegistryState().promoted(PAIR, 1)
    for variants, word in (
        ((one, one), "'b' is taken"),
        ((one.model_copy(update={"name": LIVE}),), "'live' is taken"),
        ((one, one.model_copy(update={"name": "c"})), "sum to 1.2"),
    ):
        with pytest.raises(ValueError, match=word):
            live.divided(Split(variants=variants), 2)


def test_rollback_promotion_and_extension_leave_the_split_in_place():
    other = Pair(model=f"models/sha256-{'3' * 64}", catalog=PAIR.catalog)
    larger = f"catalogs/sha256-{'4' * 64}"
    divided = state(b=0.5)
    promoted = divided.promoted(other, 5)
    assert promoted.split == divided.split == promoted.rolled_back(6).split
    extended = divided.extended(PAIR.catalog, larger, 7)
    assert extended.split.variants[0].pair.catalog == larger and extended.split.ranges == divided.split.ranges
