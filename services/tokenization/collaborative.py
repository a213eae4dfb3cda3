"""Collaborative vectors: which items people touch close together, as positive pointwise mutual information made small.

Only the training part of the histories is read, so that nothing of validation or test leaks into the ids.
Legend: N items, E training events, G dimensions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from semantide.shared.dataset import Dataset
from semantide.shared.models.linear_map import FloatArray, truncated_svd, unit_rows
from semantide.shared.models.tokenizer import Tick, TokenizerConfig, silent


def training_events(dataset: Dataset) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Items [E] and users [E] of all training events, user after user, chronological in each."""
    lengths = np.diff(dataset.offsets)
    users = np.repeat(np.arange(len(lengths)), lengths)
    keep = np.arange(len(dataset.items)) - np.repeat(dataset.offsets[:-1], lengths) < np.repeat(dataset.train_end, lengths)
    return dataset.items[keep].astype(np.int64), users[keep]


def cooccurrence(items: npt.NDArray[np.int64], users: npt.NDArray[np.int64], num_items: int, window: int, decay: float) -> sp.csr_matrix:
    """Symmetric sums [N, N] of ``decay ** (distance - 1)`` over pairs of different items of one user within the window."""
    total = sp.csr_matrix((num_items, num_items), dtype=np.float64)
    for lag in range(1, window + 1):
        if lag >= len(items):
            break
        left, right = items[:-lag], items[lag:]
        same = (users[:-lag] == users[lag:]) & (left != right)
        weight = np.full(int(same.sum()), decay ** (lag - 1))
        total = total + sp.csr_matrix((weight, (left[same], right[same])), shape=total.shape)
    return (total + total.T).tocsr()


def positive_information(counts: sp.csr_matrix, smoothing: float) -> sp.csr_matrix:
    """Positive pointwise mutual information of co-occurrence sums, with smoothed context counts."""
    rows = np.asarray(counts.sum(axis=1)).ravel()
    context = rows**smoothing
    context /= max(context.sum(), 1e-12)
    pairs = counts.tocoo()
    values = np.log(pairs.data / rows[pairs.row] / context[pairs.col])
    keep = values > 0
    return sp.csr_matrix((values[keep].astype(np.float32), (pairs.row[keep], pairs.col[keep])), shape=counts.shape)


def collaborative_vectors(dataset: Dataset, config: TokenizerConfig, seed: int, tick: Tick = silent) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Unit vectors [N, G] and which items have one [N]; the width is 0 where nobody touched two items."""
    num_items = len(dataset.item_ids)
    tick("collaborative vectors", 0, 3)
    items, users = training_events(dataset)
    counts = cooccurrence(items, users, num_items, config.window, config.decay)
    tick("collaborative vectors", 1, 3)
    if not counts.nnz:
        return np.zeros((num_items, 0), np.float32), np.zeros(num_items, bool)
    left, values, _ = truncated_svd(positive_information(counts, config.smoothing), config.collaborative_dim, seed)
    tick("collaborative vectors", 3, 3)
    vectors = unit_rows(left * values**config.spectrum_power)
    return vectors, np.linalg.norm(vectors, axis=1) > 0.5
