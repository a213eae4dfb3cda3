"""Text files a block of lines at a time, plain or gzip, with their broken lines told apart."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from semantide.services.ingestion.readers.chunk import BLOCK_BYTES, Chunk
from semantide.services.ingestion.schema import Rejection, shown
from semantide.shared.errors import BadData

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines (without their ends), the number of the first, and the position after them."""

    lines: list[str]
    rows: list[int]
    rejections: list[Rejection]
    position: str
    done: int


def _gzip_problem(path: Path, error: Exception) -> BadData:
    return BadData(f"{path.name}: the compressed file is damaged or cut off ({error}): copy it again; what was before the damage was imported")


def blocks(path: Path, start: str, *, encoding: str = "utf-8", block_bytes: int = BLOCK_BYTES, max_line_bytes: int = 64 * 1024 * 1024) -> Iterator[Block]:
    """Blocks of lines from ``start`` on; blank lines count but do not appear.

    Raises: BadData where a compressed file is damaged.
    """
    state: dict[str, int] = json.loads(start) if start else {"offset": 0, "row": 0}
    offset, row = state["offset"], state["row"]
    size = path.stat().st_size
    compressed = path.suffix == ".gz"
    with path.open("rb") as raw, pa.input_stream(pa.PythonFile(raw, mode="r"), compression="gzip" if compressed else None) as stream:
        try:
            skip = offset
            while skip > 0:
                passed = len(stream.read(min(skip, BLOCK_BYTES)))
                if passed == 0:
                    raise BadData(f"{path.name} is shorter than when its import began: start a new import")
                skip -= passed
            rest = b""
            first = offset == 0
            while True:
                block = stream.read(block_bytes)
                data = rest + block
                if first and data.startswith(_BOM):
                    data, offset = data[3:], 3
                first = False
                cut = len(data) if not block else data.rfind(b"\n") + 1
                if cut == 0 and block:
                    if len(data) > max_line_bytes:
                        raise BadData(f"{path.name}: row {row} is longer than {max_line_bytes} bytes: is this a text file with one row a line?")
                    rest = data
                    continue
                whole, rest = data[:cut], data[cut:]
                if whole:
                    offset += len(whole)
                    lines, numbers, rejections, row = _split(whole, row, encoding)
                    yield Block(
                        lines, numbers, rejections, json.dumps({"offset": offset, "row": row}), min(size, raw.tell()) if compressed else min(size, offset)
                    )
                if not block:
                    return
        except (OSError, EOFError, zlib.error, pa.ArrowInvalid) as error:
            if compressed and getattr(error, "errno", None) is None:
                raise _gzip_problem(path, error) from error
            raise


def _split(data: bytes, row: int, encoding: str) -> tuple[list[str], list[int], list[Rejection], int]:
    pieces = data.removesuffix(b"\n").split(b"\n")
    rejections: list[Rejection] = []
    try:
        texts: list[str | None] = list(data.decode(encoding).removesuffix("\n").split("\n"))
    except UnicodeDecodeError:
        texts = []
        for number, piece in enumerate(pieces):
            try:
                texts.append(piece.decode(encoding))
            except UnicodeDecodeError as error:
                texts.append(None)
                remedy = f"save the file as {encoding.upper()}, or import with the encoding that it has"
                rejections.append(
                    Rejection(row + number, "row", shown(ascii(piece[:80])), f"not {encoding.upper()}: byte {piece[error.start]:#04x} at {error.start}", remedy)
                )
    kept = [(number, text.removesuffix("\r")) for number, text in enumerate(texts, row) if text is not None and text.strip()]
    return [text for _, text in kept], [number for number, _ in kept], rejections, row + len(pieces)


def line_chunks(path: Path, start: str, *, encoding: str = "utf-8") -> Iterator[Chunk]:
    """Lines as a table with the one column ``line``."""
    for block in blocks(path, start, encoding=encoding):
        table = pa.table({"line": pa.array(block.lines, pa.string())})
        yield Chunk(table, np.array(block.rows, dtype=np.int64), block.position, block.done, block.rejections)


def first_line(path: Path, encoding: str = "utf-8") -> str | None:
    """The first line that is not blank; None in an empty file."""
    for block in blocks(path, "", encoding=encoding, block_bytes=64 * 1024):
        if block.lines:
            return block.lines[0]
        if block.rejections:
            rejection = block.rejections[0]
            raise BadData(f"{path.name}: row {rejection.row}: {rejection.reason}; {rejection.remedy}")
    return None


def json_chunks(path: Path, start: str, *, python_literals: bool = False) -> Iterator[Chunk]:
    """One JSON object a line, as records. ``python_literals`` reads Python dictionaries too, as some old public dumps have them."""
    for block in blocks(path, start):
        records: list[dict[str, Any]] = []
        rows: list[int] = []
        rejections = list(block.rejections)
        for row, line in zip(block.rows, block.lines, strict=True):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = _literal(line) if python_literals else None
                if record is None:
                    rejections.append(Rejection(row, "row", shown(line), f"not JSON: {error}", "write one JSON object a line"))
                    continue
            if not isinstance(record, dict):
                rejections.append(Rejection(row, "row", shown(line), f"a JSON {type(record).__name__}, not an object", "write one JSON object a line"))
                continue
            records.append(record)
            rows.append(row)
        yield Chunk(records, np.array(rows, dtype=np.int64), block.position, block.done, sorted(rejections, key=lambda rejection: rejection.row))


def _literal(line: str) -> Any:
    import ast

    try:
        return ast.literal_eval(line)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
