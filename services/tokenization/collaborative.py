"""Collaborative vectors: which items people touch close together, as positive pointwise mutual information made small.

Only the training part of the histories is read, so that nothing of validation or test leaks into the ids. Pairs are counted in parts by an executor;
what is in memory at once is one part, and in the end the pairs that say something.
Legend: N items, P pairs, G dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import scipy.sparse as sp

from semantide.services.tokenization.vectorparts import count_pairs, inform, sum_pairs
from semantide.shared.dataset import Dataset, StoredDataset
from semantide.shared.executors import Piece, Steps
from semantide.shared.models.linear_map import FloatArray, truncated_svd, unit_rows
from semantide.shared.models.tokenizer import TokenizerConfig


def collaborative_vectors(
    dataset: Dataset | StoredDataset, config: TokenizerConfig, seed: int, steps: Steps, *, part_rows: int
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Unit vectors [N, G] and which items have one [N]; the width is 0 where nobody touched two items. A part has about ``part_rows`` pairs."""
    num_items = len(dataset.item_ids)
    information = positive_information(dataset, config, steps, part_rows=part_rows)
    if not information.shape[0]:
        return np.zeros((num_items, 0), np.float32), np.zeros(num_items, bool)
    left, values, _ = truncated_svd(information, config.collaborative_dim, seed)
    vectors = unit_rows(left * values**config.spectrum_power)
    return vectors, np.linalg.norm(vectors, axis=1) > 0.5


def positive_information(dataset: Dataset | StoredDataset, config: TokenizerConfig, steps: Steps, *, part_rows: int) -> sp.csr_matrix:
    """Positive pointwise mutual information [N, N] of pairs within the window, with smoothed context counts; [0, 0] where there is no pair."""
    num_items = len(dataset.item_ids)
    users = dataset.parts(steps, max(1, part_rows // (2 * config.window)))
    bounds = _bounds(dataset.item_table["count"].to_numpy(), len(users))
    counted = steps("pairs", count_pairs, [{"histories": pieces} for pieces in users], num_items=num_items, window=config.window, bounds=bounds)
    stretches = [{"pairs": [Piece(counted.path(part, "pairs"), number) for part in range(len(users))]} for number in range(len(bounds) + 1 if users else 0)]
    summed = steps("sums", sum_pairs, stretches, window=config.window, decay=config.decay)
    total = np.zeros(num_items)
    for table in summed.tables("totals"):
        total[table["row"].to_numpy()] = table["total"].to_numpy()
    if not total.any():
        return sp.csr_matrix((0, 0), dtype=np.float32)
    context = total**config.smoothing
    context /= max(context.sum(), 1e-12)
    items = steps.share("totals", pa.table({"total": total, "context": context}))
    informed = steps("information", inform, [{**summed.pieces(part, "sums"), "items": items} for part in range(summed.num_parts)])
    return _matrix(informed.tables("pairs"), num_items)


def _bounds(counts_N: npt.NDArray[np.int64], num_parts: int) -> list[int]:
    """First items of the second and later stretches, so that all have about as many training events."""
    ends = np.cumsum(counts_N, dtype=np.int64)
    share = (ends - counts_N) * num_parts // max(int(ends[-1]) if len(ends) else 0, 1)
    firsts: list[int] = np.flatnonzero(np.diff(share, prepend=0)).tolist()
    return firsts


def _matrix(pairs: Iterable[pa.Table], num_items: int) -> sp.csr_matrix:
    lengths, others, values = np.zeros(num_items, np.int64), [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for table in pairs:
        lengths += np.bincount(table["row"].to_numpy(), minlength=num_items)
        others.append(table["other"].to_numpy())
        values.append(table["value"].to_numpy())
    return sp.csr_matrix((np.concatenate(values), np.concatenate(others), np.append(0, np.cumsum(lengths))), shape=(num_items, num_items))
