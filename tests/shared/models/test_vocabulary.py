import numpy as np
import pytest

from semantide.shared.models.vocabulary import Layout, Vocabulary


def test_levels_lie_one_after_another_behind_the_begin_token() -> None:
    vocabulary = Vocabulary((3, 2))
    assert (vocabulary.size, vocabulary.levels, vocabulary.row(0), vocabulary.row(1)) == (6, 2, slice(1, 4), slice(4, 6))
    tokens = vocabulary.item_tokens(np.array([[2, 0], [0, 1]]))
    assert tokens.tolist() == [[3, 4], [1, 5]]
    assert vocabulary.history_tokens(tokens[[1, 0]]).tolist() == [0, 1, 5, 3, 4]
    assert vocabulary.history_tokens(tokens[:0]).tolist() == [0]


def test_codes_outside_their_level_are_named() -> None:
    with pytest.raises(ValueError, match=r"code 2 of item row 1 at level 1 is outside 0\.\.1"):
        Vocabulary((3, 2)).item_tokens(np.array([[0, 1], [0, 2]]))
    with pytest.raises(ValueError, match="shape"):
        Vocabulary((3, 2)).item_tokens(np.array([[0]]))
    with pytest.raises(ValueError, match="at least one"):
        Vocabulary(())


def test_a_layout_puts_codes_anywhere_and_tokens_around_items():
    vocabulary = Vocabulary((3, 2), Layout(begin=(9, 1), between=(2,), end=(8, 8), firsts=(20, 10)))
    tokens = vocabulary.item_tokens(np.array([[2, 0], [0, 1]]))
    assert (vocabulary.size, vocabulary.row(0), vocabulary.row(1), tokens.tolist()) == (23, slice(20, 23), slice(10, 12), [[22, 10], [20, 11]])
    assert vocabulary.history_tokens(tokens).tolist() == [9, 1, 22, 10, 2, 20, 11, 8, 8]
    assert vocabulary.history_tokens(tokens[:0]).tolist() == [9, 1, 8, 8]
    assert Layout.of(vocabulary.layout.to_json()) == vocabulary.layout
    with pytest.raises(ValueError, match="only one begin token"):
        _ = vocabulary.begin
    for wrong in ({"firsts": (1, 2)}, {"firsts": (1,)}, {"begin": ()}, {"end": (-1,)}):
        with pytest.raises(ValueError):
            Vocabulary((3, 2), Layout(**wrong))
