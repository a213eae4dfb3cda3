from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.models.generator_decoder import PromptKV
from semantide.shared.models.prompt_cache import PromptCache, history_window


def prompt(tokens: int) -> PromptKV:
    return PromptKV(torch.arange(tokens), torch.zeros(1, 2, tokens, 1, 2))  # 24 bytes a token


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 5), st.integers(1, 12)), max_size=40))
def test_the_budget_holds_and_the_least_recently_seen_go_first(moves: list[tuple[str, int, int]]) -> None:
    cache = PromptCache(24 * 20)
    kept: dict[str, int] = {}
    for move, user, tokens in moves:
        name = str(user)
        if move == "p":
            cache.put(name, prompt(tokens))
            kept.pop(name, None)
            kept[name] = tokens
            while sum(kept.values()) > 20:
                kept.pop(next(iter(kept)))
        elif move == "g":
            found = cache.get(name)
            assert (None if found is None else len(found.tokens_t)) == kept.get(name)
            if name in kept:
                kept[name] = kept.pop(name)
        else:
            cache.drop(name)
            kept.pop(name, None)
        use = cache.use()
        assert (use.users, use.in_use_bytes) == (len(kept), 24 * sum(kept.values()))
    cache.clear()
    assert (cache.use().users, cache.use().in_use_bytes) == (0, 0)


def test_what_is_larger_than_the_budget_is_not_kept_and_replaces_nothing_but_its_own() -> None:
    cache = PromptCache(24 * 5)
    cache.put("a", prompt(3), tokens_read=3)
    cache.put("b", prompt(6), tokens_read=2)
    assert cache.get("b") is None
    assert cache.get("a") is not None
    use = cache.use()
    assert (use.hits, use.misses, use.tokens_asked, use.tokens_known) == (1, 1, 9, 4)
    nothing = PromptCache(0)
    nothing.put("a", prompt(1))
    assert nothing.get("a") is None
    with pytest.raises(ValueError, match="keeps nothing"):
        PromptCache(-1)


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 99))
def test_a_window_is_the_end_of_the_history_and_at_least_three_quarters_full(items: int, longest: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 1000, items)
    window = history_window(rows, longest)
    assert len(window) <= longest
    assert len(window) >= min(items, longest - longest // 4)
    np.testing.assert_array_equal(window, rows[items - len(window) :])
    # Where the stored history was cut does not matter as long as it holds the window.
    np.testing.assert_array_equal(window, history_window(rows[max(0, items - longest) :], longest))


@pytest.mark.parametrize("favourite", [0.0, 0.3])
def test_full_windows_mostly_begin_with_the_same_item(favourite: float) -> None:
    """Also where one item comes again and again."""
    rng = np.random.default_rng(0)
    rows = np.where(rng.random(1000) < favourite, 7, rng.integers(0, 10**6, 1000))
    begins = [end - len(history_window(rows[:end], 100)) for end in range(100, 1000)]
    assert all(later >= earlier for earlier, later in pairwise(begins))
    assert sum(later != earlier for earlier, later in pairwise(begins)) / len(begins) < 0.12
    with pytest.raises(ValueError, match="max_items is 0"):
        history_window(rows, 0)
