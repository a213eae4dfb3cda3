"""How the prompts of one generator are spelled from rows of a catalog: codes as tokens, and the side features that its merger looks at.

Legend: N items of the catalog, I items of a history, L levels, F side features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.shared.models.generator import Generator
from semantide.shared.models.token_merger import GAP_BUCKETS, MergerConfig
from semantide.shared.models.vocabulary import Vocabulary

Numbers = npt.NDArray[np.int64]
Any_I = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, repr=False)
class PromptSpelling:
    """A generator's tokens of every item, and what its prompts say beside them.

    Shapes: ``item_tokens_NL`` [N, L].
    """

    vocabulary: Vocabulary
    merger: MergerConfig
    item_tokens_NL: Numbers

    @classmethod
    def of(cls, generator: Generator, codes_NL: npt.NDArray[np.integer]) -> PromptSpelling:
        """For the items of a catalog with these codes."""
        return cls(generator.vocabulary, generator.config.merger, generator.vocabulary.item_tokens(codes_NL))

    def action_numbers(self, names: Iterable[str]) -> Numbers:
        """The model's number of each action, from 1 on; 0 for one that it does not know."""
        place = {name: number for number, name in enumerate(self.merger.actions, 1)}
        return np.array([place.get(name, 0) for name in names], dtype=np.int64)

    def prompt(self, rows_I: Numbers, actions_I: Any_I | None = None, times_I: Any_I | None = None) -> Numbers:
        """The tokens of a prompt of these items, oldest first, with the number of what was done with each and when, where that is known and looked at.

        Units: ``times_I`` seconds.
        """
        tokens_IS = self.item_tokens_NL[rows_I]
        if self.merger.features:
            tokens_IS = np.concatenate([tokens_IS, side_features(self.merger, len(tokens_IS), actions_I, times_I)], 1)
        return self.vocabulary.history_tokens(tokens_IS)


def side_features(merger: MergerConfig, items: int, actions_I: Any_I | None, times_I: Any_I | None) -> npt.NDArray[np.int64]:
    """The side features [I, F] of one history's items; None: unknown."""
    columns = {
        "actions": lambda: np.zeros(items, dtype=np.int64) if actions_I is None else np.asarray(actions_I, dtype=np.int64),
        "gaps": lambda: np.zeros(items, dtype=np.int64) if times_I is None else gap_buckets(np.asarray(times_I, dtype=np.int64), np.array([0])),
    }
    return np.stack([columns[name]() for name in merger.features], 1)


def gap_buckets(times_I: Numbers, starts_B: Numbers) -> Numbers:
    """The bucket of the time between each item and the one before it, of histories that begin at ``starts_B``; a first item's is unknown.

    Units: ``times_I`` seconds.
    """
    seconds = np.maximum(np.diff(times_I, prepend=times_I[:1]), 0)
    buckets = np.minimum(1 + np.log2(seconds + 1.0).astype(np.int64), GAP_BUCKETS - 1)
    buckets[starts_B[starts_B < len(buckets)]] = 0
    return buckets
