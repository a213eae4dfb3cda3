"""CSV and its relatives: any delimiter, quoted line breaks, rows of a wrong width told apart."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pac

from semantide.services.ingestion.readers.chunk import BLOCK_BYTES, Chunk
from semantide.services.ingestion.readers.textlines import first_line
from semantide.services.ingestion.schema import Rejection, shown
from semantide.shared.errors import BadData

_DELIMITERS = (",", "\t", ";", "|")


def header(path: Path, delimiter: str = "", encoding: str = "utf-8") -> tuple[list[str], str]:
    """The names in the first line, and the delimiter between them.

    Raises: BadData where the file is empty.
    """
    line = first_line(path, encoding)
    if line is None:
        raise BadData(f"{path.name} is empty: export it again, or leave it out of the folder")
    if not delimiter:
        counts = {mark: len(next(csv.reader([line], delimiter=mark))) for mark in _DELIMITERS}
        delimiter = max(_DELIMITERS, key=lambda mark: counts[mark])
    return [name.strip() for name in next(csv.reader([line], delimiter=delimiter))], delimiter


def chunks(path: Path, start: str, *, delimiter: str = "", names: Sequence[str] = (), columns: Sequence[str] = (), encoding: str = "utf-8") -> Iterator[Chunk]:
    """Chunks of rows, every column as bytes. ``names`` given: the file has no header. ``columns``: the ones wanted.

    A position is the number of rows before it, good and bad.
    """
    found, delimiter = (list(names), delimiter) if names else header(path, delimiter, encoding)
    if len(set(found)) < len(found):
        doubled = sorted({name for name in found if found.count(name) > 1})
        raise BadData(f"{path.name}: column {doubled[0]!r} appears more than once: rename one of them")
    skip = int(start or 0)
    refused: dict[int, Rejection] = {}
    # The reader counts from 1 and counts the header.
    base = 1 if names else 2

    def broken(row: pac.InvalidRow) -> str:
        number = row.number - base
        refused[number] = Rejection(
            number,
            "row",
            shown(row.text or ""),
            f"{row.actual_columns} columns instead of {row.expected_columns}",
            "correct the row; values with the delimiter in them go in quotes",
        )
        return "skip"

    size = path.stat().st_size
    with path.open("rb") as raw:
        stream = pa.input_stream(pa.PythonFile(raw, mode="r"), compression="gzip" if path.suffix == ".gz" else None)
        try:
            reader = pac.open_csv(
                stream,
                read_options=pac.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=found, skip_rows=0 if names else 1, encoding=encoding),
                parse_options=pac.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=broken),
                convert_options=pac.ConvertOptions(
                    column_types={name: pa.binary() if encoding == "utf-8" else pa.string() for name in found},
                    include_columns=list(columns) or None,
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    null_values=["", "NULL", "null", "None", "NaN", "nan", r"\N"],
                ),
            )
            position = 0
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                rows, position = _numbers(position, batch.num_rows, refused)
                begin = int(np.searchsorted(rows, skip))
                passed = [refused.pop(number) for number in sorted(refused) if number < position]
                if position <= skip:
                    continue
                table = pa.Table.from_batches([batch]).slice(begin)
                yield Chunk(table, rows[begin:], str(position), min(size, raw.tell()), [rejection for rejection in passed if rejection.row >= skip])
            left = [refused[number] for number in sorted(refused) if number >= skip]
            if left:
                empty = pa.table({name: pa.array([], pa.string()) for name in columns or found})
                yield Chunk(empty, np.array([], dtype=np.int64), str(left[-1].row + 1), size, left)
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return
            raise BadData(f"{path.name}: {error}: correct the file, or name its delimiter") from error


def _numbers(position: int, count: int, refused: dict[int, Rejection]) -> tuple[npt.NDArray[np.int64], int]:
    """The file's row numbers of the next ``count`` good rows, and the position after them: refused rows in between are jumped over."""
    if count == 0:
        return np.array([], dtype=np.int64), position
    holes = sum(1 for number in refused if number >= position)
    candidates = np.arange(position, position + count + holes, dtype=np.int64)
    rows = candidates[~np.isin(candidates, np.array(list(refused), dtype=np.int64))][:count]
    return rows, int(rows[-1]) + 1
