"""The steps of making item vectors, each a pure function over the Arrow tables of one part: a stretch of users, of pairs of items, or of items.

Whatever the parts, sums come out the same to the last bit: pairs are counted in whole numbers first, and added up in one order then.
Legend: N items, E training events of a part, H buckets of hashed words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import scipy.sparse as sp

from semantide.shared.executors import Output
from semantide.shared.models.minilm import MiniLM
from semantide.shared.models.text_features import count_features, plain_text
from semantide.shared.negative_source import TrainingEvents


def count_pairs(histories: pa.Table, num_items: int, window: int, bounds: Sequence[int]) -> dict[str, Output]:
    """How often two different items stand so many events apart, seen from either: one record batch for each stretch of items.

    ``bounds`` are the first items of the second and later stretches. Of a pair, ``lag`` is negative where the other item came before.
    """
    events = TrainingEvents.of_histories(histories, num_items)
    found: list[pl.DataFrame] = [pl.DataFrame(schema={"row": pl.Int32, "other": pl.Int32, "lag": pl.Int16, "count": pl.Int32})]
    for lag in range(1, window + 1):
        left, right = events.rows_E[:-lag], events.rows_E[lag:]
        counted = (events.users_E[:-lag] == events.users_E[lag:]) & (left != right)
        keys, counts = np.unique(left[counted] * num_items + right[counted], return_counts=True)
        first, then = np.divmod(keys, num_items)
        for row, other, way in ((first, then, lag), (then, first, -lag)):
            columns: dict[str, Any] = {"row": row.astype(np.int32), "other": other.astype(np.int32)}
            found.append(pl.DataFrame({**columns, "lag": np.full(len(keys), way, np.int16), "count": counts.astype(np.int32)}))
    pairs = pl.concat(found)
    stretch = np.searchsorted(np.asarray(bounds, np.int64), pairs["row"].to_numpy(), side="right").astype(np.uint16)
    table = pairs[np.argsort(stretch, kind="stable")].to_arrow().combine_chunks()
    ends = np.cumsum(np.bincount(stretch, minlength=len(bounds) + 1))
    return {"pairs": [_batch(table.slice(end - length, length)) for end, length in zip(ends, np.diff(ends, prepend=0), strict=True)]}


def sum_pairs(pairs: pa.Table, window: int, decay: float) -> dict[str, Output]:
    """Sums of ``decay ** (distance - 1)`` over all pairs of a stretch of items, and each item's total."""
    counted = pl.DataFrame(pl.from_arrow(pairs)).group_by("row", "other", "lag").agg(pl.col("count").sum()).sort("row", "other", "lag")
    row, other, lag, count = (counted[name].to_numpy() for name in ("row", "other", "lag", "count"))
    new = np.append(True, (row[1:] != row[:-1]) | (other[1:] != other[:-1]))[: len(row)]
    place = np.cumsum(new) - 1
    ways = np.zeros((2, int(new.sum())))
    for way, sign in enumerate((1, -1)):
        for distance in range(1, window + 1):
            at = np.flatnonzero(lag == sign * distance)
            if len(at):
                ways[way, place[at]] += _repeated(decay ** (distance - 1), int(count[at].max()))[count[at]]
    sums = ways[0] + ways[1]
    kept = sums != 0
    row, other, sums = row[new][kept], other[new][kept], sums[kept]
    items, starts = np.unique(row, return_index=True)
    totals = sp.csr_matrix((sums, other, np.append(starts, len(row))), shape=(len(items), int(other.max(initial=0)) + 1)).sum(axis=1)
    return {
        "sums": pa.table({"row": row, "other": other, "sum": sums}),
        "totals": pa.table({"row": items, "total": np.asarray(totals).ravel()}),
    }


def _repeated(weight: float, most: int) -> npt.NDArray[np.float64]:
    """A weight added to itself, from no time to so many: the sum that adding one pair after another gives."""
    return np.add.accumulate(np.append(0.0, np.full(most, weight)))


def inform(sums: pa.Table, items: pa.Table) -> dict[str, Output]:
    """Positive pointwise mutual information of the pairs; ``items`` has each item's total and its share as a context."""
    row, other = sums["row"].to_numpy(), sums["other"].to_numpy()
    values = np.log(sums["sum"].to_numpy() / items["total"].to_numpy()[row] / items["context"].to_numpy()[other])
    keep = values > 0
    return {"pairs": pa.table({"row": row[keep], "other": other[keep], "value": values[keep].astype(np.float32)})}


def hash_texts(items: pa.Table, hash_bits: int) -> dict[str, Output]:
    """Words of each item by their bucket, as the rows of a sparse matrix [N, H]."""
    counts = count_features(items, hash_bits)
    return {"rows": pa.table({"length": np.diff(counts.indptr)}), "words": pa.table({"bucket": counts.indices, "weight": counts.data})}


def encode_texts(items: pa.Table) -> dict[str, Output]:
    """Sentence vectors of the items."""
    texts = [plain_text(row) for row in items.to_pylist()]
    vectors = MiniLM()(texts)
    return {
        "vectors": pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])}),
        "described": pa.table({"count": [sum(bool(text) for text in texts)]}),
    }


def _batch(table: pa.Table) -> pa.RecordBatch:
    batches: list[Any] = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
