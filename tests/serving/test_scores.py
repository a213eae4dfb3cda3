"""Scores of given items: those of a search that finds them, through the scheduler, for every kind of model, and refusals that say what to do."""

import asyncio
import time

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.services.serving.bundle import Bundle, Unavailable, load_bundle
from semantide.services.serving.engine import answer
from semantide.services.serving.prepared import Prepared, Query
from semantide.services.serving.recommending import Asked, Recommending
from semantide.services.serving.registry import Pair
from semantide.services.serving.scoring import ScoreGroup
from semantide.services.serving.wish import Wish
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.token_merger import MergerConfig

from .test_api import remember
from .world import World, post, wait_until

SHAPES = {
    "softmax": {},
    "hybrid": {"num_layers": 2, "layer_types": ("linear_attention", "full_attention"), "linear": LinearConfig(1, 2, 8, 8)},
    "merged": {"num_layers": 2, "layer_types": ("kda", "full_attention"), "linear": LinearConfig(1, 1, 8, 8), "merger": MergerConfig(True)},
}


@pytest.fixture(params=SHAPES)
def bundle(request: pytest.FixtureRequest, world: World) -> Bundle:
    return load_bundle(world.room.store, Pair(model=world.add_model(0, **SHAPES[request.param]), catalog=world.catalog_ref), 1 << 20)


def scored(bundle: Bundle, queries: list[Query], pool: KVPool | None = None, keep: list[int] | None = None) -> list[dict[str, float]]:
    prepared = [Prepared.of(bundle, query) for query in queries]
    pool = pool or KVPool(1 << 30)
    group = ScoreGroup(prepared, time.perf_counter, leases=[pool.reserve(each.kv_bytes) for each in prepared])
    rows = group.next_rows()
    assert rows == sum(each.tokens for each in prepared) or len({each.prompt.tobytes() for each in prepared}) < len(prepared)
    group.advance()
    if keep is not None:
        group.keep(keep)
        assert pool.in_use_bytes == sum(prepared[place].kv_bytes for place in keep)
    assert not group.advance()
    found = group.answers()
    group.remember()
    group.close()
    assert not pool.in_use_bytes
    return [{each.item: each.score for each in one.items} for one in found]


def searched(bundle: Bundle, query: Query) -> dict[str, float]:
    everything = Query(query.history, n=200, width=200, conditional=query.conditional)
    return {hit.item: hit.score for hit in answer(bundle, [everything], Unavailable, time.perf_counter)[0].items}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # a bundle never changes an answer
@given(data=st.data())
def test_any_group_gets_what_searches_give(bundle: Bundle, data: st.DataObject) -> None:
    rows = st.integers(0, 199).map(lambda row: f"i{row}")
    requests = data.draw(
        st.lists(st.tuples(st.lists(rows, max_size=6), st.lists(rows, min_size=1, max_size=9), st.sampled_from([None, "ann"])), min_size=1, max_size=3)
    )
    conditional = data.draw(st.booleans())
    queries = [Query(tuple(history), items=tuple(items), user=user, conditional=conditional) for history, items, user in requests]
    keep = data.draw(st.none() | st.sets(st.sampled_from(range(len(queries))), min_size=1).map(sorted))
    found = scored(bundle, queries, keep=keep)
    for query, scores in zip(queries if keep is None else [queries[place] for place in keep], found, strict=True):
        every = searched(bundle, query)
        assert set(scores) == set(query.items)
        np.testing.assert_allclose(list(scores.values()), [every[item] for item in scores], rtol=1e-4, atol=1e-4)
        if conditional:
            assert np.isclose(sum(np.exp(score) for score in every.values()), 1, atol=1e-3)


def test_a_returning_user_has_only_what_is_new_read(bundle: Bundle) -> None:
    history = tuple(f"i{row}" for row in range(9))
    (first,) = scored(bundle, [Query(history, items=("i50", "i3"), user="ann")])
    again = Prepared.of(bundle, Query((*history, "i20"), items=("i50", "i3"), user="ann"))
    assert again.kept and again.tokens < again.places / 3
    assert scored(bundle, [Query((*history, "i20"), items=("i50",), user="ann")])[0]["i50"] == pytest.approx(
        scored(bundle, [Query((*history, "i20"), items=("i50",))])[0]["i50"], abs=1e-4
    )
    assert answer(bundle, [Query(history, n=200, width=200, user="ann")], Unavailable, time.perf_counter)[0].items[0].score is not None
    assert searched(bundle, Query(history))["i50"] == pytest.approx(first["i50"], abs=1e-4)


def test_scores_come_in_the_order_asked_for_and_agree_with_recommendations(server, world) -> None:
    recommended = server.recommend(history=["i1", "i2"], n=200, beam_width=200, explain=True).json()
    wanted = {hit["item"]: hit for hit in recommended["items"]}
    response = server.client.post("/v1/scores", json={"history": ["i1", "i2", "nowhere"], "items": ["i9", "i3", "i9"]})
    assert response.status_code == 200, response.text
    body = response.json()
    assert [each["item"] for each in body["items"]] == ["i9", "i3", "i9"]
    for each in body["items"]:
        same = wanted[each["item"]]
        assert each["score"] == pytest.approx(same["score"], abs=1e-5) and each["codes"] == same["codes"]
        assert each["level_log_probabilities"] == pytest.approx(same["explanation"]["level_log_probabilities"], abs=1e-5)
    assert (body["based_on"], body["history_items"], body["unknown_history_items"]) == ("history", 2, 1)
    assert (body["model"], body["catalog"], body["variant"]) == (*server.loaded().values(), None)
    assert 0 <= body["timing"]["search_ms"] <= body["timing"]["total_ms"] and body["timing"]["stages_ms"]["score"] > 0
    remember(world, "ann", ("i1", "click"), ("i7", "exposure"), ("i2", "order"))
    stored = server.client.post("/v1/scores", json={"user": "ann", "items": ["i9"]}).json()
    assert stored["items"][0]["score"] == pytest.approx(wanted["i9"]["score"], abs=1e-5) and stored["based_on"] == "history"
    metrics = server.client.get("/metrics").text
    assert "semantide_scored_items_total" in metrics and 'stage="score"' in metrics


BAD_REQUESTS = [
    ({"history": ["i1"], "items": ["i1", "x", "y"]}, 422, ["2 that catalog", "'x', 'y'", "leave them out"]),
    ({"history": ["i1"], "items": []}, 422, ["items", "[]"]),
    ({"history": ["i1"]}, 422, ["items"]),
    ({"history": ["i1"], "items": [f"i{row % 200}" for row in range(1001)]}, 422, ["1001", "at most 1000", "SEMANTIDE_SERVING_SCORED_ITEMS"]),
    ({"history": ["i1"], "items": ["i1"] * 10_001}, 422, ["items", "10000"]),
    ({"items": ["i1"]}, 422, ["neither", "user", "history"]),
    ({"user": "a", "history": ["i1"], "items": ["i1"]}, 422, ["both"]),
    ({"history": [], "items": ["i1"]}, 422, ["history", "at least one"]),
    ({"history": ["i1"], "items": ["i1"], "n": 3}, 422, ["n"]),
    ({"history": ["i1"], "items": ["i1"], "variant": "none"}, 404, ["none"]),
]


def test_what_cannot_be_scored_is_refused_and_nobody_else_hears_of_it(server, world) -> None:
    for body, status, words in BAD_REQUESTS:
        response = server.client.post("/v1/scores", json=body)
        assert response.status_code == status, (body, response.text)
        for word in words:
            assert word in response.text, body
    bodies = [{"history": ["i1"], "items": ["i5", *(["gone"] if number % 2 else [])]} for number in range(12)]

    async def together() -> list[int]:
        return [status for status, _ in await asyncio.gather(*(post(server.url, "/v1/scores", body) for body in bodies))]

    assert asyncio.run(together()) == [200, 422] * 6
    assert httpx.post(f"{server.url}/v1/scores", json={"user": "a", "items": ["i1"]}).status_code == 401


def test_more_items_than_memory_are_refused_by_name(world) -> None:
    bundle = load_bundle(world.room.store, Pair(model=world.add_model(0), catalog=world.catalog_ref))
    stages = Recommending(lambda users: {}, {"click": 1.0}, Unavailable, KVPool(1 << 12), time.perf_counter)
    (outcome,) = stages.assemble([Asked(Wish(None, (("i1", "click", None),), items=tuple(f"i{row}" for row in range(200))), bundle)])
    assert isinstance(outcome, ValueError) and "`items` of 200" in str(outcome) and "ask for fewer items" in str(outcome)


def test_without_a_model_it_says_what_to_do_and_a_variant_scores_its_own_users(empty_server, world) -> None:
    response = empty_server.client.post("/v1/scores", json={"user": "a", "items": ["i1"]})
    assert response.status_code == 503 and "POST /v1/serving/promote" in response.text
    pair = world.live(0)
    wait_until(lambda: empty_server.service.swapper.bundle is not None)
    other = world.candidate(1)
    assert empty_server.client.put("/v1/serving/variants", json={"variants": [{"name": "b", "model": other, "share": 0.5}]}).status_code == 200
    asked = {"history": ["i1"], "items": ["i4", "i5"]}
    scores = [empty_server.client.post("/v1/scores", json={**asked, "variant": variant}).json() for variant in ("live", "b")]
    assert [each["model"] for each in scores] == [pair.model, other] and scores[0]["items"] != scores[1]["items"]
    sides = {empty_server.client.post("/v1/scores", json={**asked, "split_by": f"s{number}"}).json()["variant"] for number in range(20)}
    assert sides == {"live", "b"}
