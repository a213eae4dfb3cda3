"""Content vectors of a whole catalog, and what is kept so that a later item gets one in the same space.

Legend: N items, C dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from semantide.shared.errors import BadData
from semantide.shared.models.linear_map import FloatArray, LinearMap, unit_rows
from semantide.shared.models.minilm import MiniLM
from semantide.shared.models.text_features import TextFeatures, plain_text
from semantide.shared.models.tokenizer import Tick, TokenizerConfig, embedding_matrix, silent

_BLOCK = 2048  # texts encoded between two files of finished work


@dataclass(frozen=True)
class Content:
    """Vectors [N, C], where they came from, and how many items each way served."""

    vectors: FloatArray
    source: str
    counts: dict[str, int]
    text: TextFeatures | None = None
    fallback: LinearMap | None = None


def content_vectors(table: pa.Table, config: TokenizerConfig, seed: int, tick: Tick = silent, workdir: Path | None = None) -> Content:
    """Vectors as ``config.content`` says; with ``auto``, given embeddings where there are any, else hashed text.

    Raises: BadData.
    """
    if config.content == "minilm":
        return _encoded(table, tick, workdir)
    given, present = embedding_matrix(table)
    if config.content == "embedding" and not present.any():
        raise BadData(
            "content 'embedding' was asked for, but no item of the data set has an embedding: import items with one, or set content to 'text' or 'auto'"
        )
    if config.content == "text" or not present.any():
        tick("content vectors", 0, 1)
        text, vectors = _text(table, config, seed)
        described = int((np.linalg.norm(vectors, axis=1) > 0).sum())
        return Content(vectors, "text", {"text": described, "nothing": table.num_rows - described}, text)
    missing = int((~present).sum())
    # Text features are kept although no item may need them now: a later item may come without an embedding.
    text, features = _text(table, config, seed)
    rows = np.flatnonzero(present)
    fallback = LinearMap.fit(features[rows], unit_rows(given)[rows], config.ridge)
    vectors = unit_rows(given)
    vectors[~present] = unit_rows(fallback(features[~present]))
    return Content(vectors, "embedding", {"embedding": len(rows), "predicted from text": missing}, text, fallback)


def _text(table: pa.Table, config: TokenizerConfig, seed: int) -> tuple[TextFeatures, FloatArray]:
    return TextFeatures.fit(table, dim=config.text_dim, hash_bits=config.hash_bits, max_buckets=config.max_buckets, seed=seed)


def _encoded(table: pa.Table, tick: Tick, workdir: Path | None) -> Content:
    encoder = MiniLM()
    blocks = []
    described = 0
    for begin in range(0, table.num_rows, _BLOCK):
        texts = [plain_text(row) for row in table.slice(begin, _BLOCK).to_pylist()]
        described += sum(bool(text) for text in texts)
        kept = workdir / "text" / f"{begin}.npy" if workdir else None
        if kept and kept.is_file():
            blocks.append(np.load(kept, allow_pickle=False))
            continue
        blocks.append(encoder(texts, tick=lambda done, begin=begin: tick("content vectors", begin + done, table.num_rows)))  # type: ignore[misc]
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary = kept.with_name(f"{begin}.part.npy")
            np.save(temporary, blocks[-1], allow_pickle=False)
            temporary.replace(kept)
    vectors = np.concatenate(blocks) if blocks else np.zeros((0, 384), np.float32)
    return Content(vectors, "minilm", {"minilm": described, "nothing": table.num_rows - described})
