"""The first vectors of a table's rows: each number is a function of seed, row and feature alone.

So any share of a table can be made where it will lie, and is the same however the rows are dealt out. A number is the sum of the four 16-bit parts of a
hash, which is close to normal, and is exact arithmetic up to the last product: the same bits on every machine.
Legend: N rows, D features.
Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (the hash), OOPSLA 2014.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROWS = 4096  # at a time: what lies between is then a few MB
_SHIFTS = tuple(np.uint64(shift) for shift in (0, 16, 32, 48))
_MEAN, _DEVIATION = 2 * 65535.0, math.sqrt((65536.0**2 - 1) / 3)  # of the sum of four numbers below 65536


def first_rows(rows_N: Tensor, size: int, std: float, seed: int) -> Tensor:
    """Vectors of some rows: [N, D] float32, of mean 0 and deviation ``std``."""
    vectors_ND = np.empty((len(rows_N), size), dtype=np.float32)
    features_D = np.arange(1, size + 1, dtype=np.uint64) * _STEP
    start = hashed(np.array([seed], dtype=np.int64).view(np.uint64))
    rows = rows_N.cpu().numpy().astype(np.uint64)
    for begin in range(0, len(rows), _ROWS):
        keys_N1 = hashed(start + rows[begin : begin + _ROWS] * _STEP)[:, None]
        words_ND = hashed(keys_N1 + features_D)
        sums_ND = sum(((words_ND >> shift) & np.uint64(0xFFFF) for shift in _SHIFTS), np.zeros_like(words_ND))
        vectors_ND[begin : begin + _ROWS] = (sums_ND.astype(np.float64) - _MEAN) * (std / _DEVIATION)
    return torch.from_numpy(vectors_ND)


def hashed(words: Words) -> Words:
    """Each word mixed so that every bit of it decides about every bit of the result; no two words meet."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
