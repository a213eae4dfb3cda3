import numpy as np
import pytest

from semantide.services.serving.bundle import Bundle, load_bundle
from semantide.services.serving.explanation import nearest
from semantide.services.serving.registry_state import Pair

from .world import World


@pytest.fixture
def bundle(world: World) -> Bundle:
    return load_bundle(world.room.store, Pair(model=world.add_model(0), catalog=world.catalog_ref))


def test_the_nearest_items_of_the_history_are_those_of_the_largest_cosine(bundle, world):
    weight = world.models[bundle.pair.model].model.embed_tokens.weight.detach().numpy()
    vectors = weight[bundle.spelling.item_tokens_NL].sum(1)
    rng = np.random.default_rng(0)
    items = [f"i{row}" for row in rng.permutation(200)[:12]]
    history = [f"i{row}" for row in rng.integers(0, 200, 40)]
    for item, found in zip(items, nearest(bundle, items, bundle.rows(tuple(history))), strict=True):
        rows = sorted({int(name[1:]) for name in history})
        own = vectors[int(item[1:])]
        cosines = {f"i{row}": float(vectors[row] @ own / np.linalg.norm(vectors[row]) / np.linalg.norm(own)) for row in rows}
        best = sorted(cosines, key=lambda name: -cosines[name])[:3]
        assert [near.item for near in found] == best
        assert [near.similarity for near in found] == pytest.approx([cosines[name] for name in best], abs=1e-5)
        assert all(near.title == f"Item {near.item[1:]}" for near in found)


def test_an_item_of_the_history_is_nearest_to_itself(bundle):
    ((first, *_),) = nearest(bundle, ["i5"], np.array([1, 5, 9, 5]))
    assert first.item == "i5" and first.similarity == pytest.approx(1.0)


def test_short_and_empty_histories_explain_with_what_there_is(bundle):
    assert nearest(bundle, ["i1", "i2"], np.array([], dtype=np.int64)) == [(), ()]
    assert nearest(bundle, [], np.array([1])) == []
    assert [len(found) for found in nearest(bundle, ["i1", "i2"], np.array([3, 3]))] == [1, 1]


def test_explanations_are_given_on_request_only(server):
    body = server.recommend(history=["i1", "unknown", "i2", "i3", "i4"], n=5, explain=True).json()
    for hit in body["items"]:
        near = hit["explanation"]["nearest_history"]
        assert len(near) == 3 and {one["item"] for one in near} <= {"i1", "i2", "i3", "i4"}
        assert [one["similarity"] for one in near] == sorted((one["similarity"] for one in near), reverse=True)
    stages = body["timing"]["stages_ms"]
    assert list(stages)[:3] == ["queue", "assemble", "wait"] and {"prefill", "step_1", "select", "format"} <= set(stages)
    assert 0 < sum(stages.values()) <= body["timing"]["total_ms"] and server.recommend(history=["i1"]).json()["timing"]["stages_ms"] == {}
    cold = server.recommend(user="nobody", n=3, explain=True).json()
    assert all(hit["explanation"]["nearest_history"] == [] and len(hit["explanation"]["level_log_probabilities"]) == 3 for hit in cold["items"])
    assert all(hit["explanation"] is None for hit in server.recommend(history=["i1"]).json()["items"])
