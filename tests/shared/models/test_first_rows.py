import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.models.first_rows import first_rows, hashed
from semantide.shared.models.item_table import LocalTable


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 1 << 40))
def test_any_share_of_a_table_is_that_part_of_the_whole(rows: int, size: int, shares: int, seed: int) -> None:
    whole = first_rows(torch.arange(rows), size, 0.1, seed)
    for rank in range(shares):
        assert torch.equal(first_rows(torch.arange(rank, max(rows, rank), shares), size, 0.1, seed), whole[rank::shares])


def test_they_are_near_normal_and_of_the_deviation_that_was_asked_for() -> None:
    numbers = first_rows(torch.arange(20_000), 16, 0.02, 3).double()
    assert abs(float(numbers.mean())) < 1e-4
    assert abs(float(numbers.std()) / 0.02 - 1) < 0.01
    within = [float((numbers.abs() < 0.02 * deviations).double().mean()) for deviations in (1, 2)]
    assert abs(within[0] - 0.6827) < 0.02 and abs(within[1] - 0.9545) < 0.01
    apart = torch.corrcoef(numbers[:200]) - torch.eye(200)
    assert abs(float(apart.mean())) < 0.01 and abs(float(apart.std()) * 4 - 1) < 0.1  # as of 16 independent numbers
    assert not torch.equal(first_rows(torch.arange(5), 4, 1.0, 1), first_rows(torch.arange(5), 4, 1.0, 2))


def test_the_same_bits_on_every_machine() -> None:
    assert hashed(np.array([1, 2], dtype=np.uint64)).tolist() == [6238072747940578789, 15839785061582574730]
    assert first_rows(torch.tensor([0, 7]), 2, 1.0, 5).tolist() == first_rows(torch.tensor([7, 0]), 2, 1.0, 5)[[1, 0]].tolist()


def test_the_generator_of_torch_has_no_part_in_it() -> None:
    torch.manual_seed(1)
    first = LocalTable(6, 4, seed=9).weight_ND
    torch.manual_seed(2)
    assert torch.equal(first, LocalTable(6, 4, seed=9).weight_ND)
    assert torch.equal(first[1::2], LocalTable(3, 4, seed=9, rows=slice(1, None, 2)).weight_ND)
