from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.models.item_features import ItemFeatures, pooled

CATEGORIES = st.lists(st.lists(st.sampled_from("abcd"), max_size=4), min_size=1, max_size=8)


def table(categories: list[list[str]]) -> pa.Table:
    brands = [json.dumps({"brand": f"brand {number % 2}"} if number % 3 else {}) for number in range(len(categories))]
    return pa.table({"categories": pa.array(categories, pa.list_(pa.string())), "attributes": brands})


@given(CATEGORIES.filter(lambda lists: any(lists)), st.data())
def test_items_ask_for_their_values_and_get_their_mean(categories: list[list[str]], data: st.DataObject) -> None:
    features = ItemFeatures.of(table(categories), ["categories"])
    items = data.draw(st.lists(st.integers(0, len(categories) - 1), max_size=6))
    asked, lengths = features.asked(torch.tensor(items, dtype=torch.int64)), features.lengths(torch.tensor(items, dtype=torch.int64))
    wanted = [[("categories", value) for value in dict.fromkeys(categories[item])] for item in items]
    assert [features.names_V[row] for row in asked.tolist()] == [value for values in wanted for value in values]
    vectors = torch.randn(len(features.names_V), 3, dtype=torch.float64)
    means = pooled(vectors, asked, lengths)
    for mean, values in zip(means, wanted, strict=True):
        rows = [features.names_V.index(value) for value in values]
        torch.testing.assert_close(mean, vectors[rows].mean(0) if rows else torch.zeros(3, dtype=torch.float64))
    rows = data.draw(st.sets(st.integers(0, len(features.names_V) - 1)))
    having = [any(features.names_V.index(("categories", value)) in rows for value in values) for values in categories]
    assert features.of_rows(torch.tensor(sorted(rows), dtype=torch.int64)).tolist() == having


def test_all_features_lie_in_one_table_one_after_another() -> None:
    features = ItemFeatures.of(table([["b"], ["a", "b"], ["a"]]), ["attributes.brand", "categories"])
    assert features.names_V == (("attributes.brand", "brand 0"), ("attributes.brand", "brand 1"), ("categories", "a"), ("categories", "b"))
    assert features.asked(torch.tensor([1, 0])).tolist() == [1, 2, 3, 3]
    zeros = pa.table({"attributes": [json.dumps(own) for own in ({"shelf": 0}, {"shelf": False}, {"shelf": None}, {"shelf": ""}, {})]})
    assert ItemFeatures.of(zeros, ["attributes.shelf"]).lengths(torch.arange(5)).tolist() == [1, 1, 0, 0, 0], "0 is a value too"
    with pytest.raises(ValueError, match=r"'attributes.size', which no item"):
        ItemFeatures.of(table([["b"]]), ["attributes.size"])
    with pytest.raises(ValueError, match="no item"):
        ItemFeatures.of(pa.table({"item": ["a"]}), ["categories"])
