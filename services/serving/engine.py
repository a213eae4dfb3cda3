"""Queries in, answers out: no network, no clock but the one passed in.

A group of queries is one search that is advanced round by round: the prefill, then one step for each further code. Who advances it, and what happens between
two rounds, is the scheduler's business; ``answer`` simply advances until the end.
What availability says is asked again when a search is done: an item that was withdrawn meanwhile is not handed out; its query is searched again.
Legend: R requests, W beams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.services.serving.prepared import Prepared, Query
from semantide.services.serving.registry_state import Pair
from semantide.services.serving.rounds import Rounds
from semantide.services.serving.ticket import SearchAgain
from semantide.shared.decoding.beam_search import Hits
from semantide.shared.decoding.kv_pool import KVLease
from semantide.shared.decoding.search_trie import ItemFilter
from semantide.shared.trie import IntArray

_SEARCHES = 3  # of one query whose items vanish while it runs
_MAX_BEAMS, _MAX_REQUESTS = 1024, 32  # of a group that ``answer`` makes


@dataclass(frozen=True)
class Recommendation:
    """One recommended item. ``score`` is its log-probability, ``level_scores`` what each code adds to it."""

    item: str
    score: float
    title: str
    codes: tuple[int, ...]
    level_scores: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    """Items of one query, best first, and the model and catalog that gave them.

    ``width`` beams were used; ``requested_width`` would have been, had the search not been narrowed under load.
    ``history_rows`` are the items that the model read, oldest first.
    ``complete`` says that the list is certainly the exact top of the allowed catalog; ``short_reason`` says why it is shorter than n, if it is.
    """

    items: tuple[Recommendation, ...]
    pair: Pair
    width: int
    requested_width: int
    history_items: int
    unknown_history_items: int
    complete: bool
    dead_ends: int
    short_reason: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    history_rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False, compare=False)

    @property
    def narrowed(self) -> bool:
        """Whether fewer beams were used than asked for."""
        return self.width < self.requested_width


class Group(Rounds[Answer]):
    """Searches of one bundle under way together. ``unavailable`` says what may not be recommended now."""

    def __init__(
        self,
        requests: Sequence[Prepared],
        unavailable: Callable[[], Unavailable],
        clock: Callable[[], float],
        *,
        leases: Sequence[KVLease] = (),
        share: float = 1.0,
    ) -> None:
        super().__init__(requests, clock, leases)
        self._unavailable = unavailable
        self.hits: Hits | None = None
        self._extension: tuple[torch.Tensor, torch.Tensor] | None = None
        start = clock()
        bundle, self._before = self._bundle, unavailable()
        self.widths = [request.narrowed(share) for request in requests]
        masks = [bundle.mask(self._before, request.query.categories_any, request.query.categories_all, request.query.only_new) for request in requests]
        node_filter = None
        self._allowed = [len(bundle.trie)] * len(requests)
        if any(mask.counts is not None for mask in masks) or any(len(request.excluded) for request in requests):
            distinct = {id(mask): mask for mask in masks}
            place = {key: number for number, key in enumerate(distinct)}
            counts = [bundle.trie.every_item if mask.counts is None else mask.counts for mask in distinct.values()]
            node_filter = ItemFilter.build(bundle.trie, counts, [place[id(mask)] for mask in masks], [request.excluded for request in requests])
            self._allowed = list(node_filter.allowed)
        self._search = bundle.search(bundle.trie, self.widths, node_filter, "children" if requests[0].query.conditional else "row")
        self._mark("compose", start)

    def _rows_behind(self) -> int:
        return sum(self._search.counts)

    def _begin(self, logits_RK: torch.Tensor, start: float) -> bool:
        return self._select(logits_RK, start)

    def _go_on(self, start: float) -> bool:
        assert self._extension is not None, "advanced past the end"
        level = self._search.level
        logits = self._bundle.model.step(self._state, level, *self._extension, self._search.counts)
        return self._select(logits, self._mark(f"step_{level}", start))

    def _select(self, logits: torch.Tensor, start: float) -> bool:
        self._extension = self._search.select(logits)
        if self._extension is None:
            self.hits = self._search.hits()
        self._mark("select", start)
        return self._extension is not None

    def _keep(self, places: Sequence[int]) -> None:
        self._search.keep(places)
        if self._extension is not None:
            self._bundle.model.keep(self._state, places)
            width = max(1, *self._search.counts)
            parents_RW, codes_RW = self._extension
            self._extension = parents_RW[list(places), :width], codes_RW[list(places), :width]
        self.widths, self._allowed = [self.widths[place] for place in places], [self._allowed[place] for place in places]

    def answers(self) -> list[Answer | SearchAgain]:
        """What was found, or that it has to be found again."""
        hits, bundle, after = self.hits, self._bundle, self._unavailable()
        assert hits is not None, "asked before the last round"
        seconds = self.seconds
        answers: list[Answer | SearchAgain] = []
        for place, request in enumerate(self.requests):
            request.searches += 1
            places = _places(hits, place, request.query, request.known)
            recommendations = _recommendations(bundle, hits, place, places)
            found = Answer(
                items=recommendations,
                pair=bundle.pair,
                width=self.widths[place],
                requested_width=request.width,
                history_items=request.history_items,
                unknown_history_items=len(request.query.history) - request.known,
                complete=places == list(range(len(places))) and hits.complete(place, request.query.n),
                dead_ends=int(hits.dead_ends_R[place]),
                short_reason=_short_reason(bundle, request.query, len(recommendations), self._allowed[place]),
                seconds=seconds,
                history_rows=request.read_rows,
            )
            withdrawn = 0 if after.version == self._before.version else sum(hit.item in after.items for hit in found.items)
            if withdrawn and request.searches < _SEARCHES:
                answers.append(SearchAgain())
            else:
                answers.append(_without(found, after, withdrawn) if withdrawn else found)
        return answers

    def close(self) -> None:
        """Let go of the model's state and give all memory back."""
        self._extension = None
        super().close()


def answer(bundle: Bundle, queries: Sequence[Query], unavailable: Callable[[], Unavailable], clock: Callable[[], float]) -> list[Answer]:
    """Answer queries with one bundle, here and now."""
    answers: dict[int, Answer] = {}
    waiting = sorted(
        ((place, Prepared.of(bundle, query)) for place, query in enumerate(queries)), key=lambda entry: (entry[1].query.conditional, entry[1].width)
    )
    while waiting:
        size = 1
        while size < min(len(waiting), _MAX_REQUESTS) and waiting[size][1].family == waiting[0][1].family:
            if sum(request.beams for _, request in waiting[: size + 1]) > _MAX_BEAMS:
                break
            size += 1
        taken, waiting = waiting[:size], waiting[size:]
        group = Group([request for _, request in taken], unavailable, clock)
        while group.advance():
            pass
        for entry, found in zip(taken, group.answers(), strict=True):
            if isinstance(found, SearchAgain):
                waiting.append(entry)
            else:
                answers[entry[0]] = found
    return [answers[place] for place in range(len(queries))]


def warm_up(bundle: Bundle, clock: Callable[[], float]) -> None:
    """Answer an empty and a longest history once, alone and together with others: what is broken shows now, and the first user does not wait.

    Raises: whatever the model raises.
    """
    longest = bundle.catalog.item_ids[: bundle.max_history_items]
    for history in ((), longest):
        answer(bundle, [Query(history=history)], Unavailable, clock)
    answer(bundle, [Query(history=longest[-count:], width=width, excluded=longest[:3]) for count, width in ((1, 1), (9, 50), (5, 200))], Unavailable, clock)


def _places(hits: Hits, request: int, query: Query, known: int) -> list[int]:
    """Which of the found items are handed out, best first."""
    found = int(hits.counts_R[request])
    count = min(query.n, found)
    if known or not query.variety:
        return list(range(count))
    # The largest of scores with Gumbel noise are a draw without replacement from their softmax.
    noisy = hits.scores_RW[request, :found].cpu().numpy() / query.variety + np.random.default_rng(query.seed).gumbel(size=found)
    return sorted(np.argsort(-noisy)[:count].tolist())


def _recommendations(bundle: Bundle, hits: Hits, request: int, places: list[int]) -> tuple[Recommendation, ...]:
    rows = hits.rows_RW[request, places].tolist()
    scores = hits.scores_RW[request, places].tolist()
    level_scores = hits.level_scores_RWL[request, places].tolist()
    codes = bundle.catalog.codes[rows].tolist() if rows else []
    return tuple(
        Recommendation(bundle.catalog.item_ids[row], score, bundle.titles[row], tuple(path), tuple(levels))
        for row, score, path, levels in zip(rows, scores, codes, level_scores, strict=True)
    )


def _short_reason(bundle: Bundle, query: Query, count: int, allowed: int) -> str | None:
    if count >= query.n:
        return None
    total = len(bundle.trie)
    if allowed == total:
        return f"the catalog has {total} items, fewer than n = {query.n}"
    unknown = [category for category in (*query.categories_any, *query.categories_all) if category not in bundle.rows_of_category]
    hint = f"; no item has the categories {', '.join(map(repr, unknown[:5]))}" if unknown else ""
    what = "every item is" if allowed == 0 else f"all but {allowed} of the {total} items are"
    return f"{what} unavailable, excluded, or outside the categories{hint}"


def _without(result: Answer, unavailable: Unavailable, withdrawn: int) -> Answer:
    return replace(
        result,
        items=tuple(hit for hit in result.items if hit.item not in unavailable.items),
        dead_ends=result.dead_ends + withdrawn,
        short_reason=f"{withdrawn} items became unavailable during the search",
    )
