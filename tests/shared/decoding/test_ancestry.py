import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.decoding.ancestry import Ancestry

Path = list[int]


@given(st.integers(1, 4), st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_reordering_touches_the_index_only_and_paths_are_those_of_a_copying_implementation(requests: int, steps: int, ragged: bool, random) -> None:  # type: ignore[no-untyped-def]
    ancestry = Ancestry(requests)
    record = torch.empty(0, dtype=torch.long)
    paths: list[list[Path]] = [[[]] for _ in range(requests)]
    for _ in range(steps):
        width = random.randrange(1, 6)
        counts = [random.randrange(width + 1) if paths[r] and ragged else width * bool(paths[r]) for r in range(requests)]
        parents = [[random.randrange(len(paths[r])) if w < counts[r] else 0 for w in range(width)] for r in range(requests)]
        before = [0, *itertools.accumulate(len(beams) for beams in paths)]
        followed = ancestry.extend(torch.tensor(parents), counts)
        assert followed.tolist() == [before[r] + parents[r][w] for r in range(requests) for w in range(counts[r])]
        record = torch.cat([record, torch.randint(100, (sum(counts),), generator=torch.Generator().manual_seed(random.randrange(99)))])
        codes = iter(record[len(record) - sum(counts) :].tolist())
        paths = [[[*paths[r][parents[r][w]], next(codes)] for w in range(counts[r])] for r in range(requests)]
        assert ancestry.sequences(record).tolist() == [path for beams in paths for path in beams]
        tables = [(run.first, run.last, run.width, record[run.rows_RWS].tolist()) for run in ancestry.runs()]
        assert [beams for *_, table in tables for beams in table] == paths
        assert all(last == first and before != width for (_, last, before, _), (first, _, width, _) in itertools.pairwise(tables))
        if random.random() < 0.3:
            kept = sorted(random.sample(range(requests), random.randint(1, requests)))
            requests, paths = len(kept), [paths[request] for request in kept]
            _, rows = ancestry.keep(kept)
            record = record[rows]
            assert ancestry.num_rows == len(record) == len(torch.unique(ancestry.rows_BS))
            assert ancestry.sequences(record).tolist() == [path for beams in paths for path in beams]


def test_a_parent_that_does_not_exist_is_refused() -> None:
    ancestry = Ancestry(2)
    with pytest.raises(ValueError, match="parents from 0 to 1"):
        ancestry.extend(torch.tensor([[0, 1], [0, 0]]))
    with pytest.raises(ValueError, match="one row per request"):
        ancestry.extend(torch.tensor([[0]]))
    with pytest.raises(ValueError, match="one count per request"):
        ancestry.extend(torch.tensor([[0], [0]]), [1, 2])
    ancestry.extend(torch.tensor([[0, 0, 0], [0, 0, 0]]), [3, 1])
    with pytest.raises(ValueError, match="the last step had"):
        ancestry.extend(torch.tensor([[0, 2], [0, 1]]))
