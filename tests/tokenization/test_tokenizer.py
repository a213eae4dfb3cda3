from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semantide.services.tokenization.recipes import RECIPES, recipe
from semantide.services.tokenization.spelling import build
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.models.tokenizer import Tokenizer, TokenizerConfig

Rows = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("kind", ["text", "embedding", "content alone"])
def test_what_is_saved_spells_the_same(
    rows_of: Rows, make_dataset: Callable[..., Dataset], items_table: Callable[..., pa.Table], tmp_path: Path, kind: str
) -> None:
    rows = rows_of(120)
    if kind == "embedding":
        for row, vector in zip(rows[:-5], np.random.default_rng(0).normal(size=(120, 8)).tolist(), strict=False):
            row["embedding"] = vector
    config = TokenizerConfig(collaborative_weight=0.0 if kind == "content alone" else 1.0)
    tokenizer = build(make_dataset(rows), config, 3).tokenizer
    tokenizer.save(tmp_path / "t")
    read = Tokenizer.load(tmp_path / "t")
    assert read.digest == tokenizer.digest and read.config == config and read.level_sizes == tokenizer.level_sizes and read.seed == 3
    fresh = items_table(rows_of(30, seed=9))
    assert np.array_equal(read.vectors(fresh), tokenizer.vectors(fresh))
    nothing = np.zeros((0, 2), np.int64)
    assert np.array_equal(read.spell(fresh, nothing), tokenizer.spell(fresh, nothing))


def test_a_new_item_without_embedding_is_spelled_from_its_text(
    rows_of: Rows, make_dataset: Callable[..., Dataset], items_table: Callable[..., pa.Table]
) -> None:
    rows = rows_of(120)
    for row, vector in zip(rows, np.random.default_rng(0).normal(size=(120, 8)).tolist(), strict=True):
        row["embedding"] = vector
    tokenizer = build(make_dataset(rows), TokenizerConfig(), 0).tokenizer
    assert np.linalg.norm(tokenizer.content_vectors(items_table(rows_of(3, seed=5))), axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"windoww": 3}, "'windoww' is unknown: known are level_sizes"),
        ({"level_sizes": "64"}, "list of integers"),
        ({"level_sizes": [64]}, "at least two levels"),
        ({"level_sizes": [64, True]}, "list of integers"),
        ({"window": "3"}, "give a number"),
        ({"window": 2.5}, "whole number"),
        ({"window": 0}, "from 1 to 1000"),
        ({"fill": float("nan")}, "from 0.01 to 1"),
        ({"content": "images"}, "one of auto, embedding, text, minilm"),
        ({"balance": 0.5}, "at least 1"),
        ({"content_weight": 0, "collaborative_weight": 0}, "both 0"),
    ],
)
def test_a_wrong_override_names_its_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadData, match=text):
        TokenizerConfig().overridden(changes)


def test_overrides_from_json() -> None:
    config = TokenizerConfig().overridden({"level_sizes": [32, 64], "window": 3, "decay": 1, "resolver": "append"})
    assert config == TokenizerConfig(level_sizes=(32, 64), window=3, decay=1.0, resolver="append")


def test_recipes_are_valid_and_named() -> None:
    assert all(recipe(name) == make() for name, make in RECIPES.items()) and recipe("") == recipe("default")
    with pytest.raises(BadData, match="known are default"):
        recipe("nonsense")
