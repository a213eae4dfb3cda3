"""The Redis Stream between the API and the event log: names, and what an entry holds.

One entry is one accepted batch: its kind, how many rows, the rows as an Arrow IPC stream, and the trace of the request that brought them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from semantide.services.ingestion.schema import SCHEMAS, Kind, completed
from semantide.shared.errors import Corrupt
from semantide.shared.telemetry import current_trace

STREAM = "semantide:ingestion:stream"
GROUP = "eventlog"
CONSUMER = "writer"
PARKED = "semantide:dead:semantide.ingestion.stream"
DIMENSION = "semantide:ingestion:embedding_dimension"


@dataclass(frozen=True)
class Entry:
    """One accepted batch, as it comes off the stream."""

    id: str
    kind: Kind
    table: pa.Table
    trace: str = ""


def encode(kind: Kind, table: pa.Table) -> dict[str, bytes]:
    """The fields of an entry."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    fields = {"kind": kind.encode(), "rows": str(table.num_rows).encode(), "data": sink.getvalue().to_pybytes()}
    if trace := current_trace():
        fields["trace"] = trace.encode()
    return fields


def decode(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    """The entry that ``encode`` made.

    Raises: Corrupt.
    """
    kind = fields.get(b"kind", b"").decode(errors="replace")
    if kind not in ("interactions", "items"):
        raise Corrupt(f"stream entry {entry_id.decode()} is of kind {kind!r}: something else wrote to {STREAM}")
    try:
        with pa.ipc.open_stream(fields[b"data"]) as reader:
            table = reader.read_all()
        return Entry(entry_id.decode(), kind, completed(table, SCHEMAS[kind]), fields.get(b"trace", b"").decode("latin-1"))  # type: ignore[index,arg-type]
    except (KeyError, pa.ArrowInvalid, ValueError, OSError) as error:
        raise Corrupt(f"stream entry {entry_id.decode()} cannot be read ({error}): it was parked in {PARKED}") from error
