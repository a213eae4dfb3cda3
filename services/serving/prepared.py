"""A request as the model is asked it: its user's history looked up and spelled, and what it will need known.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from semantide.services.serving.bundle import Bundle
from semantide.services.serving.narrowing import narrowed_width
from semantide.shared.models.generator_decoder import PromptKV
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.trie import IntArray

_FULL_ROW = 1 << 14  # codes of a level up to which a beam counts as one; longer rows of logits count for more

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """One request, with everything about its user already looked up.

    ``history`` is what the user liked, oldest first; ``excluded`` must not come back. Items that the catalog does not have are fine in both.
    ``variety`` is the temperature at which, without a history, items are drawn with ``seed`` among the beams; 0: the best ones.
    ``user`` is whose prompt may be kept for the next time; None: nobody's. ``only_new`` leaves only items that are younger than the model.
    ``moments`` say what was done with each item of the history, and when (milliseconds since 1970, or None); empty: not known.
    ``conditional`` takes log-probabilities over the codes that the catalog has below a prefix, not over all codes of the level.
    With ``items`` these are scored and nothing is searched.
    """

    history: tuple[str, ...] = ()
    n: int = 10
    width: int = 50
    excluded: tuple[str, ...] = ()
    categories_any: tuple[str, ...] = ()
    categories_all: tuple[str, ...] = ()
    variety: float = 0.0
    seed: int = 0
    user: str | None = None
    only_new: bool = False
    conditional: bool = False
    moments: tuple[tuple[str, int | None], ...] = ()
    items: tuple[str, ...] = ()


@dataclass(eq=False)
class Prepared:
    """A query against one bundle, with all that does not change with the moment: its prompt, its width, what it leaves out.

    ``read_rows`` are the items that the prompt spells. ``tokens`` of its ``places`` (a merged item is one of them) are not in common with the user's last
    prompt, if one was ``kept``. ``given`` are the rows of the items to be scored.

    Shapes: ``prompt`` [T].
    """

    bundle: Bundle
    query: Query
    prompt: Tokens
    read_rows: IntArray
    excluded: IntArray
    width: int
    known: int
    given: IntArray
    kept: bool = False
    tokens: int = 0
    searches: int = 0

    @classmethod
    def of(cls, bundle: Bundle, query: Query) -> Prepared:
        """Look up a query's items, spell its history, and see what is kept of the user.

        Raises: ValueError for items to be scored that the catalog does not have.
        """
        rows = bundle.rows(query.history)
        read_rows = history_window(rows, bundle.max_history_items)
        prompt = _spelled(bundle, query, read_rows)
        given = bundle.all_rows(query.items)
        width = len(np.unique(given)) if query.items else effective_width(query, len(bundle.trie))
        prepared = cls(bundle, query, prompt, read_rows, bundle.rows(query.excluded), width, len(rows), given)
        prepared.last_prompt()
        return prepared

    def last_prompt(self) -> PromptKV | None:
        """What the cache has of the user now. It is not held on to: queries that wait would keep memory that the cache has given away."""
        last = self.bundle.prompts.get(self.query.user) if self.query.user is not None else None
        common = 0 if last is None else last.common_tokens(torch.as_tensor(self.prompt, device=last.tokens_t.device))
        # The last place is always read, whatever is kept.
        common = min(self.bundle.model.places(common), self.places - 1)
        self.kept, self.tokens = last is not None, self.places - (common if last is None else last.known_places(common))
        return last

    @property
    def places(self) -> int:
        """What the model reads of the prompt where nothing is kept."""
        return self.bundle.model.places(len(self.prompt))

    @property
    def remembered(self) -> bool:
        """Whether its prompt is kept for the user's next visit."""
        return self.query.user is not None and self.bundle.prompts.budget_bytes > 0 and not self.query.only_new

    @property
    def history_items(self) -> int:
        """Items that the prompt spells."""
        return len(self.read_rows)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that it will hold at most."""
        return self.bundle.model.kv_bytes(len(self.prompt), self.width, self.remembered)

    @property
    def family(self) -> object:
        """Queries of one bundle whose scores mean the same are searched together, and those with given items among themselves."""
        return id(self.bundle), self.query.conditional, bool(self.query.items)

    @property
    def beams(self) -> int:
        """Its width (that of given items is their number), long rows of logits counting for more."""
        return -(-self.width * max(max(self.bundle.vocabulary.level_sizes), _FULL_ROW) // _FULL_ROW)

    @property
    def rows(self) -> int:
        """Rows that go through the model in all rounds."""
        return self.tokens + (self.bundle.trie.levels - 1) * self.width

    def narrowed(self, share: float) -> int:
        """Its width when searches get this share of what they ask for; n items come back all the same."""
        return narrowed_width(self.width, self.query.n, share)


def _spelled(bundle: Bundle, query: Query, read_rows: IntArray) -> Tokens:
    """The prompt of the items that are read; with what was done and when, where the model looks at it."""
    spelling = bundle.spelling
    if not spelling.merger.features or not query.moments or not len(read_rows):
        return spelling.prompt(read_rows)
    row_of = bundle.catalog.row_of
    read = [moment for item, moment in zip(query.history, query.moments, strict=True) if item in row_of][-len(read_rows) :]
    times = [time // 1000 for _, time in read if time is not None]
    return spelling.prompt(read_rows, spelling.action_numbers(action for action, _ in read), times if len(times) == len(read) else None)


def effective_width(query: Query, items: int) -> int:
    """The beams of a query: at least n, so that n items come back, at most one per item of the catalog."""
    return max(1, min(max(query.width, query.n), items))
