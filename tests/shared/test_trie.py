from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.trie import Trie

ids = st.integers(1, 4).flatmap(lambda levels: st.lists(st.tuples(*[st.integers(0, 5)] * levels), min_size=1, max_size=60, unique=True))


@settings(max_examples=60, deadline=None)
@given(ids)
def test_every_id_is_found_and_children_are_the_codes_that_follow(rows: list[tuple[int, ...]]) -> None:
    codes = np.array(rows)
    trie = Trie.build(codes)
    for row, code in enumerate(rows):
        leaf = trie.find(code)
        assert leaf is not None and trie.leaf_items[leaf] == row
        for depth in range(codes.shape[1]):
            node = trie.find(code[:depth])
            assert node is not None
            children, nodes = trie.children(depth, node)
            assert children.tolist() == sorted({other[depth] for other in rows if other[:depth] == code[:depth]})
            assert len(nodes) == len(children)


@settings(max_examples=60, deadline=None)
@given(ids, st.data())
def test_leaf_ranges_hold_the_items_below_a_prefix(rows: list[tuple[int, ...]], data: st.DataObject) -> None:
    trie = Trie.build(np.array(rows))
    depth = data.draw(st.integers(0, len(rows[0])))
    prefix = data.draw(st.sampled_from(rows))[:depth]
    node = trie.find(prefix)
    assert node is not None
    bounds = trie.leaf_ranges(depth)
    assert {rows[row] for row in trie.leaf_items[bounds[node] : bounds[node + 1]]} == {row for row in rows if row[:depth] == prefix}


def test_an_unknown_prefix_is_none() -> None:
    trie = Trie.build(np.array([[1, 2], [1, 3]]))
    assert trie.find([0]) is None and trie.find([1, 4]) is None


def test_equal_ids_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"items 0 and 2 share"):
        Trie.build(np.array([[1, 2], [0, 0], [1, 2]]))


def test_an_empty_trie_has_only_a_root() -> None:
    trie = Trie.build(np.zeros((0, 3), np.int64))
    assert trie.levels == 3 and trie.find([]) == 0 and trie.find([1]) is None


def test_codes_must_be_a_table() -> None:
    with pytest.raises(ValueError, match="shape"):
        Trie.build(np.zeros(3, np.int64))
