import time

import numpy as np
import pytest
import torch

from semantide.services.serving.bundle import Bundle, Unavailable, load_bundle
from semantide.services.serving.engine import answer, warm_up
from semantide.services.serving.prepared import Query, effective_width
from semantide.services.serving.registry_state import Pair
from semantide.services.training.rankers import GeneratorRanker
from semantide.shared.decoding.brute_force import best_items, score_every_item
from semantide.shared.errors import Conflict, Corrupt, NotFound, PermanentError
from semantide.shared.models.prompt_cache import history_window

from .world import World

NOTHING = Unavailable()


@pytest.fixture
def bundle(world: World) -> Bundle:
    return load_bundle(world.room.store, Pair(model=world.add_model(0), catalog=world.catalog_ref))


def ask(bundle: Bundle, *queries: Query, unavailable: Unavailable = NOTHING):
    return answer(bundle, queries, lambda: unavailable, time.perf_counter)


def expected(bundle: Bundle, query: Query, unavailable: Unavailable = NOTHING) -> tuple[list[str], np.ndarray]:
    """The exact answer, by scoring every item."""
    catalog = bundle.catalog
    rows = history_window(np.array([catalog.row_of[item] for item in query.history if item in catalog.row_of], dtype=np.int64), bundle.max_history_items)
    prompt = torch.as_tensor(bundle.spelling.prompt(rows))
    scores = score_every_item(bundle.model, catalog.codes, prompt, torch.tensor([0, len(prompt)]))[0]
    allowed = np.ones(len(catalog), dtype=bool)
    for row, item in enumerate(catalog.item_ids):
        colours = {name for name, members in bundle.rows_of_category.items() if row in members}
        if item in unavailable.items or item in query.excluded:
            allowed[row] = False
        if query.categories_any and not colours & set(query.categories_any):
            allowed[row] = False
        if not set(query.categories_all) <= colours:
            allowed[row] = False
    best = best_items(scores, catalog.codes, allowed, query.n)
    return [catalog.item_ids[row] for row in best], scores[best]


def test_variety_draws_among_the_beams_and_leaves_histories_alone(bundle):
    best = ask(bundle, Query(n=50))[0]
    drawn = ask(bundle, *(Query(n=10, variety=2.0, seed=seed) for seed in (1, 1, 2, 3)))
    lists = [[hit.item for hit in answer.items] for answer in drawn]
    assert lists[0] == lists[1] and len({tuple(items) for items in lists}) == 3
    for found in drawn:
        scores = [hit.score for hit in found.items]
        assert len({hit.item for hit in found.items}) == 10 and scores == sorted(scores, reverse=True) and not found.complete
        assert {hit.item for hit in found.items} <= {hit.item for hit in best.items}
    plain, varied, cold = ask(bundle, Query(("i1",)), Query(("i1",), variety=2.0, seed=1), Query(("no such item",), variety=1e-6, seed=1))
    assert plain.items == varied.items and [hit.item for hit in cold.items] == [hit.item for hit in best.items[:10]]


def test_conditional_scores_are_a_distribution_over_the_catalog_whoever_shares_the_batch(bundle):
    every = len(bundle.catalog)
    plain, conditional = Query(("i1", "i2"), n=every), Query(("i1", "i2"), n=every, conditional=True)
    answers = ask(bundle, plain, conditional, Query(("i3",), n=5), Query(("i1", "i2"), n=every, conditional=True, excluded=("i7",)))
    totals = [sum(np.exp(hit.score) for hit in found.items) for found in answers]
    assert totals[1] == pytest.approx(1) and totals[0] < 1
    assert [hit.item for hit in answers[0].items] == [hit.item for hit in ask(bundle, plain)[0].items]
    scores = {hit.item: hit.score for hit in answers[1].items}
    assert all(hit.score == pytest.approx(scores[hit.item]) for hit in answers[3].items)  # a filter changes no score


def test_constraint_filter_and_beam_in_one_batch_equal_brute_force(bundle):
    rng = np.random.default_rng(1)
    queries = []
    for number in range(24):
        queries.append(
            Query(
                history=tuple(f"i{row}" for row in rng.integers(0, 220, rng.integers(0, 30))),
                n=int(rng.integers(1, 60)),
                width=200,
                excluded=tuple(f"i{row}" for row in rng.integers(0, 220, rng.integers(0, 90))),
                categories_any=[(), ("red",), ("red", "blue")][number % 3],
                categories_all=[(), ("large",)][number % 2],
            )
        )
    unavailable = Unavailable(1, frozenset(f"i{row}" for row in range(0, 200, 7)))
    for query, result in zip(queries, ask(bundle, *queries, unavailable=unavailable), strict=True):
        items, scores = expected(bundle, query, unavailable)
        assert [hit.item for hit in result.items] == items
        np.testing.assert_allclose([hit.score for hit in result.items], scores, atol=1e-5)
        assert result.complete
        assert (result.short_reason is None) == (len(items) == query.n)
        for hit in result.items:
            assert hit.codes == tuple(bundle.catalog.codes[bundle.catalog.row_of[hit.item]])
            assert hit.title == f"Item {hit.item[1:]}"
            assert sum(hit.level_scores) == pytest.approx(hit.score, abs=1e-9)


def test_every_width_in_one_batch_gets_its_own_number_of_items(bundle):
    widths = [1, 10, 128, 3, 199, 200, 201, 4096]
    results = ask(bundle, *(Query(history=("i1",), n=width, width=width) for width in widths))
    assert [len(result.items) for result in results] == [min(width, 200) for width in widths]
    for width, result in zip(widths, results, strict=True):
        assert (result.short_reason is None) == (width <= 200)
    assert "200 items, fewer than n = 4096" in (results[-1].short_reason or "")


def test_a_narrow_beam_still_gives_n(bundle):
    (result,) = ask(bundle, Query(history=("i1",), n=30, width=2))
    assert len(result.items) == 30 and result.width == 30
    assert effective_width(Query(n=500, width=1), 200) == 200


def test_a_long_history_keeps_its_end_and_unknown_items_are_skipped(bundle):
    long = tuple(f"i{row % 200}" for row in range(500))
    whole, end, holes = ask(bundle, Query(history=long), Query(history=long[-20:]), Query(history=tuple(x for item in long for x in (item, "what"))))
    assert whole.items == end.items == holes.items
    assert 15 < whole.history_items <= 20 and whole.unknown_history_items == 0
    assert (holes.history_items, holes.unknown_history_items) == (whole.history_items, 500)


@pytest.mark.parametrize("seen", [False, True])
def test_evaluation_ranks_what_is_served(bundle, seen):
    """Histories of all lengths, in the rows of a data set whose order is not the catalog's."""
    rng = np.random.default_rng(0)
    catalog_rows = rng.permutation(200)
    ranker = GeneratorRanker(bundle.model.generator, bundle.catalog.trie, bundle.catalog.codes, catalog_rows, bundle.max_history_items, beam_width=50)
    histories = [rng.integers(0, 200, length) for length in (1, 5, 19, 20, 21, 40, 300)]
    names = [tuple(f"i{row}" for row in catalog_rows[history]) for history in histories]
    served = ask(bundle, *(Query(history=items, n=10, width=50, excluded=items if seen else ()) for items in names))
    for row, found in zip(ranker.rank(histories, 10, seen), served, strict=True):
        assert [f"i{catalog_rows[item]}" for item in row] == [hit.item for hit in found.items]


def test_no_history_is_the_unconditional_ranking(bundle):
    nobody, unknown = ask(bundle, Query(), Query(history=("what", "ever")))
    assert nobody.items == unknown.items and nobody.history_items == unknown.history_items == 0
    assert [hit.item for hit in nobody.items] == expected(bundle, Query(width=200))[0]


def test_every_item_excluded_is_an_honest_short_answer(bundle):
    empty, some, hint = ask(
        bundle,
        Query(n=5, excluded=bundle.catalog.item_ids),
        Query(n=5, excluded=bundle.catalog.item_ids[3:]),
        Query(n=5, categories_any=("pink",)),
    )
    assert empty.items == () and "every item is unavailable, excluded" in (empty.short_reason or "")
    assert len(some.items) == 3 and "all but 3 of the 200 items" in (some.short_reason or "")
    assert hint.items == () and "'pink'" in (hint.short_reason or "")


def test_items_withdrawn_during_the_search_are_replaced(bundle):
    (before,) = ask(bundle, Query(history=("i5",), n=10, width=200))
    states = iter([NOTHING, Unavailable(1, frozenset(hit.item for hit in before.items[:4]))])
    last = NOTHING

    def current() -> Unavailable:
        nonlocal last
        last = next(states, last)
        return last

    (after,) = answer(bundle, [Query(history=("i5",), n=10, width=200)], current, time.perf_counter)
    assert len(after.items) == 10 and after.short_reason is None
    assert [hit.item for hit in after.items[:6]] == [hit.item for hit in before.items[4:]]


def test_items_that_keep_vanishing_shorten_the_list_and_are_counted(bundle):
    version = 0
    gone: set[str] = set()

    def current() -> Unavailable:
        nonlocal version
        version += 1
        if version % 2 == 0:  # asked after a search: everything that it can have found is gone
            gone.update(bundle.catalog.item_ids[:100] if version == 2 else bundle.catalog.item_ids)
        return Unavailable(version, frozenset(gone))

    (result,) = answer(bundle, [Query(n=10, width=200)], current, time.perf_counter)
    assert not {hit.item for hit in result.items} & gone
    assert len(result.items) < 10 and result.short_reason


def test_the_model_refuses_a_catalog_it_was_not_trained_for(world):
    other = world.add_catalog(digest="tokenizer-b")
    with pytest.raises(Conflict, match="use the catalog the model was trained for"):
        load_bundle(world.room.store, Pair(model=world.add_model(0), catalog=other))
    with pytest.raises(NotFound):
        load_bundle(world.room.store, Pair(model="models/sha256-" + "0" * 64, catalog=world.catalog_ref))


def test_damaged_files_are_refused(world):
    model = world.add_model(0)
    path = world.room.store.get(model) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        load_bundle(world.room.store, Pair(model=model, catalog=world.catalog_ref))


def test_weights_that_are_not_numbers_are_found_by_the_warm_up(world):
    folder = world.folder / "nan"
    from semantide.shared.models.generator import Generator

    from .world import make_model

    make_model(folder, 0, world.catalog_ref)
    generator = Generator.from_pretrained(folder)
    with torch.no_grad():
        generator.model.norm.weight.fill_(torch.nan)
    generator.save_pretrained(folder)
    bundle = load_bundle(world.room.store, Pair(model=world.room.store.put("models", folder), catalog=world.catalog_ref))
    with pytest.raises(PermanentError, match="not finite"):
        warm_up(bundle, time.perf_counter)
