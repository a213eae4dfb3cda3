"""Which of a user's items a recommended one is closest to, in the model's own view of items.

Legend: n recommended items, H items of the history, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semantide.services.serving.bundle import Bundle
from semantide.shared.trie import IntArray

NEAREST = 3


@dataclass(frozen=True)
class Neighbour:
    """An item of the history. ``similarity`` is the cosine of the two items' vectors."""

    item: str
    title: str
    similarity: float


def nearest(bundle: Bundle, items: Sequence[str], history_rows: IntArray, count: int = NEAREST) -> list[tuple[Neighbour, ...]]:
    """For each item, the ``count`` items of the history (catalog rows, oldest first) that are closest to it, closest first; of equally close ones the latest."""
    rows_n = bundle.rows(tuple(items))
    rows_H = np.array(list(dict.fromkeys(history_rows[::-1].tolist())), dtype=np.int64)
    if not len(rows_n) or not len(rows_H):
        return [()] * len(items)
    vectors = bundle.vectors(np.concatenate([rows_n, rows_H]))
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similarity_nH = vectors[: len(rows_n)] @ vectors[len(rows_n) :].T
    best_nk = np.argsort(-similarity_nH, axis=1, kind="stable")[:, :count]
    return [
        tuple(Neighbour(bundle.catalog.item_ids[rows_H[place]], bundle.titles[rows_H[place]], float(similarities[place])) for place in best)
        for similarities, best in zip(similarity_nH, best_nk, strict=True)
    ]
