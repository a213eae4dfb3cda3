"""A head start for the generator: embeddings of codes begin at the tokenizer's code vectors, so that like codes begin alike.

Legend: K codes of a level, C width of a code vector, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

from semantide.shared.models.generator import Generator

FloatArray = npt.NDArray[np.floating]


def read_codebooks(catalog: Path) -> list[FloatArray | None]:
    """The tokenizer's code vectors [K, C] of each level, None for a level that has none."""
    path = catalog / "tokenizer.safetensors"
    if not path.is_file():
        return []
    tensors = load_file(path)
    levels = [int(name.removeprefix("codebook.")) for name in tensors if name.startswith("codebook.")]
    return [tensors.get(f"codebook.{level}") for level in range(max(levels, default=-1) + 1)]


def centroids(vectors_NC: FloatArray, codes_NL: npt.NDArray[np.int64], level_sizes: tuple[int, ...]) -> list[FloatArray | None]:
    """Code vectors for ids whose tokenizer is not at hand: means of what the levels before have left of the items' vectors."""
    residual = vectors_NC - vectors_NC.mean(0)
    books: list[FloatArray | None] = []
    for level, size in enumerate(level_sizes):
        sums = np.zeros((size, residual.shape[1]))
        np.add.at(sums, codes_NL[:, level], residual)
        book = sums / np.maximum(np.bincount(codes_NL[:, level], minlength=size), 1)[:, None]
        books.append(book)
        residual = residual - book[codes_NL[:, level]]
    return books


@torch.no_grad()
def begin_at_codebooks(generator: Generator, codebooks: Sequence[FloatArray | None], share: float, seed: int) -> None:
    """Mix turned and scaled code vectors into the embeddings and head, with ``share`` of their standard deviation."""
    config, vocabulary = generator.config, generator.vocabulary
    turn = np.linalg.qr(np.random.default_rng([seed, 5]).normal(size=(config.hidden_size, config.hidden_size)))[0]
    rest = (1 - share**2) ** 0.5
    embedding = generator.model.embed_tokens.weight
    for level, book in enumerate(codebooks[: vocabulary.levels]):
        if book is None or len(book) != vocabulary.level_sizes[level]:
            continue
        left, values, _ = np.linalg.svd(np.asarray(book, dtype=np.float64) - book.mean(0), full_matrices=False)
        width = min(config.hidden_size, len(values))
        points = np.zeros((len(book), config.hidden_size))
        points[:, :width] = left[:, :width] * values[:width]
        deviation = float(np.sqrt((points**2).mean()))
        if deviation > 0:
            row = embedding[vocabulary.row(level)]
            row.mul_(rest).add_(torch.from_numpy(points @ turn / deviation).to(row), alpha=share * config.initializer_range)
    if not config.tie_word_embeddings:
        generator.lm_head.weight.copy_(embedding)
