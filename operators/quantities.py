"""Kubernetes quantities (``100m``, ``16Gi``, ``1e3``) as numbers."""

from __future__ import annotations

import math
import re
from functools import lru_cache

_SUFFIXES = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([numkKMGTPE]?i?)")


def quantity(text: str | float) -> float:
    """The number that a quantity stands for.

    Raises: ValueError.
    """
    return _number(str(text).strip())


@lru_cache(maxsize=1 << 14)
def _number(text: str) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity: write it like 2, 500m or 16Gi")
    return float(found[1]) * _SUFFIXES[found[2]]


def whole(text: str | float, parts: int = 1) -> int:
    """A quantity in whole ``parts`` of its unit, rounded up as Kubernetes' scheduler counts it: sums of these are exact, and what just fits does fit.

    Raises: ValueError.
    """
    number = parts * quantity(text)
    if not math.isfinite(number):
        raise ValueError(f"{str(text)[:60]!r} is more than anything has: write a smaller quantity, like 2, 500m or 16Gi")
    return math.ceil(round(number, 6))
