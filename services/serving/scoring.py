"""Given items scored behind their requests' prompts: one round for the prompts, one for all items of all requests.

Legend: R requests, I items of all requests, K codes of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from semantide.services.serving.prepared import Prepared
from semantide.services.serving.registry_state import Pair
from semantide.services.serving.rounds import Rounds
from semantide.shared.decoding.beam_search import Normalisation
from semantide.shared.decoding.given_items import GivenItems, ItemScores, follow
from semantide.shared.decoding.kv_pool import KVLease


@dataclass(frozen=True)
class ScoredItem:
    """One item that was asked for. ``score`` is its log-probability, ``level_scores`` what each code adds to it."""

    item: str
    score: float
    codes: tuple[int, ...]
    level_scores: tuple[float, ...]


@dataclass(frozen=True)
class Scored:
    """The items of one query in the order in which they were asked for, and the model and catalog that scored them."""

    items: tuple[ScoredItem, ...]
    pair: Pair
    history_items: int
    unknown_history_items: int
    seconds: dict[str, float] = field(default_factory=dict)


class ScoreGroup(Rounds[Scored]):
    """Queries of one bundle with given items. Load narrows nothing here: whoever asks for an item gets its score."""

    def __init__(self, requests: Sequence[Prepared], clock: Callable[[], float], *, leases: Sequence[KVLease] = ()) -> None:
        super().__init__(requests, clock, leases)
        start, bundle = clock(), self._bundle
        self._rows_I = torch.as_tensor(np.concatenate([request.given for request in requests]), device=bundle.trie.device)
        self._owners_I = torch.arange(len(requests), device=bundle.trie.device).repeat_interleave(self._many(requests))
        self._grow()
        self._mark("compose", start)

    def _many(self, requests: Sequence[Prepared]) -> torch.Tensor:
        return torch.tensor([len(request.given) for request in requests], device=self._bundle.trie.device)

    def _grow(self) -> None:
        """The tree of the items."""
        codes_IL = torch.as_tensor(self._bundle.catalog.codes, dtype=torch.int64)[self._rows_I.cpu()].to(self._rows_I.device)
        given = GivenItems.of(codes_IL, self._owners_I, int(self._owners_I.max()) + 1)
        self._extensions = given.extensions
        normalisation: Normalisation = "children" if self.requests[0].query.conditional else "row"
        self._scores = ItemScores(given, self._bundle.trie, self._rows_I, normalisation)

    def _rows_behind(self) -> int:
        return sum(sum(extension.counts or ()) for extension in self._extensions)

    def _begin(self, logits_RK: torch.Tensor, start: float) -> bool:
        self._scores.take(0, 0, logits_RK)
        self._mark("select", start)
        return bool(self._extensions)

    def _go_on(self, start: float) -> bool:
        follow(self._bundle.model, self._state, self._extensions, self._scores)
        self._mark("score", start)
        return False

    def _keep(self, places: Sequence[int]) -> None:
        kept_I = torch.isin(self._owners_I, torch.tensor(list(places), device=self._owners_I.device))
        before_IL = self._scores.scores_IL[kept_I]
        self._rows_I, self._owners_I = self._rows_I[kept_I], torch.unique(self._owners_I[kept_I], return_inverse=True)[1]
        self._grow()
        self._scores.scores_IL.copy_(before_IL)
        if self._state is not None:
            self._bundle.model.keep(self._state, places)

    def answers(self) -> list[Scored]:
        """What was computed."""
        scores_IL, seconds, begin, answers = self._scores.scores_IL.cpu(), self.seconds, 0, []
        for request in self.requests:
            levels = scores_IL[begin : begin + len(request.given)].tolist()
            codes = self._bundle.catalog.codes[request.given].tolist()
            begin += len(request.given)
            items = tuple(ScoredItem(item, sum(each), tuple(path), tuple(each)) for item, each, path in zip(request.query.items, levels, codes, strict=True))
            answers.append(Scored(items, self._bundle.pair, request.history_items, len(request.query.history) - request.known, seconds))
        return answers
