"""Random numbers by address: a draw is a function of what it is for, so two recommenders meet the same luck and no result depends on the order of work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def uniform(seed: int, purpose: str, *address: npt.ArrayLike) -> Floats:
    """Numbers in [0, 1), one for each address; addresses are whole numbers and broadcast against each other.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, 2014), once for each part of the address.
    """
    begin = (seed * 0x9E3779B97F4A7C15 + int.from_bytes(purpose.encode()[:8], "little")) & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        words = _mixed(np.asarray(begin, dtype=np.uint64))
        for part in address:
            words = _mixed((words + _STEP) ^ np.asarray(part).astype(np.uint64) * _STEP)
        return (_mixed(words + _STEP) >> np.uint64(11)).astype(np.float64) * 2.0**-53
