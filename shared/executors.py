"""Where pure functions over Arrow tables run: one part after another in this process, or on a Ray cluster (extra ``[ray]``).

A step gives a function the input tables of each part and stores the tables that come back as Arrow files. A part's outputs appear all at once, by one
rename, and a part that is there already is not worked on again: a killed worker or a killed job changes nothing, and what is in memory is one part.

On a cluster every node needs this package and the same folder (a shared volume).
"""

from __future__ import annotations

import functools
import itertools
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.shared.errors import PermanentError, TransientError

Output: TypeAlias = "pa.Table | Iterable[pa.RecordBatch]"
Tick = Callable[[int, int, str], None]


class Piece(NamedTuple):
    """A file, one record batch of an Arrow file, or a stretch of rows of a Parquet file; of all columns or of some."""

    path: Path
    batch: int | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """``function`` of a module, called for each part with the part's tables by name and ``arguments``; it returns tables by name.

    It may depend on nothing else: the same part gives the same tables anywhere.
    """

    name: str
    function: Callable[..., Mapping[str, Output]]
    parts: Sequence[Mapping[str, Sequence[Piece]]]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a step left: a folder for each part, with one Arrow file for each table."""

    folder: Path
    num_parts: int

    def path(self, part: int, name: str) -> Path:
        """The file of one table."""
        return self.folder / f"part-{part:06d}" / f"{name}.arrow"

    def pieces(self, part: int, *names: str, columns: tuple[str, ...] = ()) -> dict[str, Sequence[Piece]]:
        """Tables of one part as inputs of the next step."""
        return {name: (Piece(self.path(part, name), columns=columns),) for name in names}

    def tables(self, name: str) -> Iterator[pa.Table]:
        """One table of every part, in order; each is read when it is asked for."""
        for part in range(self.num_parts):
            yield read([Piece(self.path(part, name))])


class Executor(Protocol):
    """Runs steps."""

    def run(self, step: Step, folder: Path, tick: Tick = lambda done, total, name: None) -> Outcome:
        """Work on every part whose outputs are not below ``folder`` yet; ``tick`` hears how far it is and may raise to end it."""
        ...


class LocalExecutor:
    """One part after another in this process."""

    def run(self, step: Step, folder: Path, tick: Tick = lambda done, total, name: None) -> Outcome:
        """See ``Executor``."""
        for part in range(len(step.parts)):
            tick(part, len(step.parts), step.name)
            perform(step, part, folder)
        return Outcome(folder / step.name, len(step.parts))


class RayExecutor:
    """Parts spread over a Ray cluster by Ray Data, which gives a part whose worker died to another one.

    ``address``: of the cluster, as in ``ray.init``; empty starts Ray on this machine.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address

    def run(self, step: Step, folder: Path, tick: Tick = lambda done, total, name: None) -> Outcome:
        """See ``Executor``.

        Raises: PermanentError where Ray is not installed, TransientError where it does not start or answer.
        """
        ray = _ray(self._address)
        total = len(step.parts)
        if total:
            rows = ray.data.from_items([{"part": part} for part in range(total)], override_num_blocks=total)
            tick(0, total, step.name)
            for done, _ in enumerate(rows.map(_perform_row, fn_kwargs={"step": step, "folder": folder}).iter_rows(), start=1):
                tick(done, total, step.name)
        return Outcome(folder / step.name, total)


class Steps:
    """Runs one step after another below one folder, and shares small tables between their parts."""

    def __init__(self, executor: Executor, folder: Path, tick: Tick = lambda done, total, name: None) -> None:
        self._executor, self._folder, self._tick = executor, folder, tick

    def __call__(self, name: str, function: Callable[..., Mapping[str, Output]], parts: Sequence[Mapping[str, Sequence[Piece]]], **arguments: Any) -> Outcome:
        """See ``Executor.run``."""
        return self._executor.run(Step(name, function, parts, arguments), self._folder, self._tick)

    def share(self, name: str, table: Output) -> Sequence[Piece]:
        """A table that every part may be given, whole or one of its batches."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.arrow"
        _write(path, table)
        return (Piece(path),)


def executor(kind: str, ray_address: str = "") -> Executor:
    """The executor of a deployment's settings."""
    if kind == "ray":
        return RayExecutor(ray_address)
    if kind != "local":
        raise ValueError(f"executor is {kind!r}: give local or ray")
    return LocalExecutor()


def perform(step: Step, part: int, folder: Path) -> None:
    """Work on one part, unless its outputs are there."""
    target = Outcome(folder / step.name, len(step.parts)).path(part, "").parent
    if target.exists():
        return
    outputs = step.function(**{name: read(pieces) for name, pieces in step.parts[part].items()}, **step.arguments)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        for name, output in outputs.items():
            _write(aside / f"{name}.arrow", output)
        aside.rename(target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not target.exists():  # otherwise another worker was given this part too, and ended first with the same
            raise


def read(pieces: Sequence[Piece]) -> pa.Table:
    """The rows of all pieces, one after another."""
    # What was written before a column was known has nulls in it.
    return pa.concat_tables([_read(piece) for piece in pieces], promote_options="default")


def _read(piece: Piece) -> pa.Table:
    columns = list(piece.columns) or None
    if piece.path.suffix == ".parquet":
        with pq.ParquetFile(piece.path) as file:
            return file.read(columns=columns) if piece.rows is None else _stretch(file, *piece.rows, columns)
    options = pa.ipc.IpcReadOptions()
    with pa.OSFile(str(piece.path)) as source:
        if columns:
            with pa.ipc.open_file(source) as reader:
                options.included_fields = [reader.schema.get_field_index(name) for name in columns]
        with pa.ipc.open_file(source, options=options) as reader:
            return reader.read_all() if piece.batch is None else pa.Table.from_batches([reader.get_batch(piece.batch)])


def _stretch(file: pq.ParquetFile, begin: int, end: int, columns: list[str] | None) -> pa.Table:
    """Rows from ``begin`` to before ``end``; only their row groups are read."""
    ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
    groups = range(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left")) + 1)
    first = int(ends[groups.start - 1]) if groups.start else 0
    return file.read_row_groups([group for group in groups if group < len(ends)], columns=columns).slice(begin - first, end - begin)


def _write(path: Path, output: Output) -> None:
    if isinstance(output, pa.Table):
        schema, batches = output.schema, iter(output.combine_chunks().to_batches())
    else:
        batches = iter(output)
        first = next(batches)
        schema, batches = first.schema, itertools.chain([first], batches)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _perform_row(row: dict[str, Any], step: Step, folder: Path) -> dict[str, Any]:
    perform(step, row["part"], folder)
    return row


@functools.cache
def _ray(address: str) -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise PermanentError(
            "the data executor is ray, and Ray is not installed: pip install 'semantide[ray]', or set SEMANTIDE_DATA_EXECUTOR=local"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address=address or None, include_dashboard=False, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray has no class of its own for a start that takes longer than it waits
            ray.shutdown()
            where = f"the Ray cluster at {address} does not answer" if address else "Ray did not start on this machine"
            raise TransientError(f"{where} ({error}): look at it, or set SEMANTIDE_DATA_EXECUTOR=local") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray
