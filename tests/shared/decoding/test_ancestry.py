import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.decoding.ancestry import Ancestry


@given(st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_reordering_touches_the_index_only_and_paths_are_those_of_a_copying_implementation(requests: int, widths: list[int], random) -> None:  # type: ignore[no-untyped-def]
    ancestry = Ancestry(requests)
    record: list[int] = []
    paths: list[list[list[int]]] = [[[]] for _ in range(requests)]
    for width in widths:
        parents = [[random.randrange(len(paths[r])) for _ in range(width)] for r in range(requests)]
        codes = [[random.randrange(100) for _ in range(width)] for _ in range(requests)]
        before = len(record)
        rows = ancestry.extend(torch.tensor(parents))
        assert sorted(rows.flatten().tolist()) == list(range(before, before + requests * width))
        record += [code for row in codes for code in row]
        paths = [[[*paths[r][parents[r][w]], codes[r][w]] for w in range(width)] for r in range(requests)]
        assert ancestry.sequences(torch.tensor(record)).tolist() == paths


def test_a_parent_that_does_not_exist_is_refused() -> None:
    ancestry = Ancestry(2)
    with pytest.raises(ValueError, match="parents"):
        ancestry.extend(torch.tensor([[0, 1], [0, 0]]))
    with pytest.raises(ValueError, match="one row per request"):
        ancestry.extend(torch.tensor([[0]]))
