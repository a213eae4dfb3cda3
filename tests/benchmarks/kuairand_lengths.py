"""Lengths of histories as KuaiRand-27K has them, the workload of TurboGR, scaled to what a CPU can train on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def kuairand_lengths(data: Path | None, count: int, scale: float, longest: int, rng: np.random.Generator) -> IntArray:
    """Drawn lengths, divided by ``scale`` and cut to 1 ... ``longest``.

    By the inverse of the published distribution in log space; where its file is absent, log-normal with the published mean and median, and it says so.
    """
    path = None if data is None else data / "kuairand" / "kuairand27k_len_quantiles.csv"
    if path is not None and path.exists():
        percent, exposures = np.loadtxt(path, delimiter=",", comments="#").T
        drawn = np.exp(np.interp(rng.random(count) * 100, percent, np.log(exposures)))
    else:
        sys.stderr.write(f"no {path}: lengths are log-normal with the published mean 11,812 and median 8,591\n")
        drawn = 8591 * np.exp(np.sqrt(2 * np.log(11812 / 8591)) * rng.standard_normal(count))
    return (np.clip(drawn, 100, 228_000) / scale).astype(np.int64).clip(1, longest)
