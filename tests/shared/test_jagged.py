import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.jagged import Jagged


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=6))
def test_sequences_come_back_with_positions_from_zero(sequences: list[list[int]]) -> None:
    jagged = Jagged.from_sequences(sequences)
    assert [row.tolist() for row in jagged] == sequences
    assert len(jagged) == len(sequences)
    assert jagged.positions_T().tolist() == [place for sequence in sequences for place in range(len(sequence))]
    if all(sequences):
        assert jagged.values[jagged.last_rows_B()].tolist() == [sequence[-1] for sequence in sequences]


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 3, 2, 3]])
def test_offsets_are_checked(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Jagged(torch.arange(3), torch.tensor(offsets, dtype=torch.long))
