"""Groups of real searches: rounds interleaved, requests that leave, narrow and wide ones together, prompts that are kept."""

import time
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.services.serving.bundle import Bundle, Unavailable, load_bundle
from semantide.services.serving.engine import Group, answer
from semantide.services.serving.prepared import Prepared, Query
from semantide.services.serving.registry_state import Pair
from semantide.services.serving.ticket import SearchAgain
from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.token_merger import MergerConfig

from .world import World

NOTHING = Unavailable()


@pytest.fixture
def bundle(world: World) -> Bundle:
    return load_bundle(world.room.store, Pair(model=world.add_model(0), catalog=world.catalog_ref), 1 << 20)


def begin(bundle, queries, pool=None, share=1.0, unavailable=lambda: NOTHING):
    prepared = [Prepared.of(bundle, query) for query in queries]
    pool = pool or KVPool(1 << 30)
    return Group(prepared, unavailable, time.perf_counter, leases=[pool.reserve(each.kv_bytes) for each in prepared], share=share)


def finish(group):
    while group.advance():
        pass
    found = group.answers()
    group.remember()
    group.close()
    return found


def alone(bundle, query):
    return answer(bundle, [query], lambda: NOTHING, time.perf_counter)[0]


def same(found, expected):
    assert [hit.item for hit in found.items] == [hit.item for hit in expected.items]
    np.testing.assert_allclose([hit.score for hit in found.items], [hit.score for hit in expected.items], atol=1e-5)


def test_widths_1_10_and_128_in_one_group_answer_as_if_alone(bundle):
    queries = [Query((f"i{number}", "i7"), n=min(width, 20), width=width, excluded=(f"i{number + 1}",)) for number, width in enumerate((1, 10, 128, 10, 1))]
    for query, found in zip(queries, finish(begin(bundle, queries)), strict=True):
        same(found, alone(bundle, query))
        assert found.width == query.width == found.requested_width and not found.narrowed


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # a bundle never changes
@given(data=st.data())
def test_whoever_leaves_at_any_round_changes_nobodys_answer_and_frees_its_memory(bundle, data):
    queries = [
        Query((f"i{number}",), n=3, width=width, excluded=("i3",))
        for number, width in enumerate(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)))
    ]
    pool = KVPool(1 << 30)
    group, staying, more = begin(bundle, queries, pool), list(range(len(queries))), True
    while more:
        kept = data.draw(st.lists(st.sampled_from(range(len(staying))), unique=True, min_size=1).map(sorted))
        if len(kept) < len(staying):
            group.keep(kept)
            staying = [staying[place] for place in kept]
        assert pool.in_use_bytes == sum(Prepared.of(bundle, queries[place]).kv_bytes for place in staying)
        more = group.advance()
    for place, found in zip(staying, group.answers(), strict=True):
        same(found, alone(bundle, queries[place]))
    group.close()
    group.close()
    assert pool.in_use_bytes == pool.leases == 0


def test_interleaved_groups_do_not_disturb_each_other(bundle):
    queries = [[Query((f"i{group}{number}",), width=20 + number) for number in range(3)] for group in range(3)]
    groups = [begin(bundle, each) for each in queries]
    for number in range(3):
        assert [group.advance() for group in groups] == [number < 2] * 3
    for each, group in zip(queries, groups, strict=True):
        for query, found in zip(each, group.answers(), strict=True):
            same(found, alone(bundle, query))


def test_a_narrowed_search_says_so_and_still_gives_n(bundle):
    few, many, all_of_them = finish(begin(bundle, [Query(n=5, width=40), Query(n=35, width=40), Query(n=300, width=400)], share=0.25))
    assert (few.width, few.requested_width, few.narrowed) == (10, 40, True)
    assert (many.width, many.narrowed, len(many.items)) == (35, True, 35)
    assert (all_of_them.width, all_of_them.narrowed, len(all_of_them.items)) == (200, False, 200)
    same(few, alone(bundle, Query(n=5, width=10)))


def test_a_returning_user_has_only_the_new_items_read_and_gets_the_same_answer(bundle):
    history = tuple(f"i{number}" for number in range(8))
    first = finish(begin(bundle, [Query(history, user="ann")]))[0]
    same(first, alone(bundle, Query(history)))
    longer = (*history, "i50")
    prepared = Prepared.of(bundle, Query(longer, user="ann"))
    assert prepared.tokens == 3 and len(prepared.prompt) == 28
    assert Prepared.of(bundle, Query(longer, user="bob")).tokens == Prepared.of(bundle, Query(longer)).tokens == 28
    warm, neighbour = finish(begin(bundle, [Query(longer, user="ann"), Query(("i9",), user="bob")]))
    same(warm, alone(bundle, Query(longer)))
    same(neighbour, alone(bundle, Query(("i9",))))
    assert Prepared.of(bundle, Query(longer, user="ann")).tokens == 1
    same(finish(begin(bundle, [Query(("i4", "i1"), user="ann")]))[0], alone(bundle, Query(("i4", "i1"))))


@pytest.mark.parametrize("separator", ["none", "kept"])
def test_a_model_that_merges_items_has_places_read_and_kept(world, separator):
    merger = MergerConfig(True, separator, ("actions", "gaps"), ("buy", "click"))
    bundle = load_bundle(world.room.store, Pair(model=world.add_model(7, merger=merger), catalog=world.catalog_ref), prompt_cache_bytes=1 << 20)
    torch.nn.init.normal_(bundle.model.generator.merger.proj.weight, std=0.2)
    each = 2 if separator == "kept" else 1
    history = tuple(f"i{number}" for number in range(8))
    moments = tuple((("click", "buy", "like")[number % 3], 60_000 * number) for number in range(9))
    first = finish(begin(bundle, [Query(history, user="ann", moments=moments[:8])]))[0]
    same(first, alone(bundle, Query(history, moments=moments[:8])))
    longer = Query((*history, "unknown", "i50"), user="ann", moments=(*moments[:8], ("buy", 0), moments[8]))
    prepared = Prepared.of(bundle, longer)
    assert (prepared.tokens, prepared.places, len(prepared.prompt)) == (each, 1 + 9 * each, 1 + 9 * 5)
    assert bundle.prompts.use().tokens_asked == 1 + 8 * each
    group = begin(bundle, [longer])
    warm = finish(group)[0]
    assert (group.tokens_read, group.prompt_tokens) == (each, 1 + 9 * each)
    same(warm, alone(bundle, replace(longer, user=None)))
    other = alone(bundle, Query(longer.history))
    assert [hit.score for hit in other.items] != [hit.score for hit in warm.items], "what was done and when counts"


@pytest.mark.parametrize("merger", [MergerConfig(), MergerConfig(True, "kept")])
@pytest.mark.parametrize("types", [("linear_attention", "full_attention"), ("kda", "gla")])
def test_a_model_with_linear_attention_answers_in_groups_and_reads_returning_users_on(world, types, merger):
    shape = {"num_layers": 2, "layer_types": types, "linear": LinearConfig(1, 2, 16, 16), "merger": merger}
    pair = Pair(model=world.add_model(3, **shape), catalog=world.catalog_ref)
    bundle, short = (load_bundle(world.room.store, pair, 1 << 20, records=records) for records in ("float32", "bfloat16"))
    each = bundle.model.generator.prompt_shape.places_per_item
    history = tuple(f"i{number}" for number in range(8))
    queries = [Query(history, user="ann"), Query(("i3",), width=100), Query(history, width=5), Query(n=3, width=1)]
    pool = KVPool(1 << 30)
    group = begin(bundle, queries, pool)
    assert pool.in_use_bytes == sum(Prepared.of(bundle, query).kv_bytes for query in queries)
    for query, found in zip(queries, finish(group), strict=True):
        same(found, alone(bundle, replace(query, user=None)))
    assert pool.in_use_bytes == 0
    longer = Query((*history, "i50"), user="ann")
    assert Prepared.of(bundle, longer).tokens == each == Prepared.of(bundle, queries[0]).tokens, (
        "the end of the prompt is known, or what comes before its last item"
    )
    group = begin(bundle, [longer])
    same(finish(group)[0], alone(bundle, replace(longer, user=None)))
    assert group.tokens_read == each
    rounded = alone(short, replace(longer, user=None))
    assert Prepared.of(short, longer).kv_bytes < Prepared.of(bundle, longer).kv_bytes
    np.testing.assert_allclose([hit.score for hit in rounded.items], [hit.score for hit in alone(bundle, longer).items], atol=0.2)


@pytest.mark.parametrize("meanwhile", ["dropped", "replaced"])
def test_a_query_that_waits_holds_no_prompt_that_the_cache_gave_away(bundle, meanwhile):
    query = Query(tuple(f"i{number}" for number in range(8)), user="ann")
    finish(begin(bundle, [query]))
    waiting = begin(bundle, [query])
    prompt = ref(bundle.prompts.get("ann"))
    assert waiting.next_rows() == 1 and prompt() is not None
    if meanwhile == "dropped":
        bundle.prompts.drop("ann")
    else:
        finish(begin(bundle, [Query(query.history[:6], user="ann")]))
    assert prompt() is None
    same(finish(waiting)[0], alone(bundle, query))
    assert waiting.requests[0].tokens == {"dropped": 25, "replaced": 6}[meanwhile]


def test_two_searches_with_one_prompt_read_it_once(bundle):
    history = tuple(f"i{number}" for number in range(8))
    queries = [Query(history, user="ann"), Query(("i3",)), Query(history, n=5, excluded=("i9",), width=20, user="ann")]
    group = begin(bundle, queries)
    assert group.next_rows() == 25 + 4 + 1
    for query, found in zip(queries, finish(group), strict=True):
        same(found, alone(bundle, query))
    assert (group.tokens_read, group.prompt_tokens) == (30, 54)


def test_a_changed_availability_is_searched_again_a_few_times_and_then_left_out(bundle):
    best = alone(bundle, Query(n=5)).items
    version = [0]

    def unavailable():
        version[0] += 1
        return NOTHING if version[0] % 2 else Unavailable(version[0], frozenset(hit.item for hit in best))

    prepared = Prepared.of(bundle, Query(n=5))
    outcomes = []
    for _ in range(3):
        group = Group([prepared], unavailable, time.perf_counter)
        outcomes += finish(group)
    assert [isinstance(outcome, SearchAgain) for outcome in outcomes] == [True, True, False]
    assert outcomes[-1].items == () and "5 items became unavailable" in outcomes[-1].short_reason


def test_beams_that_all_died_do_not_stop_the_others_from_leaving(bundle):
    queries = [Query(n=3, width=10, excluded=bundle.catalog.item_ids), Query(("i1",), width=10), Query(n=2, excluded=bundle.catalog.item_ids)]
    group = begin(bundle, queries)
    assert group.advance()
    group.keep([0, 2])
    assert [found.items for found in finish(group)] == [(), ()]
