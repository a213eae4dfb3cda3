"""One compressed-sparse-row trie of all semantic ids, for data checks, training and serving.

Nodes of depth d are the distinct code prefixes of length d in lexicographic order; node 0 of depth 0 is the root.
``tokens[d]`` holds the code that leads to each node of depth d + 1, ``offsets[d]`` where each depth-d node's children begin.
The leaves (depth L) are in the order of the sorted ids; ``leaf_items`` maps a leaf to its row in the catalog.
Legend: N items, L levels, M_d nodes of depth d.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trie:
    """Children of every prefix.

    Shapes: ``offsets[d]`` [M_d + 1], ``tokens[d]`` [M_{d+1}], ``leaf_items`` [N].
    """

    offsets: tuple[IntArray, ...]
    tokens: tuple[IntArray, ...]
    leaf_items: IntArray

    @property
    def levels(self) -> int:
        """Length of every id."""
        return len(self.tokens)

    @classmethod
    def build(cls, codes: IntArray) -> Trie:
        """The trie of ``codes`` [N, L].

        Raises: ValueError when two rows are equal.
        """
        codes = np.ascontiguousarray(codes, dtype=np.int64)
        if codes.ndim != 2:
            raise ValueError(f"codes have shape {codes.shape}: give [items, levels]")
        count, levels = codes.shape
        order = np.lexsort(codes.T[::-1])
        ranked = codes[order]
        offsets, tokens = [], []
        parent = np.zeros(count, dtype=np.int64)
        num_parents = 1
        for level in range(levels):
            column = ranked[:, level]
            first = np.ones(count, dtype=bool)
            if count:
                first[1:] = (parent[1:] != parent[:-1]) | (column[1:] != column[:-1])
            tokens.append(column[first].copy())
            per_parent = np.bincount(parent[first], minlength=num_parents)
            offsets.append(np.concatenate([[0], np.cumsum(per_parent)]).astype(np.int64))
            parent = np.cumsum(first) - 1
            num_parents = int(first.sum())
        if num_parents != count:
            twin = int(np.flatnonzero(np.bincount(parent, minlength=1) > 1)[0])
            rows = order[parent == twin][:2]
            raise ValueError(f"items {rows[0]} and {rows[1]} share the semantic id {tuple(codes[rows[0]])}: run the resolver before building the trie")
        return cls(tuple(offsets), tuple(tokens), order.astype(np.int64))

    def children(self, depth: int, node: int) -> tuple[IntArray, IntArray]:
        """Codes and node numbers (of depth + 1) below one node."""
        begin, end = int(self.offsets[depth][node]), int(self.offsets[depth][node + 1])
        return self.tokens[depth][begin:end], np.arange(begin, end)

    def find(self, prefix: IntArray | list[int] | tuple[int, ...]) -> int | None:
        """Node of a prefix, or None where no item begins so."""
        node = 0
        for depth, code in enumerate(prefix):
            codes, nodes = self.children(depth, node)
            position = int(np.searchsorted(codes, code))
            if position == len(codes) or codes[position] != code:
                return None
            node = int(nodes[position])
        return node

    def leaf_ranges(self, depth: int) -> IntArray:
        """First leaf below each node of a depth, and the end: [M_depth + 1]."""
        bounds = np.arange(len(self.leaf_items) + 1)
        for level in range(self.levels - 1, depth - 1, -1):
            bounds = bounds[self.offsets[level]]
        return bounds
