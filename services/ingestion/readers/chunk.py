"""What every reader hands out: a piece of a file, and where to go on after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semantide.services.ingestion.schema import Rejection

BLOCK_BYTES = 8 * 1024 * 1024
ROWS_PER_CHUNK = 131_072


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, raw.

    ``records`` is a table or a list of JSON objects; ``rows`` numbers them within the file, from 0, without the header.
    ``position`` is where a restart goes on after this chunk; ``done`` is how much of the file's bytes lie before it.
    """

    records: pa.Table | Sequence[Mapping[str, Any]]
    rows: npt.NDArray[np.int64]
    position: str
    done: int
    rejections: list[Rejection] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.rows)
