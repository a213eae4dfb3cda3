"""The tokenizer: what turns an item into a semantic id, saved so that items which arrive later are spelled without training.

An item's vector joins its content with its place in people's histories: ``[w_content * content ; w_collaborative * collaborative]``,
each part of length one. An item that nobody has touched yet gets the collaborative part that its content predicts.
Files: ``tokenizer.json`` (configuration) and ``tokenizer.safetensors`` (codebooks, text features, maps); their digest names the tokenizer.
Legend: N items, C content width, G collaborative width, K codes, D = C + G.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors.numpy import load_file, save

from semantide.shared.artifacts import digest_bytes
from semantide.shared.errors import BadData
from semantide.shared.models.linear_map import FloatArray, LinearMap, unit_rows
from semantide.shared.models.minilm import MiniLM
from semantide.shared.models.residual_codes import IntArray, ResidualCodes
from semantide.shared.models.text_features import TextFeatures, plain_text
from semantide.shared.stored_files import CATALOG_AGAIN, whole

Content = Literal["auto", "embedding", "text", "minilm"]
Tick = Callable[[str, float, float], None]  # stage, done, total


def silent(stage: str, done: float, total: float) -> None:
    """Hears progress and does nothing."""


@dataclass(frozen=True)
class TokenizerConfig:
    """How items are spelled. Every number that changes an id is here or is the seed."""

    level_sizes: tuple[int, ...] = ()
    """Codes of each level. Empty: chosen by the number of items, see ``level_sizes_for``."""
    content: Content = "auto"
    """Content vectors: given embeddings, hashed text, or MiniLM. ``auto``: embeddings where any are given, else hashed text."""
    content_weight: float = 0.7
    """Length of the content part of an item's vector; 0 leaves it out."""
    collaborative_weight: float = 1.0
    """0 leaves the histories out."""
    text_dim: int = 96
    hash_bits: int = 18
    max_buckets: int = 32768
    collaborative_dim: int = 64
    window: int = 8
    """How many events apart two items still count as together."""
    decay: float = 0.8
    """Weight of a pair falls by this factor with each event between."""
    smoothing: float = 0.75
    """Exponent of the context counts: below 1, rare items attract fewer accidental pairs."""
    spectrum_power: float = 0.5
    """Exponent of the singular values in the collaborative vectors."""
    ridge: float = 0.1
    """Penalty of the maps from content, as a share of the inputs' mean squared singular value."""
    iterations: int = 25
    fit_rows: int = 100_000
    """Most items that a codebook is fitted on; all are spelled."""
    fill: float = 0.9
    """Most of the ids below a last-level prefix that the first catalog uses; the rest is for items that arrive later."""
    balance: float = 0.0
    """From 1: no code under a prefix holds more than this many times its equal share. 0: no such limit."""
    resolver: Literal["reassign", "append"] = "reassign"
    """How ids become distinct: move within the last level, or append one more code that counts up."""
    append_size: int = 64
    """Codes of the level that ``append`` adds."""
    assignment: Literal["optimal", "greedy"] = "optimal"
    """Within a crowded prefix: least total distance, or first come by regret."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("content_weight", 0, 1e6), ("collaborative_weight", 0, 1e6), ("text_dim", 1, 4096), ("hash_bits", 8, 24), ("max_buckets", 1, 1 << 24),
            ("collaborative_dim", 1, 4096), ("window", 1, 1000), ("decay", 0, 1), ("smoothing", 0, 1), ("spectrum_power", 0, 2), ("ridge", 0, 1e9),
            ("iterations", 1, 1000), ("fit_rows", 16, 1 << 30), ("fill", 0.01, 1), ("append_size", 1, 1 << 16),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"tokenizer {name} is {getattr(self, name)}: give a number from {low} to {high}")
        if self.balance and not self.balance >= 1:
            raise ValueError(f"tokenizer balance is {self.balance}: give 0 (no limit) or at least 1 (equal shares)")
        if self.level_sizes and (len(self.level_sizes) < 2 or min(self.level_sizes) < 2 or np.prod([float(size) for size in self.level_sizes]) > 2.0**60):
            raise ValueError(f"tokenizer level_sizes are {self.level_sizes}: give at least two levels of at least 2 codes, at most 2^60 ids, or leave it empty")
        if not self.content_weight and not self.collaborative_weight:
            raise ValueError("tokenizer content_weight and collaborative_weight are both 0: give one of them a weight")
        for name, choices in (
            ("content", ("auto", "embedding", "text", "minilm")),
            ("resolver", ("reassign", "append")),
            ("assignment", ("optimal", "greedy")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"tokenizer {name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")

    def overridden(self, changes: Mapping[str, Any]) -> TokenizerConfig:
        """This configuration with some fields replaced, as a job's ``config`` gives them.

        Raises: BadData that names the field.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise BadData(f"tokenizer config field {name!r} is unknown: known are {', '.join(known)}")
            default = known[name]
            if name == "level_sizes":
                if not isinstance(value, (list, tuple)) or not all(isinstance(size, int) and not isinstance(size, bool) for size in value):
                    raise BadData(f"tokenizer level_sizes is {value!r}: give a list of integers such as [256, 256, 256]")
                values[name] = tuple(value)
            elif isinstance(default, str) != isinstance(value, str) or isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise BadData(f"tokenizer {name} is {value!r}: give a {'text' if isinstance(default, str) else 'number'} such as {default!r}")
            elif isinstance(default, int) and value != int(value):
                raise BadData(f"tokenizer {name} is {value!r}: give a whole number such as {default!r}")
            else:
                values[name] = type(default)(value)
        try:
            return replace(self, **values)
        except ValueError as error:
            raise BadData(str(error)) from error


def embedding_problems(table: pa.Table, width: int | None = None) -> dict[int, str]:
    """What is wrong with given embeddings, by row; ``width`` is the catalog's, or else that of most items."""
    lengths, numbers = _embedding_lengths(table)
    present = np.flatnonzero(lengths)
    if not len(present):
        return {}
    width = width or int(np.bincount(lengths[present]).argmax())
    bad = np.add.reduceat((~np.isfinite(numbers)).astype(np.int64), np.cumsum(np.r_[0, lengths[present][:-1]])) > 0
    problems = {}
    for row, broken in zip(present[(lengths[present] != width) | bad].tolist(), bad[(lengths[present] != width) | bad].tolist(), strict=True):
        what = (
            "it holds NaN or infinity: correct the vector"
            if broken
            else f"{lengths[row]} numbers where the catalog has {width}: give all items vectors of one encoder"
        )
        problems[row] = f"item {table['item'][row].as_py()!r} (row {row}), field embedding: {what}, or leave the field out"
    return problems


def _embedding_lengths(table: pa.Table) -> tuple[IntArray, FloatArray]:
    column = table["embedding"] if "embedding" in table.column_names else None
    if column is None or column.null_count == table.num_rows:
        return np.zeros(table.num_rows, np.int64), np.zeros(0, np.float32)
    column = column.cast(pa.list_(pa.float32()))
    lengths = np.concatenate([np.asarray(part.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64) for part in column.chunks])
    flat = [np.asarray(part.drop_null().flatten().to_numpy(zero_copy_only=False), np.float32) for part in column.chunks]
    return lengths, np.concatenate(flat)


def embedding_matrix(table: pa.Table, width: int | None = None) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Given embeddings [N, C] and which rows have one [N]; rows without are zero.

    Raises: BadData naming the item on a wrong width or a number that is not finite.
    """
    if problems := embedding_problems(table, width):
        raise BadData(next(iter(problems.values())) + (f" ({len(problems)} items have such an embedding)" if len(problems) > 1 else ""))
    lengths, numbers = _embedding_lengths(table)
    present = lengths > 0
    width = width or int(lengths.max(initial=0))
    matrix = np.zeros((table.num_rows, width), np.float32)
    if present.any():
        matrix[present] = numbers.reshape(-1, width)
    return matrix, present


@dataclass(frozen=True)
class Tokenizer:
    """Codebooks and everything that makes an item's vector.

    ``source`` is what content vectors are: ``embedding``, ``text`` or ``minilm``. ``fallback`` predicts an embedding from text
    features, ``collaborative`` predicts the collaborative part from content; each is None where there was nothing to fit it on.
    """

    config: TokenizerConfig
    seed: int
    source: str
    content_width: int
    codes: ResidualCodes
    text: TextFeatures | None = None
    fallback: LinearMap | None = None
    collaborative: LinearMap | None = None

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Codes of each level of an id."""
        return self.codes.level_sizes

    def content_vectors(self, table: pa.Table) -> FloatArray:
        """Unit content vectors [N, C] of items (columns item, title, text, categories, attributes, embedding).

        Raises: BadData.
        """
        if self.source == "minilm":
            return MiniLM()([plain_text(row) for row in table.to_pylist()])
        if self.source == "text":
            assert self.text is not None
            return self.text(table)
        vectors, present = embedding_matrix(table, self.content_width)
        return fill_missing(vectors, present, table, self.text, self.fallback)

    def vectors(self, table: pa.Table) -> FloatArray:
        """Joined vectors [N, D] of items that no history knows."""
        content = self.content_vectors(table)
        return join(self.config, content, unit_rows(self.collaborative(content)) if self.collaborative else None)

    def spell(self, table: pa.Table, taken: IntArray) -> IntArray:
        """Ids [N, L] for new items: the nearest free ones, distinct and none of ``taken`` [M, L].

        Raises: BadData.
        """
        return self.codes.place(self.vectors(table), taken, optimal=self.config.assignment == "optimal")

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files that ``save`` writes."""
        tensors: dict[str, npt.NDArray[Any]] = {f"codebook.{level}": book for level, book in enumerate(self.codes.codebooks)}
        if self.text:
            tensors |= {"text.buckets": self.text.buckets, "text.idf": self.text.idf, "text.components": self.text.components}
        for name, mapping in (("fallback", self.fallback), ("collaborative", self.collaborative)):
            if mapping:
                tensors |= {f"{name}.weight": mapping.weight, f"{name}.bias": mapping.bias}
        header = {
            "config": asdict(self.config),
            "seed": self.seed,
            "source": self.source,
            "content_width": self.content_width,
            "level_sizes": list(self.level_sizes),
        }
        return {
            "tokenizer.json": json.dumps(header, indent=1, sort_keys=True).encode(),
            "tokenizer.safetensors": save({name: np.ascontiguousarray(tensor) for name, tensor in sorted(tensors.items())}),
        }

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of the files: what a model that was trained on these ids asks for."""
        return digest_bytes(b"".join(name.encode() + digest_bytes(data).encode() for name, data in sorted(self.files.items())))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer.safetensors``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read what ``save`` wrote.

        Raises: Corrupt.
        """
        with whole(folder, "tokenizer", CATALOG_AGAIN):
            header = json.loads((folder / "tokenizer.json").read_text())
            tensors = load_file(folder / "tokenizer.safetensors")
            config = TokenizerConfig(**{**header["config"], "level_sizes": tuple(header["config"]["level_sizes"])})

            def linear(name: str) -> LinearMap | None:
                return LinearMap(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) if f"{name}.weight" in tensors else None

            text = TextFeatures(config.hash_bits, tensors["text.buckets"], tensors["text.idf"], tensors["text.components"]) if "text.idf" in tensors else None
            codes = ResidualCodes(tuple(tensors[f"codebook.{level}"] for level in range(len(header["level_sizes"]))))
            return cls(config, header["seed"], header["source"], header["content_width"], codes, text, linear("fallback"), linear("collaborative"))


def fill_missing(vectors: FloatArray, present: npt.NDArray[np.bool_], table: pa.Table, text: TextFeatures | None, fallback: LinearMap | None) -> FloatArray:
    """Unit rows of given vectors; rows without one are predicted from their text, or stay zero where nothing predicts."""
    vectors = unit_rows(vectors)
    missing = np.flatnonzero(~present)
    if len(missing) and text is not None and fallback is not None:
        vectors[missing] = unit_rows(fallback(text(table.take(pa.array(missing)))))
    return vectors


def join(config: TokenizerConfig, content: FloatArray, collaborative: FloatArray | None) -> FloatArray:
    """The weighted parts of every item side by side [N, D]."""
    parts = [config.content_weight * content]
    if collaborative is not None:
        parts.append(config.collaborative_weight * collaborative)
    return np.ascontiguousarray(np.concatenate(parts, axis=1), dtype=np.float32)
