"""The tables of a retriever: made where they lie, a share on each rank, at first values or at those of an earlier model; and written a piece at a time.

A model's folder has, beside ``vectors.parquet`` (item, vector), what a later run goes on from and cannot tell from the vectors:
    item_rows.parquet      own (whether the item has a row of its own), and with features row_vector, the item's vector without them; in the order of vectors.parquet
    feature_rows.parquet   feature, value, vector
Legend: N items, V values of features, D vector size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from semantide.services.training.hierarchical_sparse import hierarchical_table
from semantide.services.training.recipes import TrainConfig
from semantide.services.training.retrieval_objective import FeatureTable
from semantide.services.training.world import World
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.item_features import ItemFeatures
from semantide.shared.models.item_rows import ItemRows
from semantide.shared.models.item_table import LocalTable

_VECTORS, _ITEM_ROWS, _FEATURE_ROWS = "vectors.parquet", "item_rows.parquet", "feature_rows.parquet"
_ROWS = 1 << 16  # read or written at a time
_FEATURE_SEED = 1 << 32  # features begin at other values than items


@dataclass(frozen=True)
class ItemTables:
    """What was made: which rows items have, their table, and that of their features where the recipe has any."""

    rows: ItemRows
    items: Any
    featured: FeatureTable | None
    figures: dict[str, float]
    """How large the table is and how many items share rows."""


def item_tables(dataset: Dataset, counts_N: Tensor, config: TrainConfig, world: World, seed: int, before: Path | None = None) -> ItemTables:
    """Tables for a data set's items; ``before`` is the folder of a retriever to go on from. All ranks call this.

    Raises: Conflict for an earlier model of another size, Corrupt for one that cannot be read; ValueError for features that no item has.
    """
    known = None if before is None else _Earlier(before, config.retriever.hidden_size)
    admitted = known.admitted() if known is not None and config.growth.rows == "admission" else ()
    rows = ItemRows.of(config.growth, dataset.item_ids, counts_N.numpy(), admitted)
    places_N = None if rows.plain else torch.from_numpy(rows.rows_N)

    def items_before() -> Iterator[tuple[Tensor, Tensor]]:
        if known is not None:
            yield from known.items(dict(zip(dataset.item_ids, rows.rows_N.tolist(), strict=True)), bool(config.item_features))

    items = _table(rows.num_rows, config, world, seed, places_N, items_before())
    figures = rows.figures(counts_N.numpy())
    if not config.item_features:
        return ItemTables(rows, items, None, figures)
    features = ItemFeatures.of(dataset.item_table, config.item_features)
    of_value = {name: row for row, name in enumerate(features.names_V)}
    table = _table(len(of_value), config, world, seed + _FEATURE_SEED, None, iter(()) if known is None else known.features(of_value))
    return ItemTables(rows, items, FeatureTable(features, table), figures | {"feature_rows": len(of_value)})


def pieces(num_rows: int, read: Callable[[Tensor], Tensor], leads: bool) -> Iterator[Tensor]:
    """The vectors of all rows in order, some at a time, on the leading rank; the others only give theirs. All ranks run through it to its end."""
    for begin in range(0, num_rows, _ROWS):
        yield read(torch.arange(begin, min(begin + _ROWS, num_rows)) if leads else torch.zeros(0, dtype=torch.int64))


def write_rows(folder: Path | None, tables: ItemTables, config: TrainConfig) -> None:
    """Write what a later run needs beside the vectors, on the rank that was given a ``folder``. All ranks call this."""
    leads, size = folder is not None, config.retriever.hidden_size
    if config.growth.rows == "own" and tables.featured is None:
        return
    row_vectors = None if tables.featured is None else pieces(len(tables.rows.rows_N), tables.items.read, leads)
    schema = [("own", pa.bool_()), *([] if row_vectors is None else [("row_vector", pa.list_(pa.float32(), size))])]
    try:
        _write(folder and folder / _ITEM_ROWS, pa.schema(schema), {"own": tables.rows.own_N}, row_vectors)
    except OSError:
        _write_features(None, tables, size)  # the others give these rows too
        raise
    _write_features(folder, tables, size)


def _write_features(folder: Path | None, tables: ItemTables, size: int) -> None:
    if tables.featured is not None:
        names = tables.featured.features.names_V
        schema = [("feature", pa.string()), ("value", pa.string()), ("vector", pa.list_(pa.float32(), size))]
        columns = {"feature": [feature for feature, _ in names], "value": [value for _, value in names]}
        _write(folder and folder / _FEATURE_ROWS, pa.schema(schema), columns, pieces(len(names), tables.featured.table.read, folder is not None))


def _write(path: Path | None, schema: pa.Schema, columns: Mapping[str, Any], vectors: Iterator[Tensor] | None) -> None:
    """A file of some columns, the last of which are ``vectors``."""
    length = len(next(iter(columns.values())))
    try:
        if path is not None:
            with pq.ParquetWriter(path, schema) as writer:
                for begin in range(0, length, _ROWS):
                    arrays = [pa.array(values[begin : begin + _ROWS], schema.field(name).type) for name, values in columns.items()]
                    if vectors is not None:
                        piece = next(vectors)
                        arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(piece.float().cpu().numpy().ravel()), piece.shape[1]))
                    writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    finally:
        drained(vectors or iter(()))


def drained(vectors: Iterator[Tensor]) -> None:
    """Run through what is left of ``pieces``, on a full disk too: the other ranks wait to be asked."""
    for _ in vectors:
        pass


def _table(num_rows: int, config: TrainConfig, world: World, seed: int, places_N: Tensor | None, known: Iterator[tuple[Tensor, Tensor]]) -> Any:
    """One table over all ranks, whose rows begin at first values or, where ``known`` gives rows and vectors, at those."""
    shape = config.retriever

    def share(count: int, rows: slice) -> LocalTable:
        table = LocalTable(
            count, shape.hidden_size, optimiser=config.table_optimiser, std=shape.initializer_range, beta2=config.beta2, seed=seed, rows=rows,
            places_N=places_N if world.size == 1 else None,
        )  # fmt: skip
        first, step = rows.start or 0, rows.step or 1
        for rows_K, vectors_KD in known:
            mine_K = rows_K % step == first
            table.weight_ND[rows_K[mine_K] // step] = vectors_KD[mine_K]
        return table

    if world.size == 1:
        return share(num_rows, slice(None))
    return hierarchical_table(num_rows, world, config.table_group or world.size, share, every=config.table_meet_every, places_N=places_N)


class _Earlier:
    """Rows of a stored retriever, read a piece at a time."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        found = self._open(_VECTORS).schema_arrow.field("vector").type.list_size
        if (folder / _ITEM_ROWS).is_file():
            vectors, rows = (self._open(name).metadata.num_rows for name in (_VECTORS, _ITEM_ROWS))
            if vectors != rows:
                raise Corrupt(
                    f"{folder} has {vectors} items in {_VECTORS} and {rows} in {_ITEM_ROWS}: copy the model folder again, or train without a checkpoint"
                )
        if found != size:
            raise Conflict(f"{folder} has vectors of {found} numbers and retriever.hidden_size is {size}: give the same, or another checkpoint")

    def items(self, row_of: Mapping[str, int], featured: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and vectors of those of its items that have a row now; ``featured``: without what its features add, which have rows of their own."""
        parted = featured and (self._folder / _FEATURE_ROWS).is_file()
        names = self._batches(_VECTORS, ["item"] if parted else ["item", "vector"])
        vectors = self._batches(_ITEM_ROWS, ["row_vector"]) if parted else None
        for batch in names:
            column = batch["vector"] if vectors is None else next(vectors)["row_vector"]
            yield _known(batch["item"].to_pylist(), column, row_of)

    def features(self, row_of: Mapping[tuple[str, str], int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and vectors of those of its features' values that have a row now."""
        if (self._folder / _FEATURE_ROWS).is_file():
            for batch in self._batches(_FEATURE_ROWS, ["feature", "value", "vector"]):
                yield _known(list(zip(batch["feature"].to_pylist(), batch["value"].to_pylist(), strict=True)), batch["vector"], row_of)

    def admitted(self) -> Iterator[str]:
        """Its items with rows of their own."""
        own = self._batches(_ITEM_ROWS, ["own"]) if (self._folder / _ITEM_ROWS).is_file() else None
        for batch in self._batches(_VECTORS, ["item"]):
            names = batch["item"].to_pylist()
            yield from names if own is None else (name for name, has in zip(names, next(own)["own"].to_pylist(), strict=True) if has)

    def _batches(self, name: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._open(name).iter_batches(_ROWS, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise Corrupt(f"{self._folder / name} is damaged ({error}): copy the model folder again, or train without a checkpoint") from error

    def _open(self, name: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._folder / name)
        except (pa.ArrowException, OSError) as error:
            raise Corrupt(f"{self._folder / name} cannot be read ({error}): give config checkpoint the folder of a retriever") from error


def _known(names: list[Any], vectors: pa.Array, row_of: Mapping[Any, int]) -> tuple[Tensor, Tensor]:
    rows = np.fromiter((row_of.get(name, -1) for name in names), np.int64, len(names))
    flat = vectors.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(names), -1)
    return torch.from_numpy(rows[rows >= 0]), torch.from_numpy(flat[rows >= 0])
