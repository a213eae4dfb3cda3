"""Tokens of the generator: where the codes of semantic ids lie, and what stands around items in a history.

In a model of our own, 0 begins a sequence and the levels' codes follow one another: the token of code c at level l is 1 + sum(level_sizes[:l]) + c.
A language model whose vocabulary was extended keeps its own tokens first and has the codes somewhere behind them; its ``Layout`` says where.
A history is the begin tokens and then the codes of its items, oldest first, so that with one begin token and nothing between items the token at place p
predicts a code of level p mod L.
Legend: T tokens, N items, L levels, I items of one history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

BEGIN = 0


@dataclass(frozen=True)
class Layout:
    """Which tokens stand for what; the default is that of a model of our own.

    ``firsts`` is the token of code 0 of each level, empty: one level after another from token 1. ``begin`` comes before the first item, ``between`` two
    items, ``end`` after the last.
    """

    begin: tuple[int, ...] = (BEGIN,)
    between: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens = [*self.begin, *self.between, *self.end, *self.firsts]
        if not self.begin or any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in tokens):
            raise ValueError(f"layout {self}: give token numbers, and at least one that begins a history")

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Layout:
        """From JSON.

        Raises: ValueError for an unknown name or what is no list of tokens.
        """
        known = [field.name for field in fields(cls)]
        for name, tokens in said.items():
            if name not in known or not isinstance(tokens, (list, tuple)):
                raise ValueError(f"layout field {name!r} is {tokens!r}: give lists of tokens for {', '.join(known)}")
        return cls(**{name: tuple(tokens) for name, tokens in said.items()})

    @property
    def plain(self) -> bool:
        """Whether items follow one begin token with nothing between them, as in training."""
        return len(self.begin) == 1 and not self.between and not self.end

    def to_json(self) -> dict[str, list[int]]:
        """For ``config.json``."""
        return {name: list(tokens) for name, tokens in asdict(self).items()}


@dataclass(frozen=True)
class Vocabulary:
    """How codes become tokens and back."""

    level_sizes: tuple[int, ...]
    layout: Layout = Layout()

    def __post_init__(self) -> None:
        if not self.level_sizes or any(size < 1 for size in self.level_sizes):
            raise ValueError(f"level sizes {self.level_sizes}: give at least one level of at least one code")
        if self.layout.firsts and len(self.layout.firsts) != len(self.level_sizes):
            raise ValueError(f"{len(self.layout.firsts)} first tokens for {len(self.level_sizes)} levels: give one for each level")
        rows = sorted((self.first(level), self.first(level) + size) for level, size in enumerate(self.level_sizes))
        for (_, end), (begin, _) in pairwise(rows):
            if begin < end:
                raise ValueError(f"levels that begin at tokens {self.layout.firsts} with sizes {self.level_sizes} overlap: give each code a token of its own")

    @property
    def levels(self) -> int:
        """Codes per item."""
        return len(self.level_sizes)

    @property
    def size(self) -> int:
        """Number of tokens that the vocabulary needs at least."""
        layout = self.layout
        ends = (self.first(level) + size - 1 for level, size in enumerate(self.level_sizes))
        return 1 + max(*layout.begin, *layout.between, *layout.end, *ends)

    @property
    def begin(self) -> int:
        """The one token that begins a history.

        Raises: ValueError where histories are more than that and items.
        """
        if not self.layout.plain:
            raise ValueError(f"histories of this model are spelled with {self.layout}: only one begin token and nothing between items can be trained")
        return self.layout.begin[0]

    def first(self, level: int) -> int:
        """Token of code 0 of a level."""
        return self.layout.firsts[level] if self.layout.firsts else 1 + sum(self.level_sizes[:level])

    def row(self, level: int) -> slice:
        """All tokens of a level: its full code row."""
        return slice(self.first(level), self.first(level) + self.level_sizes[level])

    def item_tokens(self, codes_NL: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Tokens [N, L] of items' codes.

        Raises: ValueError when a code is outside its level.
        """
        if codes_NL.ndim != 2 or codes_NL.shape[1] != self.levels:
            raise ValueError(f"codes have shape {codes_NL.shape}: give [items, {self.levels}]")
        sizes = np.asarray(self.level_sizes)
        if codes_NL.size and ((codes_NL < 0) | (codes_NL >= sizes)).any():
            item, level = (int(x[0]) for x in np.nonzero((codes_NL < 0) | (codes_NL >= sizes)))
            raise ValueError(f"code {int(codes_NL[item, level])} of item row {item} at level {level} is outside 0..{sizes[level] - 1}")
        firsts = np.array([self.first(level) for level in range(self.levels)])
        return np.asarray(codes_NL.astype(np.int64) + firsts)

    def history_tokens(self, item_tokens_IL: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Begin tokens, the tokens of the items, oldest first, and end tokens."""
        layout, items = self.layout, item_tokens_IL
        if layout.between and len(items):
            between = np.broadcast_to(np.asarray(layout.between), (len(items), len(layout.between)))
            items = np.concatenate([items, between], 1).reshape(-1)[: -len(layout.between)]
        return np.concatenate([layout.begin, items.reshape(-1), layout.end]).astype(np.int64)
