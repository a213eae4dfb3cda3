"""JSON Lines in Arrow: fast while all rows of a block agree on their types, record by record where they do not."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json as paj

from semantide.services.ingestion.readers.chunk import Chunk
from semantide.services.ingestion.readers.textlines import blocks, json_chunks

_BRACKETS = 500  # in one line, beyond which Arrow does not see it: its parser recurses without a bound and takes the process along


def table_chunks(path: Path, start: str, usable: Callable[[pa.Table], bool], *, python_literals: bool = False) -> Iterator[Chunk]:
    """Blocks as tables with inferred types where those are ``usable``, else as records."""
    for block in blocks(path, start):
        table = _parsed(block.lines) if block.lines and not block.rejections else None
        if table is None or not usable(table):
            # Only this block, line by line: a chunk ends where the block does.
            yield next(json_chunks(path, start, python_literals=python_literals))
        else:
            yield Chunk(table, np.array(block.rows, dtype=np.int64), block.position, block.done)
        start = block.position


def _parsed(lines: Sequence[str]) -> pa.Table | None:
    if any(line.count("[") + line.count("{") > _BRACKETS for line in lines):
        return None
    try:
        table = paj.read_json(io.BytesIO("\n".join(lines).encode()), read_options=paj.ReadOptions(block_size=1 << 28, use_threads=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return table if table.num_rows == len(lines) else None
