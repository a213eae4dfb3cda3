"""A step model made of random tables: the logits of a beam are a row picked by a hash of the prompt and the codes so far."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class TableModel:
    """Any two prefixes have (almost always) different, reproducible logits; ``spread`` 0 makes every code of a level equal."""

    def __init__(self, level_sizes: tuple[int, ...], seed: int, spread: float = 2.0, rows: int = 997, rounding: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = [torch.randn(rows, size, generator=generator) * spread for size in level_sizes]
        if rounding:  # few distinct values: many ties
            self.tables = [(table / rounding).round() * rounding for table in self.tables]
        self.rows = rows
        self.calls: list[tuple[int, int, int]] = []

    def begin(self, tokens_T: Tensor, offsets_R1: Tensor) -> tuple[Tensor, Any]:
        bounds = offsets_R1.tolist()
        hashes = torch.tensor([[int(tokens_T[a:b].sum() * 31 + (b - a)) % self.rows] for a, b in pairwise(bounds)])
        self.calls.append((0, len(hashes), 1))
        return self.tables[0][hashes[:, 0]], {"hashes": hashes}

    def step(self, state: Any, level: int, parents_RW: Tensor, codes_RW: Tensor, counts: Any = None) -> Tensor:
        state["hashes"] = (state["hashes"].gather(1, parents_RW) * 131 + codes_RW * 7 + level) % self.rows
        self.calls.append((level, *parents_RW.shape))
        return self.tables[level][state["hashes"]]


def random_codes(generator: torch.Generator, items: int, level_sizes: tuple[int, ...]) -> Tensor:
    """Distinct rows in random order; fewer where the levels do not have so many ids."""
    total = 1
    for size in level_sizes:
        total *= size
    numbers = torch.randperm(total, generator=generator)[:items]
    columns = []
    for size in reversed(level_sizes):
        columns.append(numbers % size)
        numbers = numbers // size
    return torch.stack(columns[::-1], 1)


def prompts(generator: torch.Generator, requests: int, longest: int = 9) -> tuple[Tensor, Tensor]:
    """Packed random prompts."""
    lengths = torch.randint(1, longest + 1, (requests,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, 50, (int(offsets[-1]),), generator=generator), offsets
