"""What the items of a data set are, and who likes them together: two spaces that the search and the gate compare items in.

Only training events are read. Legend: U users, N items, C content and G collaborative width.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from semantide.services.reward.recipes import RewardTraining
from semantide.shared.dataset import Dataset
from semantide.shared.models.interest_search import FloatArray
from semantide.shared.models.item_spaces import ItemSpaces
from semantide.shared.models.linear_map import LinearMap, truncated_svd, unit_rows
from semantide.shared.models.text_features import TextFeatures
from semantide.shared.models.tokenizer import embedding_matrix

_DESCRIBED = ("title", "text", "categories", "attributes")
_HASH_BITS = 18
_RIDGE = 0.1


def item_spaces(dataset: Dataset, train_E: np.ndarray, config: RewardTraining, seed: int) -> ItemSpaces:
    """Fit both; ``train_E`` says which events of the histories may be read.

    Raises: BadData for embeddings that do not fit together.
    """
    content, text, embedded = _content(dataset.item_table, config, seed)
    return _liked(ItemSpaces(content, np.zeros((0, 0), np.float32), text, embedded), dataset, train_E, config, seed)


def halved_spaces(dataset: Dataset, train_E: np.ndarray, spaces: ItemSpaces, config: RewardTraining, seed: int) -> tuple[ItemSpaces, ItemSpaces]:
    """Spaces for users of even rows, of what those of odd rows liked together, and the other way round; content is that of ``spaces``.

    An item that a user liked was liked together with his others by that alone: vectors that know it would tell the answer in training, and never after it.
    """
    users_E = np.repeat(np.arange(len(dataset.user_ids)), np.diff(dataset.offsets))
    even, odd = (_liked(spaces, dataset, train_E & (users_E % 2 != half), config, seed) for half in (0, 1))
    return even, odd


def crossed_search_vectors(halves: tuple[ItemSpaces, ItemSpaces]) -> FloatArray:
    """What both halves of the users search with, one below the other [2 N, C + G]."""
    width = max(half.collaborative_NG.shape[1] for half in halves)
    padded = (np.pad(half.collaborative_NG, ((0, 0), (0, width - half.collaborative_NG.shape[1]))) for half in halves)
    return np.concatenate([replace(half, collaborative_NG=wide).search_vectors() for half, wide in zip(halves, padded, strict=True)])


def _liked(spaces: ItemSpaces, dataset: Dataset, train_E: np.ndarray, config: RewardTraining, seed: int) -> ItemSpaces:
    """The same content with who likes items together; of what nobody liked, by what it is."""
    content, collaborative = spaces.content_NC, _collaborative(dataset, train_E, config, seed)
    described, liked = np.linalg.norm(content, axis=1) > 0.5, np.linalg.norm(collaborative, axis=1) > 0.5
    both = described & liked
    mapped = LinearMap.fit(content[both], collaborative[both], _RIDGE) if both.any() and content.shape[1] and collaborative.shape[1] else None
    if mapped is not None:
        lacking = described & ~liked
        collaborative[lacking] = unit_rows(mapped(content[lacking]))
    return replace(spaces, collaborative_NG=collaborative, collaborative_of=mapped)


def _content(table: pa.Table, config: RewardTraining, seed: int) -> tuple[FloatArray, TextFeatures | None, bool]:
    if "embedding" in table.column_names:
        given, present = embedding_matrix(table)
        if present.any():
            return unit_rows(given), None, True
    if not config.content_size or not any(name in table.column_names for name in _DESCRIBED):
        return np.zeros((table.num_rows, 0), np.float32), None, False
    text, vectors = TextFeatures.fit(table, dim=config.content_size, hash_bits=_HASH_BITS, max_buckets=1 << 15, seed=seed)
    return vectors, text, False


def _collaborative(dataset: Dataset, train_E: np.ndarray, config: RewardTraining, seed: int) -> FloatArray:
    num_users, num_items = len(dataset.user_ids), len(dataset.item_ids)
    users_E = np.repeat(np.arange(num_users), np.diff(dataset.offsets))[train_E]
    items_E = dataset.items[train_E]
    if not len(items_E) or not config.collaborative_size:
        return np.zeros((num_items, 0), np.float32)
    matrix = sp.csr_matrix((np.ones(len(items_E), np.float32), (users_E, items_E)), shape=(num_users, num_items))
    matrix.data[:] = 1.0  # how often does not matter
    # Who likes much says little about each, and so does what everybody likes.
    per_user, per_item = np.asarray(matrix.sum(1)).ravel(), np.asarray(matrix.sum(0)).ravel()
    weighted = sp.diags(1 / np.sqrt(np.maximum(per_user, 1))) @ matrix @ sp.diags(1 / np.sqrt(np.maximum(per_item, 1)))
    _, values, right = truncated_svd(weighted.tocsr().astype(np.float32), config.collaborative_size, seed)
    return unit_rows(right.T * np.sqrt(values))
