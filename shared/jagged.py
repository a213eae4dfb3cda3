"""One container for sequences of different lengths: all values one after another, and where each sequence begins.

Legend: T values of all sequences, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """Packed sequences.

    Shapes: ``values`` [T, ...]; ``offsets_B1`` [B + 1], int64, first 0, last T.
    """

    values: Tensor
    offsets_B1: Tensor

    def __post_init__(self) -> None:
        shape, values = tuple(self.offsets_B1.shape), len(self.values)
        if len(shape) != 1 or shape[0] == 0 or int(self.offsets_B1[0]) != 0 or int(self.offsets_B1[-1]) != values:
            raise ValueError(f"offsets of shape {shape} do not cover {values} values: give [sequences + 1], from 0 to the number of values")
        if bool((self.offsets_B1[1:] < self.offsets_B1[:-1]).any()):
            raise ValueError("offsets descend: give them in ascending order")

    @classmethod
    def from_sequences(cls, sequences: Iterable[Sequence[int] | npt.NDArray[np.integer]]) -> Jagged:
        """Pack integer sequences."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        return cls(torch.from_numpy(values), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])))

    @property
    def lengths_B(self) -> Tensor:
        """Length of each sequence."""
        return self.offsets_B1.diff()

    def positions_T(self) -> Tensor:
        """Place of each value inside its own sequence, from 0."""
        return torch.arange(len(self.values), device=self.values.device) - self.offsets_B1[:-1].repeat_interleave(self.lengths_B)

    def last_rows_B(self) -> Tensor:
        """Row of each sequence's last value; sequences must not be empty."""
        return self.offsets_B1[1:] - 1

    def to(self, device: torch.device | str) -> Jagged:
        """The same on another device."""
        return Jagged(self.values.to(device), self.offsets_B1.to(device))

    def __len__(self) -> int:
        return len(self.offsets_B1) - 1

    def __iter__(self) -> Iterator[Tensor]:
        bounds = self.offsets_B1.tolist()
        for begin, end in pairwise(bounds):
            yield self.values[begin:end]
