"""The item trie as tensors, and which part of it each request may enter.

A filter never lists nodes: it counts allowed leaves. The leaves below a node are a range, so a node is alive when the range holds an allowed leaf:
a difference of two prefix counts (the mask many requests share: availability, categories) less the request's own excluded leaves in the range (two
binary searches in one sorted list). A request with a short exclude list therefore costs nothing per item of the catalog, and a node is entered only
when something below it may be returned.
Legend: N items, L levels, M nodes of a depth, R requests, B distinct masks, E excluded leaves of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.kernels.beam_select import AllowedLeaves
from semantide.shared.trie import IntArray, Trie

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SearchTrie:
    """``shared/trie.py``'s trie on the model's device, with the leaf range of every node.

    Shapes: ``offsets[d]`` [M_d + 1], ``tokens[d]`` [M_{d+1}], ``leaf_bounds[d]`` [M_d + 1], ``leaf_items``, ``leaf_of`` [N].
    """

    offsets: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    leaf_bounds: tuple[Tensor, ...]
    leaf_items: Tensor
    leaf_of: Tensor
    num_codes: tuple[int, ...]

    @classmethod
    def build(cls, trie: Trie, device: torch.device | str = "cpu") -> SearchTrie:
        """Copy a trie to a device.

        Raises: ValueError for a catalog without items.
        """
        if not len(trie.leaf_items):
            raise ValueError("the catalog has no items, so nothing can be searched: build the catalog from at least one item")

        def move(array: IntArray) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=device)

        leaf_of = np.empty_like(trie.leaf_items)
        leaf_of[trie.leaf_items] = np.arange(len(leaf_of))
        return cls(
            offsets=tuple(map(move, trie.offsets)),
            tokens=tuple(map(move, trie.tokens)),
            leaf_bounds=tuple(move(trie.leaf_ranges(depth)) for depth in range(trie.levels + 1)),
            leaf_items=move(trie.leaf_items),
            leaf_of=move(leaf_of),
            num_codes=tuple(int(tokens.max()) + 1 for tokens in trie.tokens),
        )

    @property
    def levels(self) -> int:
        """Length of every id."""
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.leaf_items.device

    def __len__(self) -> int:
        return len(self.leaf_items)

    @cached_property
    def every_item(self) -> Tensor:
        """``prefix_counts`` of a mask that allows everything."""
        return torch.arange(len(self) + 1, dtype=torch.int32, device=self.device)

    def prefix_counts(self, allowed: BoolArray) -> Tensor:
        """How many allowed leaves come before each leaf: [N + 1], the form in which ``ItemFilter`` takes a mask.

        Shapes: ``allowed`` [N], by catalog row.
        """
        if allowed.shape != (len(self),):
            raise ValueError(f"the mask has shape {allowed.shape} and the catalog {len(self)} items: give one flag per item")
        counts = torch.zeros(len(self) + 1, dtype=torch.int32, device=self.device)  # several are kept, each as long as the catalog
        torch.cumsum(torch.as_tensor(allowed, device=self.device)[self.leaf_items], 0, dtype=torch.int32, out=counts[1:])
        return counts


class NodeFilter(Protocol):
    """What the search asks before it enters the nodes of a depth."""

    def at(self, depth: int) -> ItemFilter:
        """What holds while nodes of this depth are entered."""
        ...


@dataclass(frozen=True)
class ItemFilter:
    """Allowed items of each request in a batch.

    Shapes: ``counts_BN1`` [B, N + 1], ``mask_of_R`` [R], ``excluded_E`` [E] sorted ``request * (N + 1) + leaf``.
    """

    trie: SearchTrie
    counts_BN1: Tensor
    mask_of_R: Tensor
    excluded_E: Tensor
    allowed: tuple[int, ...]

    @classmethod
    def build(cls, trie: SearchTrie, masks: Sequence[Tensor], mask_of: Sequence[int], excluded_rows: Sequence[Sequence[int] | IntArray]) -> ItemFilter:
        """Join what the requests of a batch allow.

        ``masks`` are ``prefix_counts`` of distinct masks, ``mask_of[r]`` says which one request r uses, ``excluded_rows[r]`` are catalog rows that it
        must not get.
        """
        if len(mask_of) != len(excluded_rows):
            raise ValueError(f"{len(mask_of)} requests have a mask and {len(excluded_rows)} an exclude list: give one of each per request")
        counts = torch.stack(list(masks)) if len(masks) > 1 else masks[0][None]  # each is as long as the catalog: copied only where it has to be
        keys: list[Tensor] = []
        allowed: list[int] = []
        for request, rows in enumerate(excluded_rows):
            mask = counts[mask_of[request]]
            total = int(mask[-1])
            if len(rows):
                leaves = torch.unique(trie.leaf_of[torch.as_tensor(np.asarray(rows, dtype=np.int64), device=trie.device)])
                leaves = leaves[mask[leaves + 1] > mask[leaves]]
                keys.append(leaves + request * (len(trie) + 1))
                total -= len(leaves)
            allowed.append(total)
        excluded = torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64, device=trie.device)
        return cls(trie, counts, torch.as_tensor(list(mask_of), dtype=torch.int64, device=trie.device), excluded, tuple(allowed))

    def at(self, depth: int) -> ItemFilter:
        """The same at every depth."""
        return self

    def leaves(self, depth: int, owners_R: Tensor) -> AllowedLeaves:
        """What the selection of nodes of this depth asks; ``owners_R`` says which of this filter's requests each row is."""
        bounds = self.trie.leaf_bounds
        return AllowedLeaves(bounds[depth - 1], bounds[depth], self.counts_BN1, self.mask_of_R, self.excluded_E, owners_R)
