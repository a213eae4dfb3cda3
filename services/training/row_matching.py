"""How the rows of a data set, of a catalog and of a model's item table answer to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from semantide.shared.errors import Conflict

IntArray = npt.NDArray[np.int64]


def rows_of(items: Sequence[str], row_of: Mapping[str, int], holder: str, remedy: str, least_share: float = 1.0) -> IntArray:
    """The row of each item in another table, -1 for what that lacks; it must have ``least_share`` of them.

    Raises: Conflict naming ``holder``, how many items it lacks, and some of them.
    """
    rows = np.array([row_of.get(item, -1) for item in items], dtype=np.int64)
    missing = np.flatnonzero(rows < 0)
    if len(missing) > (1 - least_share) * len(items):
        examples = ", ".join(repr(items[index]) for index in missing[:3])
        raise Conflict(f"{holder} lacks {len(missing)} of the data set's {len(items)} items ({examples}{', ...' if len(missing) > 3 else ''}): {remedy}")
    return rows


def inverse(rows: IntArray, size: int) -> IntArray:
    """For each row of the other table (``size`` of them) the row here, -1 where there is none."""
    back = np.full(size, -1, dtype=np.int64)
    there = np.flatnonzero(rows >= 0)
    back[rows[there]] = there
    return back
