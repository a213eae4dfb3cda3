"""Parquet files, some row groups and some columns at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.ingestion.readers.chunk import ROWS_PER_CHUNK, Chunk
from semantide.shared.errors import BadData


def opened(path: Path) -> pq.ParquetFile:
    """The file with its footer read.

    Raises: BadData where it is cut off or no Parquet at all.
    """
    if path.stat().st_size == 0:
        raise BadData(f"{path.name} is empty: export it again, or leave it out of the folder")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadData(
            f"{path.name} cannot be read as Parquet ({error}): it is cut off or damaged, export or copy it again; nothing of it was imported"
        ) from error


def chunks(path: Path, start: str, columns: Sequence[str]) -> Iterator[Chunk]:
    """Chunks of rows with their own types. A position is the number of rows before it."""
    skip = int(start or 0)
    size = path.stat().st_size
    with opened(path) as file:
        total = max(1, file.metadata.num_rows)
        before = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if before + count <= skip:
                before += count
                continue
            try:
                for batch in file.iter_batches(ROWS_PER_CHUNK, row_groups=[group], columns=list(columns)):
                    begin = max(0, skip - before)
                    if begin < batch.num_rows:
                        end = before + batch.num_rows
                        table = pa.Table.from_batches([batch]).slice(begin)
                        yield Chunk(table, np.arange(before + begin, end, dtype=np.int64), str(end), size * end // total)
                    before += batch.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                if getattr(error, "errno", None) is not None:
                    raise
                raise BadData(f"{path.name}, rows {before} and following: {error}: the file is damaged, copy it again and resume the import") from error
