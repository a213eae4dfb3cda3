from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semantide.shared.catalog import Catalog, Lineage, Lineages
from semantide.shared.errors import Conflict


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(("a", "b", "ü/c"), np.array([[0, 1], [0, 2], [3, 1]]), (4, 8), "digest")


def test_what_is_saved_is_read(catalog: Catalog, tmp_path: Path) -> None:
    catalog.save(tmp_path / "c", dataset="datasets/x")
    read = Catalog.load(tmp_path / "c")
    assert read.item_ids == catalog.item_ids and np.array_equal(read.codes, catalog.codes) and read.level_sizes == catalog.level_sizes
    assert json.loads((tmp_path / "c" / "catalog.json").read_text())["dataset"] == "datasets/x"
    assert len(read) == 3 and read.row_of["ü/c"] == 2 and read.trie.find([3, 1]) == 2


def test_a_model_of_another_tokenizer_is_refused(catalog: Catalog) -> None:
    catalog.check_model("digest", (4, 8))
    with pytest.raises(Conflict, match="trained for tokenizer other"):
        catalog.check_model("other", (4, 8))
    with pytest.raises(Conflict, match=r"levels \(4, 9\)"):
        catalog.check_model("digest", (4, 9))


def test_the_newest_tokenizer_is_current_and_older_ones_stay(broker: Any) -> None:
    lineages = Lineages(broker)
    assert lineages.current() is None and lineages.all() == []
    for number in range(6):
        lineages.begin(f"t{number}", f"base{number}")
    assert lineages.current() == "base5"
    assert [entry.tokenizer for entry in lineages.all()] == ["t5", "t4", "t3", "t2"]


def test_an_extension_replaces_its_catalog_once(broker: Any) -> None:
    lineages = Lineages(broker)
    lineages.begin("t", "base")
    assert lineages.extend("base", "larger")
    assert not lineages.extend("base", "other")
    assert lineages.current() == "larger"


def test_the_same_catalog_made_again_keeps_what_came_later(broker: Any) -> None:
    lineages = Lineages(broker)
    lineages.begin("t", "base")
    lineages.extend("base", "larger")
    lineages.begin("u", "second")
    lineages.begin("t", "base")
    assert lineages.all() == [Lineage("t", "base", "larger"), Lineage("u", "second", "second")]


def test_waiting_items_are_noted_once(broker: Any) -> None:
    lineages = Lineages(broker)
    lineages.wait(["x", "y"])
    lineages.wait(["x"])
    assert sorted(lineages.waiting()) == ["x", "y"]
    lineages.done(["x", "y"])
    assert lineages.waiting() == []
