"""Tokens of the generator: 0 begins a sequence, then one token per code of each level.

The token of code c at level l is 1 + sum(level_sizes[:l]) + c. A history is [0] and then the codes of its items, oldest first, so the
token at place p of a history predicts a code of level p mod L.
Legend: T tokens, N items, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BEGIN = 0


@dataclass(frozen=True)
class Vocabulary:
    """How codes become tokens and back."""

    level_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.level_sizes or any(size < 1 for size in self.level_sizes):
            raise ValueError(f"level sizes {self.level_sizes}: give at least one level of at least one code")

    @property
    def levels(self) -> int:
        """Codes per item."""
        return len(self.level_sizes)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return 1 + sum(self.level_sizes)

    def first(self, level: int) -> int:
        """Token of code 0 of a level."""
        return 1 + sum(self.level_sizes[:level])

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

    def history_tokens(self, item_tokens_NL: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[0] and the tokens of the items, oldest first."""
        return np.concatenate([[BEGIN], item_tokens_NL.reshape(-1)]).astype(np.int64)
