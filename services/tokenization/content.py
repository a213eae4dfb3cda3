"""Content vectors of a whole catalog, and what is kept so that a later item gets one in the same space. Texts are read in parts by an executor.

Legend: N items, C dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from semantide.services.tokenization.vectorparts import encode_texts, hash_texts
from semantide.shared.errors import BadData
from semantide.shared.executors import Piece, Steps
from semantide.shared.models.linear_map import FloatArray, LinearMap, unit_rows
from semantide.shared.models.text_features import TextFeatures
from semantide.shared.models.tokenizer import TokenizerConfig, embedding_matrix

_HASHED_ROWS = 20_000  # items whose texts are hashed in one part
_ENCODED_ROWS = 512  # items whose texts are encoded in one part: some seconds of work


@dataclass(frozen=True)
class Content:
    """Vectors [N, C], where they came from, and how many items each way served."""

    vectors: FloatArray
    source: str
    counts: dict[str, int]
    text: TextFeatures | None = None
    fallback: LinearMap | None = None


def content_vectors(table: pa.Table, config: TokenizerConfig, seed: int, steps: Steps) -> Content:
    """Vectors as ``config.content`` says; with ``auto``, given embeddings where there are any, else hashed text.

    Raises: BadData.
    """
    if config.content == "minilm":
        return _encoded(table, steps)
    given, present = embedding_matrix(table)
    if config.content == "embedding" and not present.any():
        raise BadData(
            "content 'embedding' was asked for, but no item of the data set has an embedding: import items with one, or set content to 'text' or 'auto'"
        )
    # With embeddings they are kept although no item may need them now: a later item may come without one.
    text, features = _text(table, config, seed, steps)
    if config.content == "text" or not present.any():
        described = int((np.linalg.norm(features, axis=1) > 0).sum())
        return Content(features, "text", {"text": described, "nothing": table.num_rows - described}, text)
    missing = int((~present).sum())
    rows = np.flatnonzero(present)
    fallback = LinearMap.fit(features[rows], unit_rows(given)[rows], config.ridge)
    vectors = unit_rows(given)
    vectors[~present] = unit_rows(fallback(features[~present]))
    return Content(vectors, "embedding", {"embedding": len(rows), "predicted from text": missing}, text, fallback)


def _text(table: pa.Table, config: TokenizerConfig, seed: int, steps: Steps) -> tuple[TextFeatures, FloatArray]:
    hashed = steps("words", hash_texts, _parts(table, steps, _HASHED_ROWS), hash_bits=config.hash_bits)
    lengths, buckets, weights = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for rows, words in zip(hashed.tables("rows"), hashed.tables("words"), strict=True):
        lengths.append(rows["length"].to_numpy())
        buckets.append(words["bucket"].to_numpy())
        weights.append(words["weight"].to_numpy())
    counts = sp.csr_matrix(
        (np.concatenate(weights), np.concatenate(buckets), np.cumsum(np.concatenate(lengths))), shape=(table.num_rows, 1 << config.hash_bits)
    )
    return TextFeatures.fit_counts(counts, dim=config.text_dim, hash_bits=config.hash_bits, max_buckets=config.max_buckets, seed=seed)


def _encoded(table: pa.Table, steps: Steps) -> Content:
    encoded = steps("sentences", encode_texts, _parts(table, steps, _ENCODED_ROWS))
    blocks = [np.zeros((0, 384), np.float32)]
    for vectors in encoded.tables("vectors"):
        lists = vectors["vector"].combine_chunks()
        blocks.append(lists.flatten().to_numpy().reshape(len(lists), -1))
    described = sum(counts["count"][0].as_py() for counts in encoded.tables("described"))
    return Content(np.concatenate(blocks), "minilm", {"minilm": described, "nothing": table.num_rows - described})


def _parts(table: pa.Table, steps: Steps, num_rows: int) -> list[dict[str, Sequence[Piece]]]:
    described = table.select([name for name in ("title", "text", "categories", "attributes") if name in table.column_names])
    batches = [described.slice(begin, num_rows).combine_chunks().to_batches()[0] for begin in range(0, table.num_rows, num_rows)]
    if not batches:
        return []
    path = steps.share("texts", batches)[0].path
    return [{"items": [Piece(path, part)]} for part in range(len(batches))]
