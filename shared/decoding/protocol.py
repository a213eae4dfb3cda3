"""What beam search needs of a model, and nothing more.

Legend: R requests, T prompt tokens of all requests, W beams of the widest request, B beams of all requests, K codes of the level in question,
b some of these beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StepModel(Protocol):
    """A model that reads prompts once and then extends beams code by code.

    ``state`` belongs to the model; the search only carries it from call to call. One state serves one search.
    """

    def begin(self, tokens_T: Tensor, offsets_R1: Tensor) -> tuple[Tensor, Any]:
        """Read the packed prompts of R requests, each once.

        Returns the logits of level 0 over its full code row, and the state.

        Shapes: ``tokens_T`` int64 [T], ``offsets_R1`` int64 [R + 1] with ``offsets[r]:offsets[r + 1]`` request r's tokens; logits [R, K].
        """
        ...

    def step(self, state: Any, level: int, parents_RW: Tensor, codes_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Extend beams by one code and return the logits of ``level`` (from 1) over its full code row.

        New beam w of request r is the previous call's beam ``parents[r, w]`` (0, the prompt itself, where ``level`` is 1) followed by ``codes[r, w]``,
        a code of level ``level - 1``. W may differ from call to call. Request r has ``counts[r]`` beams (W where it is None), the first ones of its row;
        what follows them is parent 0 and code 0. A model may leave those out and return the rows of the real beams only, request after request.

        Shapes: ``parents_RW``, ``codes_RW`` int64 [R, W]; logits [R, W, K], those of beams past the counts ignored, or [B, K].
        """
        ...


class NarrowingModel(StepModel, Protocol):
    """A model whose running batch can lose requests."""

    def keep(self, state: Any, requests: Sequence[int]) -> None:
        """Go on with these requests of the batch only, in this (ascending) order; the memory of the others is freed."""
        ...


class Extension(NamedTuple):
    """New beams, as ``StepModel.step`` takes them: whom they follow, by which code, and how many each request has."""

    parents_RW: Tensor
    codes_RW: Tensor
    counts: Sequence[int] | None


class LogitRows(NamedTuple):
    """Logits of some beams of a level, the first of which is beam ``begin``: [b, K]."""

    level: int
    begin: int
    logits_bK: Tensor


class ScoringModel(StepModel, Protocol):
    """A model that can be asked for given continuations of a prompt, all at once."""

    def follow(self, state: Any, levels: Sequence[Extension]) -> Iterator[LogitRows]:
        """Logits behind every prefix of a tree that begins with the prompts of ``state``, in one pass.

        Entry l extends the beams of the one before it (the prompts themselves where l is 0) by codes of level l; what comes of it are the logits of level l + 1,
        some beams of a level at a time, in order. No step may follow.
        """
        ...
