"""Lists with a part of chance: the propensities that are told are the shares in which things happen."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.engine import Recommendation
from semantide.services.serving.exploration import Mixed, mix, places
from semantide.services.serving.randomisation import randomise, spare
from semantide.shared.shown_lists import ShownLists

from .world import Server, World, wait_until


def hit(item: str, score: float) -> Recommendation:
    return Recommendation(item, score, "", (), ())


RANKED = [hit(f"o{number}", -float(number)) for number in range(4)]
FRESH = [hit("n0", -1.0), hit("n1", -1.5), hit("n2", -3.0)]
BEYOND = [hit(f"b{number}", -9.0 - number) for number in range(3)]


def drawn(seed: int, share: float, by_chance: float) -> Mixed:
    wanted = places(len(RANKED), share, seed)
    mixed = mix(RANKED, FRESH if wanted else [], wanted, frozenset(), seed, n=len(RANKED), share=share)
    return randomise(mixed, RANKED, BEYOND, by_chance, seed)


@pytest.mark.parametrize(("share", "by_chance"), [(0.0, 0.3), (0.4, 0.0), (0.3, 0.25), (1.0, 0.5)])
def test_propensities_are_the_shares_in_which_items_come_to_places(share: float, by_chance: float) -> None:
    """By the chain of places: whenever a list begins alike, the next place has each item as often as it says."""
    counts: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    told: dict[tuple[str, ...], float] = {}
    for seed in range(4000):
        mixed = drawn(seed, share, by_chance)
        names = tuple(one.item for one in mixed.items)
        assert len(set(names)) == len(names) == len(mixed.propensities) and mixed.explored <= {"n0", "n1", "n2"}
        for place, chance in enumerate(mixed.propensities):
            counts[names[:place]][names[place]] += 1
            assert told.setdefault(names[: place + 1], chance) == pytest.approx(chance)
    seen = 0
    for begin, following in counts.items():
        total = sum(following.values())
        for name, count in following.items():
            if total >= 300:
                chance = told[(*begin, name)]
                assert abs(count / total - chance) < 4.5 * np.sqrt(chance * (1 - chance) / total) + 1e-9, (begin, name, count, total, chance)
                seen += 1
    assert seen >= 5


@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(0, 3), st.integers(1, 40))
def test_each_place_has_the_best_that_is_left_or_one_of_the_next_best(seed: int, share: float, beyond: int, length: int) -> None:
    ranked = [hit(f"o{number}", -float(number)) for number in range(length)]
    before = Mixed(tuple(ranked), frozenset(), (1.0,) * length)
    mixed = randomise(before, ranked, BEYOND[:beyond], share, seed)
    left = [*ranked, *BEYOND[:beyond]]
    for one, chance in zip(mixed.items, mixed.propensities, strict=True):
        others, index = min(20, len(left) - 1), left.index(one)
        assert index <= others and chance == pytest.approx((share / others if index else 1 - share) if others else 1) and chance > 0
        del left[index]
    assert mixed == randomise(before, ranked, BEYOND[:beyond], share, seed)
    if not share:
        assert mixed == before


def test_a_model_of_another_order_has_a_chance_at_every_place() -> None:
    """Else the log could say nothing of models that rank the same items otherwise."""
    before = Mixed(tuple(RANKED), frozenset(), (1.0,) * 4)
    seen = {tuple(one.item for one in randomise(before, RANKED, (), 0.5, seed).items) for seed in range(600)}
    assert len(seen) == 24  # every order of the four


def test_searches_give_so_many_more_as_their_width_has() -> None:
    assert [spare(10, 50), spare(10, 15), spare(50, 50), spare(60, 50)] == [20, 5, 0, 0]


@pytest.fixture
def drawing(world: World) -> Iterator[Server]:
    """A server that draws a fifth of its places."""
    world.live(0)
    object.__setattr__(world.room, "settings", world.room.settings.model_copy(update={"serving_randomisation": 0.2}))
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        yield server


def test_places_are_drawn_told_and_kept_for_their_feedback(drawing: Server, world: World) -> None:
    changed = 0
    for number in range(30):
        history = [f"i{number}", f"i{number + 60}"]
        plain = drawing.recommend(history=history, n=10, explore=False).json()
        body = drawing.recommend(history=history, n=10).json()
        names, best = ([item["item"] for item in one["items"]] for one in (body, plain))
        moved = [place for place in range(10) if names[place] != next(name for name in best if name not in names[:place])]
        changed += len(moved)
        assert len(set(names)) == 10 and all(item["propensity"] == 1 for item in plain["items"]) and plain["short_reason"] is None
        assert all((item["propensity"] < 0.2 if place in moved else item["propensity"] == pytest.approx(0.8)) for place, item in enumerate(body["items"]))
        assert not moved or not body["exact"]
    assert 20 < changed < 110
    lists = ShownLists(world.room.broker, 100, 1 << 20)
    wait_until(lambda: body["request_id"] in lists.get([body["request_id"]]))
    kept = lists.get([body["request_id"], plain["request_id"]])
    assert set(kept) == {body["request_id"]}, "where nothing was drawn there is nothing to keep"
    assert kept[body["request_id"]].items == tuple(names) and kept[body["request_id"]].propensities == tuple(item["propensity"] for item in body["items"])


def test_lists_that_are_draws_themselves_tell_no_chance(drawing: Server) -> None:
    body = drawing.recommend(user="nobody", n=5, variety=1.0).json()
    assert all(item["propensity"] is None for item in body["items"])
    short = drawing.recommend(history=["i1"], n=300, beam_width=300).json()
    assert len(short["items"]) == 200 and short["short_reason"]


def test_a_split_says_which_share_of_the_users_has_the_variant(server: Server, world: World) -> None:
    other = world.candidate(1)
    answer = server.client.put("/v1/serving/variants", json={"variants": [{"name": "challenger", "model": other, "share": 0.25}]})
    assert answer.status_code == 200
    bodies = [server.recommend(user=f"u{number}", n=3).json() for number in range(40)]
    assert {(body["variant"], body["share"]) for body in bodies} == {("live", 0.75), ("challenger", 0.25)}
    named = server.recommend(user="u1", n=3, variant="challenger").json()
    assert named["variant"] == "challenger" and named["share"] is None
    lists = ShownLists(world.room.broker, 100, 1 << 20)
    wait_until(lambda: len(lists.get([body["request_id"] for body in bodies])) == 40)
    kept = lists.get([bodies[0]["request_id"]])[bodies[0]["request_id"]]
    assert (kept.variant, kept.share, kept.items) == (bodies[0]["variant"], bodies[0]["share"], tuple(item["item"] for item in bodies[0]["items"]))
