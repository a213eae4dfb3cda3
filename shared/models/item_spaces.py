"""What items are, and who likes them together: two spaces that the search and the gate compare items in.

Legend: N items, M later items, C content and G collaborative width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from semantide.shared.models.interest_search import FloatArray
from semantide.shared.models.linear_map import LinearMap, unit_rows
from semantide.shared.models.text_features import TextFeatures


@dataclass(frozen=True)
class ItemSpaces:
    """Unit rows, of zeros where nothing is known.

    Shapes: ``content_NC``, ``collaborative_NG``. ``text`` reads the content of later items, ``embedded`` says that content are given embeddings, and
    ``collaborative_of`` predicts who would like an item by what it is.
    """

    content_NC: FloatArray
    collaborative_NG: FloatArray
    text: TextFeatures | None = None
    embedded: bool = False
    collaborative_of: LinearMap | None = None

    def search_vectors(self) -> FloatArray:
        """Both beside each other, of length one [N, C + G]."""
        return self._joined

    @cached_property
    def _joined(self) -> FloatArray:
        return unit_rows(np.concatenate([self.content_NC, self.collaborative_NG], axis=1))

    def of_later(self, table: pa.Table) -> FloatArray:
        """The content vectors of items that came later, from their descriptions [M, C]."""
        width = self.content_NC.shape[1]
        content = np.zeros((table.num_rows, width), np.float32)
        if self.text is not None and not self.embedded:
            return self.text(table)
        if self.embedded and "embedding" in table.column_names:
            for row, vector in enumerate(table["embedding"].to_pylist()):
                if vector is not None and len(vector) == width:
                    content[row] = vector
            content = unit_rows(content)
        return content

    def widened(self, content_MC: FloatArray) -> ItemSpaces:
        """The same with later items, known by what they are."""
        known = np.linalg.norm(content_MC, axis=1) > 0.5
        collaborative = np.zeros((len(content_MC), self.collaborative_NG.shape[1]), np.float32)
        if self.collaborative_of is not None and known.any():
            collaborative[known] = unit_rows(self.collaborative_of(content_MC[known]))
        return replace(self, content_NC=np.concatenate([self.content_NC, content_MC]), collaborative_NG=np.concatenate([self.collaborative_NG, collaborative]))

    def liked(self, name: str) -> dict[str, FloatArray]:
        """Who likes them together, as arrays to be stored under a name."""
        arrays = {f"{name}.collaborative": self.collaborative_NG}
        if self.collaborative_of is not None:
            arrays |= {f"{name}.weight": self.collaborative_of.weight, f"{name}.bias": self.collaborative_of.bias}
        return arrays

    def with_liked(self, arrays: Mapping[str, FloatArray], name: str) -> ItemSpaces:
        """The same content with what ``liked`` gave."""
        weight = f"{name}.weight"
        return replace(
            self,
            collaborative_NG=arrays[f"{name}.collaborative"],
            collaborative_of=LinearMap(arrays[weight], arrays[f"{name}.bias"]) if weight in arrays else None,
        )
