"""Queries in, answers out: no network, no clock but the one passed in.

A batch is cut into groups of similar width, so that a narrow request does not pay for a wide neighbour, and each group is one search.
What availability says is asked again when a search is done: an item that was withdrawn meanwhile is not handed out; its query is searched again.
Legend: T tokens, R requests, W beams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.shared.decoding.beam_search import Hits, beam_search
from semantide.shared.decoding.search_trie import ItemFilter

_SEARCHES = 3  # of one query whose items vanish while it runs
_MAX_CELLS = 1 << 24  # logits of one step of one group
_SMALL_WIDTH = 16


@dataclass(frozen=True)
class Query:
    """One request, with everything about its user already looked up.

    ``history`` is what the user liked, oldest first; ``excluded`` must not come back. Items that the catalog does not have are fine in both.
    ``only_new`` leaves only items that are younger than the model. ``variety`` is the temperature at which, without a history, items are drawn with ``seed`` among the beams; 0: the best ones.
    """

    history: tuple[str, ...] = ()
    n: int = 10
    width: int = 50
    excluded: tuple[str, ...] = ()
    categories_any: tuple[str, ...] = ()
    categories_all: tuple[str, ...] = ()
    variety: float = 0.0
    seed: int = 0
    only_new: bool = False


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
    """Items of one query, best first. ``history`` is what the model read of the query's, oldest first.

    ``complete`` says that the list is certainly the exact top of the allowed catalog; ``short_reason`` says why it is shorter than n, if it is.
    """

    items: tuple[Recommendation, ...]
    width: int
    history_items: int
    unknown_history_items: int
    complete: bool
    dead_ends: int
    short_reason: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    history: tuple[str, ...] = ()


def answer(bundle: Bundle, queries: Sequence[Query], unavailable: Callable[[], Unavailable], clock: Callable[[], float]) -> list[Answer]:
    """Answer a batch of queries with one bundle."""
    answers: list[Answer | None] = [None] * len(queries)
    for group in _groups(queries, bundle):
        pending = list(group)
        for attempt in range(_SEARCHES):
            before = unavailable()
            found = _search(bundle, [queries[index] for index in pending], before, clock)
            after = unavailable()
            again = []
            for index, result in zip(pending, found, strict=True):
                withdrawn = 0 if after.version == before.version else sum(hit.item in after.items for hit in result.items)
                if withdrawn and attempt + 1 < _SEARCHES:
                    again.append(index)
                else:
                    answers[index] = _without(result, after, withdrawn) if withdrawn else result
            pending = again
            if not pending:
                break
    return [result for result in answers if result is not None]


def warm_up(bundle: Bundle, clock: Callable[[], float]) -> None:
    """Answer an empty and a longest history once: what is broken shows now, and the first user does not wait.

    Raises: whatever the model raises.
    """
    longest = bundle.catalog.item_ids[: bundle.max_history_items]
    for history in ((), longest):
        answer(bundle, [Query(history=history)], Unavailable, clock)


def effective_width(query: Query, items: int) -> int:
    """The beams of a query: at least n, so that n items come back, at most one per item of the catalog."""
    return max(1, min(max(query.width, query.n), items))


def _groups(queries: Sequence[Query], bundle: Bundle) -> list[list[int]]:
    """Indices of queries that are searched together: widths within a factor of two, logits within bounds."""
    widths = [effective_width(query, len(bundle.trie)) for query in queries]
    row = max(bundle.vocabulary.level_sizes)
    groups: list[list[int]] = []
    for index in sorted(range(len(queries)), key=lambda index: widths[index]):
        group = groups[-1] if groups else None
        fits = group is not None and widths[index] <= max(_SMALL_WIDTH, 2 * widths[group[0]]) and (len(group) + 1) * widths[index] * row <= _MAX_CELLS
        if group is not None and fits:
            group.append(index)
        else:
            groups.append([index])
    return groups


def _search(bundle: Bundle, queries: Sequence[Query], unavailable: Unavailable, clock: Callable[[], float]) -> list[Answer]:
    start = clock()
    device = bundle.trie.device
    histories = [bundle.rows(query.history) for query in queries]
    prompts = [bundle.vocabulary.history_tokens(bundle.item_tokens_NL[rows[max(0, len(rows) - bundle.max_history_items) :]]) for rows in histories]
    offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
    widths = [effective_width(query, len(bundle.trie)) for query in queries]
    masks = [bundle.mask(unavailable, query.categories_any, query.categories_all, query.only_new) for query in queries]
    excluded = [bundle.rows(query.excluded) for query in queries]
    node_filter = None
    allowed = [len(bundle.trie)] * len(queries)
    if any(mask.counts is not None for mask in masks) or any(len(rows) for rows in excluded):
        distinct = {id(mask): mask for mask in masks}
        place = {key: number for number, key in enumerate(distinct)}
        everything = bundle.trie.prefix_counts(np.ones(len(bundle.trie), dtype=bool)) if any(m.counts is None for m in distinct.values()) else None
        counts = [mask.counts if mask.counts is not None else everything for mask in distinct.values()]
        node_filter = ItemFilter.build(bundle.trie, [c for c in counts if c is not None], [place[id(mask)] for mask in masks], excluded)
        allowed = list(node_filter.allowed)
    prepared = clock()
    tokens_T = torch.as_tensor(np.concatenate(prompts), device=device)
    hits = beam_search(bundle.model, bundle.trie, tokens_T, torch.as_tensor(offsets, device=device), widths, node_filter=node_filter, clock=clock)
    searched = clock()
    seconds = {"filter": prepared - start, **hits.seconds}
    answers = []
    for request, query in enumerate(queries):
        known = len(histories[request])
        places = _places(hits, request, query, known)
        recommendations = _recommendations(bundle, hits, request, places)
        answers.append(
            Answer(
                items=recommendations,
                width=widths[request],
                history_items=min(known, bundle.max_history_items),
                unknown_history_items=len(query.history) - known,
                complete=places == list(range(len(places))) and hits.complete(request, query.n),
                dead_ends=int(hits.dead_ends_R[request]),
                short_reason=_short_reason(bundle, query, len(recommendations), allowed[request]),
                seconds=seconds,
                history=tuple(bundle.catalog.item_ids[row] for row in histories[request][max(0, known - bundle.max_history_items) :]),
            )
        )
    seconds["format"] = clock() - searched
    return answers


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
