"""A head start for the generator: layers of a language model, and embeddings of codes at the tokenizer's code vectors, so that like codes begin alike.

Legend: K codes of a level, C width of a code vector, D hidden size, V tokens of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

from semantide.shared.errors import Conflict
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.pretrained import read_config
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.models.vocabulary import Layout

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
        for level in range(vocabulary.levels):
            generator.lm_head.weight[vocabulary.row(level)] = embedding[vocabulary.row(level)]


@torch.no_grad()
def begin_at_checkpoint(folder: Path, shape: GeneratorConfig, level_sizes: tuple[int, ...], keep_text: bool, seed: int) -> tuple[Generator, bool]:
    """A generator with the layers of a Qwen2.5 or Qwen3 checkpoint, and whether its codes are new.

    A checkpoint without codes gets a token for each. They begin with the mean and deviation of its own tokens' embeddings, feature by feature; those tokens
    stay before them with ``keep_text``, and else all but the one that begins a text are left out. Of ``shape`` only what acts in training counts.

    Raises: NotFound, Corrupt, Conflict.
    """
    source = Generator.from_pretrained(folder).float()
    trained = {name: getattr(shape, name) for name in ("dropout", "embedding_dropout", "token_dropout", "level_scales", "seen_bias", "merger")}
    size, known = source.config.vocab_size, source.config.level_sizes
    if known == level_sizes or known != (size - 1,):
        if known != level_sizes:
            raise Conflict(
                f"{folder} has codes of levels {known} and the catalog {level_sizes}: take the catalog it was made for, or a checkpoint without codes"
            )
        config = replace(source.config, **{**trained, "seen_bias": shape.seen_bias or source.config.seen_bias, "merger": _merger(shape, source.config, folder)})
        return _with_state(config, source.state_dict()), False
    begin = _begin_token(folder, size)
    rows = slice(0, size) if keep_text else slice(begin, begin + 1)
    layout = Layout((begin,), firsts=tuple(size + sum(level_sizes[:level]) for level in range(len(level_sizes)))) if keep_text else Layout()
    state = source.state_dict()
    random = torch.Generator().manual_seed(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            old_VD = state[name]
            new_KD = old_VD.mean(0) + old_VD.std(0) * torch.randn(sum(level_sizes), old_VD.shape[1], generator=random)
            state[name] = torch.cat([old_VD[rows], new_KD])
    deviation = float(state["model.embed_tokens.weight"].std())
    config = replace(
        source.config, level_sizes=level_sizes, layout=layout, vocab_size=rows.stop - rows.start + sum(level_sizes), initializer_range=deviation, **trained
    )
    return _with_state(config, state), True


def _with_state(config: GeneratorConfig, state: dict[str, torch.Tensor]) -> Generator:
    """A generator with these tensors; what only training adds begins as it does in a new one."""
    generator = Generator(config)
    missing, unknown = generator.load_state_dict(state, strict=False)
    new = {name for name in missing if name.startswith("merger.")}
    assert not unknown and set(missing) - new <= {"level_log_scale", "seen_bias.weight"}, (missing, unknown)
    return generator


def _merger(shape: GeneratorConfig, source: GeneratorConfig, folder: Path) -> MergerConfig:
    """The merger that training goes on with: the checkpoint's, or a new one that begins as the mean of an item's codes.

    Raises: Conflict where the checkpoint has another than was asked for.
    """
    wanted, known = shape.merger, source.merger
    if not known.enabled or not wanted.enabled:
        return wanted if wanted.enabled else known
    if replace(wanted, actions=known.actions) != known:
        raise Conflict(
            f"{folder} merges items with {known.to_json()}, not with {wanted.to_json()}: leave generator.merger out, or take a checkpoint without one"
        )
    return known


def _begin_token(folder: Path, size: int) -> int:
    """The token that begins a text; where none does, the one that ends it."""
    header = read_config(folder)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = header.get(name)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int) and 0 <= token < size:
            return token
    return 0
