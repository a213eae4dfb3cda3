"""What items have in common, as rows of one table: categories, brands and the like, whose vectors are added to those of the items.

All features lie in one table one after another, so that a step asks for the features of all its items at once, each row once.
Legend: N items, U some of them, F values of those one after another, V values of all features, D vector size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

_ATTRIBUTE = "attributes."


@dataclass(frozen=True)
class ItemFeatures:
    """The values of each item's features; ``names_V`` says what each row of the table stands for: feature and value.

    Shapes: ``rows_F`` of all items one after another, ``offsets_N1``.
    """

    names_V: tuple[tuple[str, str], ...]
    rows_F: Tensor
    offsets_N1: Tensor

    @classmethod
    def of(cls, items: pa.Table, features: Sequence[str]) -> ItemFeatures:
        """From a data set's item table: ``categories``, or ``attributes.NAME`` for one of the items' attributes.

        Raises: ValueError for a feature that no item has.
        """
        values_N: list[list[tuple[str, str]]] = [[] for _ in range(items.num_rows)]
        for feature in features:
            found = _values(items, feature)
            if not any(found):
                known = "categories, or attributes.NAME with the name of an attribute"
                raise ValueError(f"features names {feature!r}, which no item of the data set has: give {known}, or leave it out")
            for values, own in zip(values_N, found, strict=True):
                values += [(feature, value) for value in dict.fromkeys(own)]
        names = tuple(sorted({value for values in values_N for value in values}, key=lambda value: (features.index(value[0]), value[1])))
        row_of = {name: row for row, name in enumerate(names)}
        rows = np.fromiter((row_of[value] for values in values_N for value in values), np.int64)
        lengths = np.fromiter((len(values) for values in values_N), np.int64, items.num_rows)
        return cls(names, torch.from_numpy(rows), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)))

    def asked(self, items_U: Tensor) -> Tensor:
        """Rows of the features of some items, one item's after another's: [F]."""
        starts_U, lengths_U = self.offsets_N1[items_U], self.lengths(items_U)
        ends_U = lengths_U.cumsum(0)
        return self.rows_F[torch.arange(int(ends_U[-1]) if len(ends_U) else 0) + (starts_U - ends_U + lengths_U).repeat_interleave(lengths_U)]

    def lengths(self, items_U: Tensor) -> Tensor:
        """How many values each of these items has: [U]."""
        return self.offsets_N1[items_U + 1] - self.offsets_N1[items_U]

    def of_rows(self, rows_V: Tensor) -> Tensor:
        """Which items have any of these rows of the table: bool [N]."""
        wanted_V = torch.zeros(len(self.names_V), dtype=torch.bool).index_fill_(0, rows_V.cpu(), True)
        items_F = torch.arange(len(self.offsets_N1) - 1).repeat_interleave(self.offsets_N1.diff())
        return torch.zeros(len(self.offsets_N1) - 1, dtype=torch.bool).index_fill_(0, items_F[wanted_V[self.rows_F]], True)


def pooled(vectors_VD: Tensor, places_F: Tensor, lengths_U: Tensor) -> Tensor:
    """The mean of each item's vectors, nothing where it has none: [U, D]. ``places_F`` are rows of ``vectors_VD``."""
    starts_U = lengths_U.cumsum(0) - lengths_U
    if not len(places_F):
        return vectors_VD.new_zeros(len(lengths_U), vectors_VD.shape[1])
    means_UD: Tensor = F.embedding_bag(places_F, vectors_VD, starts_U, mode="mean")
    return means_UD


def _values(items: pa.Table, feature: str) -> Sequence[Sequence[str]]:
    columns = items.column_names
    if feature == "categories" and "categories" in columns:
        return [[str(value) for value in values or []] for values in items["categories"].to_pylist()]
    if feature.startswith(_ATTRIBUTE) and "attributes" in columns:
        name = feature.removeprefix(_ATTRIBUTE)
        attributes = (json.loads(text) if text else {} for text in items["attributes"].to_pylist())
        return [[] if own.get(name) in (None, "") else [str(own[name])] for own in attributes]
    return [[] for _ in range(items.num_rows)]
