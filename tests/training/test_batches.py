from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.batches import Epoch, Sampler
from semantide.services.training.recipes import tiny
from semantide.shared.errors import BadData

HISTORIES = st.lists(st.lists(st.integers(0, 999), max_size=12), min_size=1, max_size=20).filter(any)


def contents(epoch: Epoch) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sequence.tolist()) for index in range(len(epoch)) for sequence in epoch.batch(index).items)


@settings(deadline=None)
@given(HISTORIES, st.integers(1, 30), st.integers(0, 5))
def test_every_history_comes_once_an_epoch_and_batches_keep_the_budget(histories: list[list[int]], budget: int, number: int) -> None:
    sampler = Sampler([np.array(h, dtype=np.int64) for h in histories], replace(tiny(), skip_rate=0.0, max_items=50, items_per_batch=budget), seed=1)
    epoch = sampler.epoch(number)
    assert contents(epoch) == Counter(tuple(h) for h in histories if h)
    for index in range(len(epoch)):
        batch = epoch.batch(index)
        assert len(batch.items.values) <= budget + max(map(len, histories)) - 1
        assert batch.items.lengths_B.tolist() == sorted(batch.items.lengths_B.tolist())
    assert sampler.num_histories == sum(map(bool, histories))


@settings(deadline=None)
@given(HISTORIES, st.sampled_from(["last", "random", "mixed", "cover"]), st.integers(1, 6))
def test_crops_are_stretches_of_the_history_no_longer_than_allowed(histories: list[list[int]], crop: str, longest: int) -> None:
    histories = [[1000 * user + place for place in range(len(h))] for user, h in enumerate(histories)]
    sampler = Sampler([np.array(h, dtype=np.int64) for h in histories], replace(tiny(), skip_rate=0.0, max_items=longest, crop=crop), seed=2)  # type: ignore[arg-type]
    for piece in contents(sampler.epoch(0)):
        assert len(piece) <= longest
        assert list(piece) == list(range(piece[0], piece[0] + len(piece)))
        whole = histories[piece[0] // 1000]
        assert piece[-1] in whole
        if crop == "last":
            assert list(piece) == whole[-longest:]


def test_an_epoch_depends_on_seed_and_number_alone() -> None:
    histories = [np.arange(n) for n in range(1, 30)]
    config = replace(tiny(), crop="random", max_items=5, skip_rate=0.3, items_per_batch=16)

    def spelled(seed: int, number: int) -> list[list[int]]:
        sampler = Sampler(histories, config, seed)
        if number:
            sampler.epoch(0)
        epoch = sampler.epoch(number)
        return [epoch.batch(index).items.values.tolist() for index in range(len(epoch))]

    assert spelled(0, 3) == spelled(0, 3)
    assert spelled(0, 3) != spelled(0, 4) != spelled(1, 4)


def test_skipping_leaves_out_about_the_share_and_never_a_whole_history() -> None:
    sampler = Sampler([np.arange(40)] * 200 + [np.arange(1)] * 50 + [np.arange(2)] * 50, replace(tiny(), skip_rate=0.25), seed=0)
    pieces = list(contents(sampler.epoch(0)).elements())
    assert len(pieces) == 300
    assert all(sorted(piece) == list(piece) for piece in pieces)
    long = [len(piece) for piece in pieces if len(piece) > 2]
    assert abs(np.mean(long) - 30) < 1


def test_a_data_set_without_training_interactions_is_refused() -> None:
    with pytest.raises(BadData, match="no training interactions"):
        Sampler([np.zeros(0, dtype=np.int64)], tiny(), seed=0)
