"""Content vectors without a language model: hashed words, TF-IDF, truncated SVD.

Hashing needs no vocabulary, so that an item that arrives later is encoded with nothing but these arrays.
Legend: N items, V kept buckets, D dimensions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import scipy.sparse as sp
from sklearn.feature_extraction.text import HashingVectorizer

from semantide.shared.models.linear_map import FloatArray, truncated_svd, unit_rows

_WORD = re.compile(r"[^\W_]+")
_IDEOGRAPH = 0x2E80  # from here on scripts are written without spaces: pairs of characters stand for words
_TEXT_CHARS = 4000  # a title or text may be megabytes long; what makes an item distinct comes early


def words(text: str) -> Iterator[str]:
    """Lower-case words; single characters and pairs of them in scripts without spaces."""
    for word in _WORD.findall(text[:_TEXT_CHARS].lower()):
        if max(word) < chr(_IDEOGRAPH):
            yield word
        else:
            yield from word
            yield from (word[i : i + 2] for i in range(len(word) - 1))


def item_features(row: dict[str, Any]) -> list[str]:
    """Everything that describes an item as a bag of strings: words, whole categories, key=value attributes."""
    features = [*words(row.get("title") or ""), *words(row.get("text") or "")]
    for category in row.get("categories") or ():
        features.append(f"category={category.lower()[:_TEXT_CHARS]}")
        features.extend(words(category))
    attributes = row.get("attributes") or {}
    if isinstance(attributes, str):
        attributes = json.loads(attributes)
    for key, value in attributes.items():
        features.append(f"{key}={value}".lower()[:_TEXT_CHARS])
        features.extend(word for word in words(str(value)) if not word.isdigit())
    return features


def plain_text(row: dict[str, Any]) -> str:
    """The same as one sentence, for a text encoder."""
    attributes = row.get("attributes") or {}
    if isinstance(attributes, str):
        attributes = json.loads(attributes)
    parts = [row.get("title") or "", ", ".join(row.get("categories") or ()), ", ".join(f"{k} {v}" for k, v in attributes.items()), row.get("text") or ""]
    return ". ".join(part[:_TEXT_CHARS] for part in parts if part.strip())


def count_features(table: pa.Table, hash_bits: int) -> sp.csr_matrix:
    """How often each feature's bucket stands in each item, on a logarithmic scale: a row depends on its item alone."""
    vectorizer = HashingVectorizer(analyzer=item_features, n_features=1 << hash_bits, alternate_sign=False, norm=None, dtype=np.float32)
    columns = [name for name in ("title", "text", "categories", "attributes") if name in table.column_names]
    rows = (row for batch in table.select(columns).to_batches(max_chunksize=4096) for row in batch.to_pylist())
    if not table.num_rows:
        return sp.csr_matrix((0, 1 << hash_bits), dtype=np.float32)
    counts = vectorizer.transform(rows).tocsr()
    counts.data = 1 + np.log(counts.data)
    return counts


@dataclass(frozen=True)
class TextFeatures:
    """Hashed TF-IDF projected on its main directions.

    Shapes: ``buckets`` [V] ascending, ``idf`` [V], ``components`` [D, V].
    """

    hash_bits: int
    buckets: npt.NDArray[np.int64]
    idf: FloatArray
    components: FloatArray

    @classmethod
    def fit(cls, table: pa.Table, *, dim: int, hash_bits: int, max_buckets: int, seed: int) -> tuple[TextFeatures, FloatArray]:
        """Fit on a table with title, text, categories, attributes; returns the table's vectors [N, D] too."""
        return cls.fit_counts(count_features(table, hash_bits), dim=dim, hash_bits=hash_bits, max_buckets=max_buckets, seed=seed)

    @classmethod
    def fit_counts(cls, counts: sp.csr_matrix, *, dim: int, hash_bits: int, max_buckets: int, seed: int) -> tuple[TextFeatures, FloatArray]:
        """Fit on what ``count_features`` made of a table, or of its parts one below another."""
        frequency = np.bincount(counts.indices, minlength=counts.shape[1])
        # A word of one item alone says nothing about likeness; a small catalog keeps it, for it has little else.
        known = np.flatnonzero(frequency >= (2 if counts.shape[0] > 1000 else 1))
        buckets = np.sort(known[np.argsort(-frequency[known], kind="stable")[:max_buckets]]).astype(np.int64)
        idf = (np.log((1 + counts.shape[0]) / (1 + frequency[buckets])) + 1).astype(np.float32)
        weighted = cls(hash_bits, buckets, idf, np.zeros((0, len(buckets)), np.float32))._weighted(counts)
        _, _, components = truncated_svd(weighted, dim, seed)
        return cls(hash_bits, buckets, idf, components), unit_rows(np.asarray(weighted @ components.T))

    def _weighted(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        weighted = counts[:, self.buckets].multiply(self.idf).tocsr().astype(np.float32)
        lengths = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
        return sp.diags(1 / np.where(lengths > 0, lengths, 1)).dot(weighted).tocsr().astype(np.float32)

    def __call__(self, table: pa.Table) -> FloatArray:
        """Unit vectors [N, D]; zero for an item that nothing describes."""
        return unit_rows(np.asarray(self._weighted(count_features(table, self.hash_bits)) @ self.components.T))
