from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving import exploration, tasks
from semantide.services.serving.engine import Recommendation
from semantide.services.serving.exploration import mix, places, seed_of
from semantide.shared.contracts import CatalogReady

from .world import Server, World, wait_until


def hit(item: str, score: float) -> Recommendation:
    return Recommendation(item, score, "", (), ())


OLD = [hit(f"o{number}", -float(number)) for number in range(20)]
NEW = [hit(f"n{number}", -10.0 - number) for number in range(20)]


@given(st.integers(1, 50), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_places_are_as_many_as_the_share_says(n, share, seed):
    given_places = places(n, share, seed)
    assert len(set(given_places)) == len(given_places) and all(0 <= place < n for place in given_places)
    assert int(n * share) - 1 <= len(given_places) <= int(n * share) + 1
    assert n == 1 or share == 1 or 0 not in given_places
    assert given_places == places(n, share, seed)


def test_small_shares_count_on_short_lists_too():
    total = sum(len(places(10, 0.03, seed)) for seed in range(3000))
    assert 750 <= total <= 1050
    assert all(places(10, 0.0, seed) == () for seed in range(100))


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 6), st.floats(0, 1), st.integers(0, 2**32))
def test_a_mixed_list_has_its_length_and_no_item_twice(length, fresh, own, share, seed):
    ranked = sorted([*OLD[: length - min(own, length)], *NEW[20 - min(own, length) :]], key=lambda one: -one.score)
    new = {one.item for one in NEW}
    wanted = places(length, share, seed)
    mixed = mix(ranked, NEW[:fresh], wanted, new, seed)
    names = [one.item for one in mixed.items]
    assert len(names) == len(ranked) == len(set(names))
    assert mixed.explored == set(names) - {one.item for one in ranked} and mixed.explored <= new
    rest = [one for one in mixed.items if one.item not in mixed.explored]
    assert rest == ranked[: len(rest)]
    got = sum(name in new for name in names)
    other = {one.item for one in NEW[:fresh]} - {one.item for one in ranked}
    assert got >= min(len(wanted), len(other)) and (not mixed.explored or got <= max(len(wanted), min(own, length)))
    assert mixed == mix(ranked, NEW[:fresh], wanted, new, seed)


def test_likelier_items_are_drawn_more_often():
    drawn = Counter(item for seed in range(2000) for item in mix(OLD[:5], [hit("a", -1.0), hit("b", -2.0)], (2,), frozenset(), seed).explored)
    assert drawn["a"] + drawn["b"] == 2000 and 0.68 < drawn["a"] / 2000 < 0.78  # 1 / (1 + e^-1) = 0.73


def test_seeds_differ():
    assert len({seed_of("a", 1), seed_of("a", 2), seed_of("b", 1), seed_of("a\n1")}) == 4


@pytest.fixture
def exploring(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that gives 30 % of the places to new items; its catalog has grown from 200 to 260 items."""
    from semantide.services.serving import api

    monkeypatch.setattr(api.time, "time", lambda: 1.7e9)
    world.live(0)
    bigger = world.add_catalog(items=260)
    settings = world.room.settings
    object.__setattr__(world.room, "settings", settings.model_copy(update={"serving_exploration": 0.3}))
    tasks.extend_catalog(CatalogReady(catalog=bigger, extends=world.catalog_ref), world.room)
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        yield server


def new(items: list[str]) -> list[str]:
    return [item for item in items if int(item[1:]) >= 200]


def test_new_items_get_their_share_and_are_marked(exploring, world):
    share = []
    for number in range(20):
        body = exploring.recommend(history=[f"i{number}", f"i{number + 100}"], n=10).json()
        explored = [hit["item"] for hit in body["items"] if hit["explored"]]
        plain = exploring.items(history=[f"i{number}", f"i{number + 100}"], n=10, explore=False)
        names = [hit["item"] for hit in body["items"]]
        assert len(set(names)) == 10 and set(new(names)) >= set(explored) and not set(explored) & set(plain)
        rest = [item for item in names if item not in explored]
        assert rest == plain[: len(rest)] and names[0] == plain[0]
        assert body["exact"] is False or not explored
        share.append(len(new(names)))
        assert names == exploring.items(history=[f"i{number}", f"i{number + 100}"], n=10)
    assert 2.0 <= sum(share) / len(share) <= 5.0


def test_filters_hold_for_explored_items(exploring):
    for number in range(10):
        body = exploring.recommend(history=[f"i{number}"], n=10, categories_any=["red"], exclude_ids=[f"i{row}" for row in range(230, 260)]).json()
        names = [hit["item"] for hit in body["items"]]
        assert all(int(item[1:]) % 3 == 0 and int(item[1:]) < 230 for item in names) and len(names) == 10
    assert not new(exploring.items(history=["i1"], n=10, exclude_ids=[f"i{row}" for row in range(200, 260)]))


def test_explored_items_are_paged_and_explained(exploring):
    first = exploring.recommend(user="a", n=10, depth=40, explain=True).json()
    second = exploring.recommend(cursor=first["cursor"]).json()
    third = exploring.recommend(cursor=second["cursor"], n=20).json()
    names = [hit["item"] for page in (first, second, third) for hit in page["items"]]
    assert len(set(names)) == 40 and any(hit["explored"] for page in (first, second, third) for hit in page["items"])
    assert all(hit["explanation"] for hit in second["items"])


def test_nothing_is_new_to_a_model_trained_on_the_whole_catalog(exploring, world, monkeypatch):
    searched = []
    monkeypatch.setattr(exploration, "places", lambda n, share, seed: searched.append(share) or ())
    exploring.items(history=["i1"])
    model = world.add_model(1, catalog_ref=exploring.loaded()["catalog"])
    assert exploring.client.post("/v1/serving/promote", json={"model": model, "force": True}).status_code == 200
    exploring.items(history=["i1"])
    exploring.items(history=["i1"], explore=False)
    assert searched == [0.3]


def test_nothing_is_explored_under_overload(exploring):
    narrowing = exploring.service.narrowing
    narrowing.__init__(0.2)
    narrowing.decide(0.6)
    assert narrowing.share < 1
    body = exploring.recommend(history=["i1"], n=20).json()
    assert not any(hit["explored"] for hit in body["items"]) and len(body["items"]) == 20


def test_the_second_search_reads_nothing_again(exploring, monkeypatch):
    groups = []
    monkeypatch.setattr(exploring.service.meters, "answered", lambda run, passages: groups.append((len(run.requests), run.tokens_read, run.prompt_tokens)))
    for number in range(10):
        exploring.items(history=[f"i{row}" for row in range(number, number + 6)], n=10)
    together = [group for group in groups if group[0] == 2]
    assert all(read == 19 + 1 and tokens == 2 * 19 for _, read, tokens in together)
    assert len(together) >= 5, groups  # they are sent in one breath
