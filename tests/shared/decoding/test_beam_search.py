import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.beam_search import Search, beam_search
from semantide.shared.decoding.brute_force import best_items, score_every_item
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.trie import Trie

from .table_model import TableModel, prompts, random_codes

QUICK = settings(max_examples=60, deadline=None)


def catalog(seed: int, items: int, level_sizes: tuple[int, ...]) -> tuple[np.ndarray, SearchTrie]:
    codes = random_codes(torch.Generator().manual_seed(seed), items, level_sizes).numpy()
    return codes, SearchTrie.build(Trie.build(codes))


def filter_of(trie: SearchTrie, masks: list[np.ndarray], mask_of: list[int], excluded: list[list[int]]) -> ItemFilter:
    return ItemFilter.build(trie, [trie.prefix_counts(mask) for mask in masks], mask_of, excluded)


@st.composite
def cases(draw):
    level_sizes = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    items = draw(st.integers(1, min(int(np.prod(level_sizes)), 60)))
    requests = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    masks = [rng.random(items) < draw(st.sampled_from([0.0, 0.1, 0.7, 1.0])) for _ in range(draw(st.integers(1, 2)))]
    mask_of = [int(rng.integers(len(masks))) for _ in range(requests)]
    excluded = [rng.integers(0, items, draw(st.integers(0, items + 2))).tolist() for _ in range(requests)]
    return level_sizes, items, requests, seed, masks, mask_of, excluded, draw(st.sampled_from([0.0, 1.0]))


@QUICK
@given(cases())
def test_with_all_prefixes_it_is_brute_force_of_the_filtered_catalog(case):
    level_sizes, items, requests, seed, masks, mask_of, excluded, rounding = case
    codes, trie = catalog(seed, items, level_sizes)
    items = len(codes)
    masks = [mask[:items] for mask in masks]
    model = TableModel(level_sizes, seed, rounding=rounding)
    tokens, offsets = prompts(torch.Generator().manual_seed(seed), requests)
    scores = score_every_item(model, codes, tokens, offsets)
    chosen = filter_of(trie, masks, mask_of, excluded)
    hits = beam_search(model, trie, tokens, offsets, items + 1, node_filter=chosen)
    for request in range(requests):
        allowed = masks[mask_of[request]].copy()
        allowed[excluded[request]] = False
        count = int(hits.counts_R[request])
        rows = hits.rows_RW[request, :count].numpy()
        assert count == allowed.sum() == chosen.allowed[request]
        assert set(rows) == set(np.flatnonzero(allowed))
        np.testing.assert_allclose(hits.scores_RW[request, :count], scores[request, rows], atol=1e-5)
        if count > 1 and np.diff(np.sort(scores[request, rows])).min() > 1e-5:  # nearer than that, float32 may order them either way
            np.testing.assert_array_equal(rows, best_items(scores[request], codes, allowed, items))
        np.testing.assert_allclose(hits.level_scores_RWL[request, :count].sum(1), hits.scores_RW[request, :count], atol=1e-9)
        assert (hits.rows_RW[request, count:] == -1).all() and (hits.scores_RW[request, count:] == -torch.inf).all()
        assert hits.complete(request, items)
        assert int(hits.dead_ends_R[request]) == 0


@QUICK
@given(cases(), st.data())
def test_any_width_gives_as_many_valid_items_as_are_allowed(case, data):
    level_sizes, items, requests, seed, masks, mask_of, excluded, rounding = case
    codes, trie = catalog(seed, items, level_sizes)
    masks = [mask[: len(codes)] for mask in masks]
    model = TableModel(level_sizes, seed, rounding=rounding)
    tokens, offsets = prompts(torch.Generator().manual_seed(seed), requests)
    widths = [data.draw(st.integers(1, items + 2)) for _ in range(requests)]
    chosen = filter_of(trie, masks, mask_of, excluded)
    hits = beam_search(model, trie, tokens, offsets, widths, node_filter=chosen)
    scores = score_every_item(model, codes, tokens, offsets)
    for request in range(requests):
        allowed = masks[mask_of[request]].copy()
        allowed[excluded[request]] = False
        count = int(hits.counts_R[request])
        rows = hits.rows_RW[request, :count].numpy()
        assert count == min(widths[request], allowed.sum())
        assert allowed[rows].all() and len(set(rows)) == count
        np.testing.assert_allclose(hits.scores_RW[request, :count], scores[request, rows], atol=1e-5)
        for n in range(1, count + 1):
            if hits.complete(request, n):  # the certificate never lies
                outside = np.setdiff1d(np.flatnonzero(allowed), rows[:n])
                assert not len(outside) or scores[request, outside].max() <= scores[request, rows[n - 1]] + 1e-5


def test_a_thousand_items_equal_brute_force_at_every_kind_of_width():
    level_sizes = (16, 16, 16)
    codes, trie = catalog(3, 1000, level_sizes)
    model = TableModel(level_sizes, 3)
    tokens, offsets = prompts(torch.Generator().manual_seed(3), 6)
    scores = score_every_item(model, codes, tokens, offsets)
    everything = np.ones(1000, dtype=bool)
    hits = beam_search(model, trie, tokens, offsets, [1001, 1000, 1001, 1000, 5000, 1001])
    for request in range(6):
        np.testing.assert_array_equal(hits.rows_RW[request], best_items(scores[request], codes, everything, 1000))
        np.testing.assert_allclose(hits.scores_RW[request], np.sort(scores[request])[::-1], atol=1e-5)


def test_requests_of_one_batch_do_not_touch_each_other():
    level_sizes = (9, 8, 7, 3)
    _, trie = catalog(5, 300, level_sizes)
    model = TableModel(level_sizes, 5)
    tokens, offsets = prompts(torch.Generator().manual_seed(5), 5)
    widths = [1, 300, 7, 64, 2]
    rng = np.random.default_rng(0)
    masks = [np.ones(300, dtype=bool), rng.random(300) < 0.3]
    mask_of, excluded = [0, 1, 1, 0, 0], [[], [3, 4], [], list(range(100)), [7, 7]]
    together = beam_search(model, trie, tokens, offsets, widths, node_filter=filter_of(trie, masks, mask_of, excluded))
    for request in range(5):
        a, b = int(offsets[request]), int(offsets[request + 1])
        alone = beam_search(
            model, trie, tokens[a:b], torch.tensor([0, b - a]), widths[request], node_filter=filter_of(trie, masks, [mask_of[request]], [excluded[request]])
        )
        count = int(alone.counts_R[0])
        assert count == int(together.counts_R[request])
        torch.testing.assert_close(together.rows_RW[request, :count], alone.rows_RW[0, :count])
        torch.testing.assert_close(together.scores_RW[request, :count], alone.scores_RW[0, :count])


def test_equal_scores_are_settled_by_the_codes_at_every_width():
    level_sizes = (4, 4, 4)
    codes, trie = catalog(1, 64, level_sizes)
    model = TableModel(level_sizes, 1, spread=0.0)
    for width in (1, 3, 10, 17, 64):
        hits = beam_search(model, trie, torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]), width)
        assert [tuple(codes[row]) for row in hits.rows_RW[0]] == sorted(map(tuple, codes))[:width]


@pytest.mark.parametrize("codes", [[[0]], [[4, 3, 2, 1]], [[0, 0], [0, 1]], [[i] for i in range(9)]])
def test_odd_tries(codes):
    array = np.array(codes)
    trie = SearchTrie.build(Trie.build(array))
    model = TableModel((9, 9, 9, 9)[: array.shape[1]], 2)
    hits = beam_search(model, trie, torch.tensor([1, 2]), torch.tensor([0, 2]), 4)
    assert int(hits.counts_R[0]) == min(4, len(codes))


def test_every_beam_ends_in_exactly_as_many_steps_as_levels():
    level_sizes = (9, 8, 7)
    _, trie = catalog(5, 200, level_sizes)
    model = TableModel(level_sizes, 5)
    beam_search(model, trie, torch.tensor([1]), torch.tensor([0, 1]), 128)
    assert [level for level, _, _ in model.calls] == [0, 1, 2]
    assert all(width <= 128 for _, _, width in model.calls)


class Vanishing:
    """Items that are withdrawn between two levels."""

    def __init__(self, before: ItemFilter, after: ItemFilter, from_depth: int) -> None:
        self.before, self.after, self.from_depth = before, after, from_depth

    def at(self, depth):
        return self.after if depth >= self.from_depth else self.before


def test_a_dead_end_shortens_the_list_is_counted_and_never_frees_the_constraint():
    level_sizes = (6, 6, 6)
    codes, trie = catalog(8, 120, level_sizes)
    model = TableModel(level_sizes, 8)
    prompt, offsets = torch.tensor([3, 1]), torch.tensor([0, 2])
    everything = np.ones(120, dtype=bool)
    first = beam_search(model, trie, prompt, offsets, 10)
    gone = np.isin(codes[:, 0], codes[first.rows_RW[0].numpy(), 0])  # everything below the prefixes that win
    before, after = filter_of(trie, [everything], [0], [[]]), filter_of(trie, [~gone], [0], [[]])
    narrow = beam_search(model, trie, prompt, offsets, 2, node_filter=Vanishing(before, after, 2))
    assert int(narrow.counts_R[0]) < 2
    assert int(narrow.dead_ends_R[0]) > 0
    wide = beam_search(model, trie, prompt, offsets, 120, node_filter=Vanishing(before, after, 3))
    rows = wide.rows_RW[0, : int(wide.counts_R[0])].numpy()
    assert set(rows) == set(np.flatnonzero(~gone)) and int(wide.dead_ends_R[0]) > 0


def test_nothing_allowed_is_an_empty_answer_without_a_step():
    level_sizes = (6, 6)
    _, trie = catalog(8, 30, level_sizes)
    model = TableModel(level_sizes, 8)
    nothing = filter_of(trie, [np.zeros(30, dtype=bool)], [0], [[]])
    hits = beam_search(model, trie, torch.tensor([0]), torch.tensor([0, 1]), 5, node_filter=nothing)
    assert int(hits.counts_R[0]) == 0 and (hits.rows_RW == -1).all() and int(hits.dead_ends_R[0]) == 0
    assert [level for level, _, _ in model.calls] == [0]


def test_scores_among_children_are_a_distribution_over_the_catalog_and_filters_do_not_change_them():
    level_sizes = (6, 6, 6)
    _, trie = catalog(9, 50, level_sizes)
    model = TableModel(level_sizes, 9)
    prompt, offsets = torch.tensor([3, 1]), torch.tensor([0, 2])
    free = beam_search(model, trie, prompt, offsets, 50, normalisation="children")
    assert float(free.scores_RW.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    mask = np.arange(50) % 3 > 0
    some = beam_search(model, trie, prompt, offsets, 50, node_filter=filter_of(trie, [mask], [0], [[]]), normalisation="children")
    score_of = dict(zip(free.rows_RW[0].tolist(), free.scores_RW[0].tolist(), strict=True))
    count = int(some.counts_R[0])
    assert count == mask.sum()
    assert [score_of[row] for row in some.rows_RW[0, :count].tolist()] == pytest.approx(some.scores_RW[0, :count].tolist())


def test_wrong_arguments_are_refused():
    _, trie = catalog(8, 30, (6, 6))
    one = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="width 0: give at least 1"):
        beam_search(TableModel((6, 6), 1), trie, torch.tensor([0]), one, 0)
    with pytest.raises(ValueError, match="2 widths for 1 requests"):
        beam_search(TableModel((6, 6), 1), trie, torch.tensor([0]), one, [3, 4])
    with pytest.raises(ValueError, match="at least one request"):
        beam_search(TableModel((6, 6), 1), trie, torch.tensor([0]), torch.tensor([0]), [])
    with pytest.raises(ValueError, match="the model has 3 codes at level 0"):
        beam_search(TableModel((3, 6), 1), trie, torch.tensor([0]), one, 4)
    with pytest.raises(ValueError, match="no items"):
        SearchTrie.build(Trie.build(np.zeros((0, 3), dtype=np.int64)))
    broken = TableModel((6, 6), 1)
    broken.tables[1][:, 0] = torch.nan
    with pytest.raises(PermanentError, match="level 1 are not finite"):
        beam_search(broken, trie, torch.tensor([0]), one, 4)


def test_a_code_of_probability_zero_is_still_a_valid_item():
    _, trie = catalog(8, 36, (6, 6))
    model = TableModel((6, 6), 1)
    model.tables[1][:, 0] = -torch.inf
    hits = beam_search(model, trie, torch.tensor([0]), torch.tensor([0, 1]), 36)
    assert int(hits.counts_R[0]) == 36 and torch.isfinite(hits.scores_RW).all()


def test_the_search_can_be_driven_from_outside():
    level_sizes = (6, 6, 6)
    _, trie = catalog(9, 50, level_sizes)
    model = TableModel(level_sizes, 9)
    prompt, offsets = torch.tensor([3, 1]), torch.tensor([0, 2])
    search = Search(trie, [8])
    logits, state = model.begin(prompt, offsets)
    while (extension := search.select(logits)) is not None:
        logits = model.step(state, search.level, *extension)
    assert torch.equal(search.hits().rows_RW, beam_search(model, trie, prompt, offsets, 8).rows_RW)


def test_masks_of_a_catalog_are_not_made_or_copied_for_a_search():
    _, trie = catalog(0, 40, (4, 5, 6))
    assert torch.equal(trie.every_item, trie.prefix_counts(np.ones(40, dtype=bool))) and trie.every_item is trie.every_item
    assert ItemFilter.build(trie, [trie.every_item], [0, 0], [[1], []]).counts_BN1.data_ptr() == trie.every_item.data_ptr()


def test_a_search_may_lose_all_its_requests():
    _, trie = catalog(0, 40, (4, 5, 6))
    search = Search(trie, [3, 9])
    assert search.select(torch.zeros(2, 4)) is not None
    search.keep([])
    assert search.counts == ()
