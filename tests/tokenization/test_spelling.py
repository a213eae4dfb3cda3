from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.tokenization.quality import QualityLimits, effective_rank
from semantide.services.tokenization.spelling import Spelled, build, extend, prefix_rows
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.models.tokenizer import TokenizerConfig

Rows = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Dataset]
Table = Callable[..., pa.Table]


@pytest.fixture
def spelled(rows_of: Rows, make_dataset: Make) -> Spelled:
    return build(make_dataset(rows_of(160)), TokenizerConfig(), 0)


def test_item_to_id_to_item_is_lossless_for_the_whole_catalog(spelled: Spelled, tmp_path: Path) -> None:
    spelled.save(tmp_path / "c")
    read = Spelled.load(tmp_path / "c")
    trie = read.catalog.trie
    for row, item in enumerate(read.catalog.item_ids):
        leaf = trie.find(read.catalog.codes[read.catalog.row_of[item]])
        assert leaf is not None and trie.leaf_items[leaf] == row
    assert len(trie.leaf_items) == 160 and read.info["item"].to_pylist() == list(read.catalog.item_ids)
    assert read.report == spelled.report and json.loads((tmp_path / "c" / "report.json").read_text())["verdict"]["passed"]


def test_near_identical_items_get_ids_of_their_own(rows_of: Rows, make_dataset: Make) -> None:
    twin = {"text": "", "categories": ["music"], "attributes": "{}", "available": True, "embedding": None}
    for others in (0, 60):
        rows = rows_of(others)
        rows += [
            {"item": f"twin{size}", "title": f"red cotton shirt with long sleeves{' ' + size if size in 'sm' else ''}", **twin} for size in ("s", "m", "x", "y")
        ]
        catalog = build(make_dataset(rows), TokenizerConfig(), 0).catalog
        ids = {tuple(catalog.codes[catalog.row_of[f"twin{size}"]].tolist()) for size in ("s", "m", "x", "y")}
        assert len(ids) == 4
        found = catalog.trie.leaf_items.tolist()
        assert all(catalog.row_of[f"twin{size}"] in found for size in ("s", "m", "x", "y"))


def test_the_same_input_gives_the_same_files(rows_of: Rows, make_dataset: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(make_dataset(rows_of(120)), TokenizerConfig(), 4).save(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    other = build(make_dataset(rows_of(120)), TokenizerConfig(), 5)
    assert other.tokenizer.digest != Spelled.load(tmp_path / "a").tokenizer.digest


def test_new_items_are_appended_and_known_ids_stay(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    rows = [{**row, "item": f"new{number}"} for number, row in enumerate(rows_of(30, seed=7))]
    twin = {**rows_of(160)[3], "item": "twin of i3"}
    larger = extend(spelled, items_table([*rows, twin, rows_of(160)[3]]), {"extends": "x"})
    catalog, old = larger.spelled.catalog, spelled.catalog
    assert larger.added == 31 and not larger.updated and not larger.rejected
    assert catalog.item_ids[:160] == old.item_ids and np.array_equal(catalog.codes[:160], old.codes)
    assert catalog.tokenizer_digest == old.tokenizer_digest and len(np.unique(catalog.codes, axis=0)) == 191
    assert larger.spelled.info["item"].to_pylist() == list(catalog.item_ids)
    assert larger.spelled.report["extended"]["added"] == 31 and larger.spelled.header["extends"] == "x"
    again = extend(larger.spelled, items_table([*rows, twin]))
    assert again.spelled is larger.spelled and not again.changed


def test_a_new_item_stands_near_its_like(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    rows = [{**row, "item": f"new{number}"} for number, row in enumerate(rows_of(64, seed=7))]
    catalog = extend(spelled, items_table(rows)).spelled.catalog
    known, new = catalog.codes[:160], catalog.codes[160:]
    genres = np.array([int(item[3:]) % 8 for item in catalog.item_ids[160:]])
    agree = []
    for code, genre in zip(new[:, 0], genres, strict=True):
        neighbours = np.flatnonzero(known[:, 0] == code)
        agree.append(np.mean(neighbours % 8 == genre) if len(neighbours) else 0.0)
    assert np.mean(agree) > 0.5


def test_what_is_said_of_an_item_is_renewed(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    changed = {**rows_of(160)[7], "title": "another title", "available": False}
    larger = extend(spelled, items_table([rows_of(160)[7], changed]))
    assert (larger.added, larger.updated) == (0, 1)
    assert larger.spelled.info.slice(7, 1).to_pylist()[0]["title"] == "another title"
    assert np.array_equal(larger.spelled.catalog.codes, spelled.catalog.codes)


def test_stock_that_comes_and_goes_makes_no_catalog(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    assert not extend(spelled, items_table([{**row, "available": False} for row in rows_of(160)])).changed


def test_a_withdrawn_item_keeps_its_id_and_an_unknown_one_gets_none(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    gone = [{**rows_of(160)[0], "deleted": True}, {**rows_of(160)[1], "item": "never seen", "deleted": True}]
    larger = extend(spelled, items_table(gone))
    assert not larger.added and larger.spelled.catalog.item_ids == spelled.catalog.item_ids


def test_a_wrong_embedding_is_left_out_and_named(rows_of: Rows, make_dataset: Make, items_table: Table) -> None:
    rows = rows_of(100)
    for row, vector in zip(rows, np.random.default_rng(0).normal(size=(100, 8)).tolist(), strict=True):
        row["embedding"] = vector
    spelled = build(make_dataset(rows), TokenizerConfig(), 0)
    fresh = [{**row, "item": f"n{number}", "embedding": [0.5] * (8 if number else 5)} for number, row in enumerate(rows_of(3, seed=2))]
    larger = extend(spelled, items_table(fresh))
    assert larger.added == 2 and "'n0'" in larger.rejected[0] and "5 numbers where the catalog has 8" in larger.rejected[0]


def test_tables_of_other_writers(spelled: Spelled, rows_of: Rows, items_table: Table) -> None:
    table = items_table([{**row, "item": f"new{number}"} for number, row in enumerate(rows_of(6, seed=7))])
    texts = {name: pa.large_string() for name in ("item", "title", "text", "attributes")}
    kinds = {**texts, "categories": pa.large_list(pa.large_string())}
    wide = pa.table({name: table[name].cast(kinds.get(name, table[name].type)) for name in table.column_names if name != "embedding"})
    other = extend(spelled, wide.append_column("embedding", pa.nulls(6))).spelled
    assert np.array_equal(other.catalog.codes, extend(spelled, table).spelled.catalog.codes) and other.info.schema == spelled.info.schema


def test_a_full_catalog_says_so(rows_of: Rows, make_dataset: Make, items_table: Table) -> None:
    spelled = build(make_dataset(rows_of(60)), TokenizerConfig(level_sizes=(8, 8)), 0)
    with pytest.raises(BadData, match=r"spell only 64: make a new catalog"):
        extend(spelled, items_table([{**row, "item": f"new{number}"} for number, row in enumerate(rows_of(5, seed=7))]))


@pytest.mark.parametrize("kind", ["constant", "low rank", "rank two"])
def test_collapsed_embeddings_fail_with_the_figures(rows_of: Rows, make_dataset: Make, kind: str) -> None:
    random = np.random.default_rng(0)
    rank = {"constant": 0, "low rank": 1, "rank two": 2}[kind]
    vectors = np.ones((80, 16)) + random.normal(size=(80, rank)) @ random.normal(size=(rank, 16))
    rows = rows_of(80)
    for row, vector in zip(rows, vectors.tolist(), strict=True):
        row["embedding"] = vector
    with pytest.raises(BadData, match=r"no catalog was written.*effective rank"):
        build(make_dataset(rows), TokenizerConfig(), 0)
    assert build(make_dataset(rows), TokenizerConfig(content="text"), 0).report["verdict"]["passed"]


def test_items_that_say_nothing_fail(rows_of: Rows, make_dataset: Make) -> None:
    rows = [{**row, "title": "", "text": "", "categories": [], "attributes": "{}"} for row in rows_of(40)]
    with pytest.raises(BadData, match="All 40 item vectors are the same"):
        build(make_dataset(rows, num_users=0), TokenizerConfig(), 0)
    assert build(make_dataset(rows, num_users=200), TokenizerConfig(), 0).report["verdict"]["passed"]


def test_few_kinds_of_items_fail(rows_of: Rows, make_dataset: Make) -> None:
    rows = [{**row, "title": f"kind {number % 5}", "text": "", "categories": [], "attributes": "{}"} for number, row in enumerate(rows_of(400))]
    with pytest.raises(BadData, match=r"first level uses 5 of 64 possible codes"):
        build(make_dataset(rows), TokenizerConfig(collaborative_weight=0.0), 0)
    lenient = QualityLimits(min_first_level_used=0, min_first_level_entropy=0, min_distinct_ids=0, min_effective_rank=0)
    assert build(make_dataset(rows), TokenizerConfig(collaborative_weight=0.0), 0, limits=lenient).report["collisions"]["before"]["items"] == 400


def test_no_items_at_all(make_dataset: Make) -> None:
    with pytest.raises(BadData, match="has no items"):
        build(make_dataset([]), TokenizerConfig(), 0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_tiny_catalogs_are_spelled(rows_of: Rows, make_dataset: Make, count: int) -> None:
    assert len(build(make_dataset(rows_of(count)), TokenizerConfig(), 0).catalog) == count


def test_the_report_has_all_figures(spelled: Spelled) -> None:
    report = spelled.report
    assert report["collisions"]["after"]["items"] == 0 and report["collisions"]["before"]["items"] >= 0
    assert [row["size"] for row in report["levels"]] == list(spelled.catalog.level_sizes)
    for row in report["levels"]:
        assert 0 < row["utilisation"] <= 1 and 0 < row["normalised_entropy"] <= 1 and row["perplexity"] <= row["size"] + 1e-3
    assert report["levels"][-1]["largest_prefix_group"] == 1
    assert report["levels"][0]["largest_prefix_group"] == np.bincount(spelled.catalog.codes[:, 0]).max()
    assert report["content"]["counts"] == {"text": 160, "nothing": 0}
    assert report["reconstruction"]["before"]["squared_error"] <= report["reconstruction"]["after"]["squared_error"]
    assert any("verdict: pass" in line for line in report["summary"])


def test_effective_rank_counts_directions() -> None:
    random = np.random.default_rng(0)
    assert effective_rank(np.ones((50, 8), np.float32) * 3.7) == 0
    assert effective_rank(np.eye(8, dtype=np.float32)[np.arange(80) % 8]) == pytest.approx(7, abs=1e-3)
    assert effective_rank((random.normal(size=(500, 1)) @ random.normal(size=(1, 8))).astype(np.float32)) == pytest.approx(1, abs=1e-3)


def test_vectors_of_a_trained_model_take_the_place_of_histories(rows_of: Rows, make_dataset: Make, tmp_path: Path) -> None:
    dataset = make_dataset(rows_of(100))
    vectors = np.random.default_rng(0).normal(size=(90, 12)).tolist()
    pq.write_table(pa.table({"item": [f"i{number}" for number in range(90)], "vector": vectors}), tmp_path / "vectors.parquet")
    report = build(dataset, TokenizerConfig(), 0, vectors=tmp_path / "vectors.parquet").report
    assert report["collaborative"] == {"source": "vectors", "seen": 90, "predicted": 10}
    pq.write_table(pa.table({"item": ["other"], "vector": [[1.0]]}), tmp_path / "vectors.parquet")
    with pytest.raises(BadData, match="no vector of any of the 100 items"):
        build(dataset, TokenizerConfig(), 0, vectors=tmp_path / "vectors.parquet")


def test_items_below_a_prefix(spelled: Spelled) -> None:
    code = spelled.catalog.codes[0]
    rows = prefix_rows(spelled.catalog, [int(code[0])])
    assert set(rows.tolist()) == set(np.flatnonzero(spelled.catalog.codes[:, 0] == code[0]).tolist())
    assert prefix_rows(spelled.catalog, code.tolist()).tolist() == [0]
    unused = next(c for c in range(10_000) if c not in spelled.catalog.codes[:, 0])
    assert len(prefix_rows(spelled.catalog, [unused])) == 0


@pytest.mark.slow
def test_ids_of_beauty(real_data: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "semantic_ids.py"
    ended = subprocess.run([sys.executable, str(script), "--data", str(real_data), "--json"], capture_output=True, text=True, check=True)
    measures = json.loads(ended.stdout)["measures"]
    assert measures["collisions"]["value"] == 0 and measures["first_level_used"]["value"] >= 0.95
