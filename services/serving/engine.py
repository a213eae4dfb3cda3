"""Queries in, answers out: no network, no clock but the one passed in.

A group of queries is one search that is advanced round by round: the prefill, then one step for each further code. Who advances it, and what happens between
two rounds, is the scheduler's business; ``answer`` simply advances until the end.
What availability says is asked again when a search is done: an item that was withdrawn meanwhile is not handed out; its query is searched again.
Legend: T tokens, R requests, W beams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.services.serving.narrowing import narrowed_width
from semantide.services.serving.registry_state import Pair
from semantide.services.serving.ticket import Mark, SearchAgain
from semantide.shared.decoding.beam_search import Hits
from semantide.shared.decoding.kv_pool import KVLease
from semantide.shared.decoding.search_trie import ItemFilter
from semantide.shared.models.generator_decoder import PromptKV
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.trie import IntArray

_SEARCHES = 3  # of one query whose items vanish while it runs
_FULL_ROW = 1 << 14  # codes of a level up to which a beam counts as one; longer rows of logits count for more
_MAX_BEAMS, _MAX_REQUESTS = 1024, 32  # of a group that ``answer`` makes

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """One request, with everything about its user already looked up.

    ``history`` is what the user liked, oldest first; ``excluded`` must not come back. Items that the catalog does not have are fine in both.
    ``variety`` is the temperature at which, without a history, items are drawn with ``seed`` among the beams; 0: the best ones.
    ``user`` is whose prompt may be kept for the next time; None: nobody's. ``only_new`` leaves only items that are younger than the model.
    ``moments`` say what was done with each item of the history, and when (milliseconds since 1970, or None); empty: not known.
    ``conditional`` takes log-probabilities over the codes that the catalog has below a prefix, not over all codes of the level.
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


@dataclass(eq=False)
class Prepared:
    """A query against one bundle, with all that does not change with the moment: its prompt, its width, what it leaves out.

    ``read_rows`` are the items that the prompt spells. ``tokens`` of its ``places`` (a merged item is one of them) are not in common with the user's last
    prompt, if one was ``kept``.

    Shapes: ``prompt`` [T].
    """

    bundle: Bundle
    query: Query
    prompt: Tokens
    read_rows: IntArray
    excluded: IntArray
    width: int
    known: int
    kept: bool = False
    tokens: int = 0
    searches: int = 0

    @classmethod
    def of(cls, bundle: Bundle, query: Query) -> Prepared:
        """Look up a query's items, spell its history, and see what is kept of the user."""
        rows = bundle.rows(query.history)
        read_rows = history_window(rows, bundle.max_history_items)
        prompt = _spelled(bundle, query, read_rows)
        width = effective_width(query, len(bundle.trie))
        prepared = cls(bundle, query, prompt, read_rows, bundle.rows(query.excluded), width, len(rows))
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
    def history_items(self) -> int:
        """Items that the prompt spells."""
        return len(self.read_rows)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that it will hold at most."""
        return self.bundle.model.kv_bytes(len(self.prompt), self.width)

    @property
    def family(self) -> object:
        """Queries of one bundle whose scores mean the same are searched together."""
        return id(self.bundle), self.query.conditional

    @property
    def beams(self) -> int:
        """Its width, long rows of logits counting for more."""
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


class Group:
    """Prepared queries of one bundle under way together.

    ``unavailable`` says what may not be recommended now. ``leases`` hold each query's memory until ``keep`` or ``close`` give it back.
    ``tokens_read`` of its ``prompt_tokens``, a merged item counting as one, were not known from elsewhere.
    """

    def __init__(
        self,
        requests: Sequence[Prepared],
        unavailable: Callable[[], Unavailable],
        clock: Callable[[], float],
        *,
        leases: Sequence[KVLease] = (),
        share: float = 1.0,
    ) -> None:
        self._bundle, self._unavailable, self._clock = requests[0].bundle, unavailable, clock
        assert all(request.family == requests[0].family for request in requests), "one search has one model and one kind of scores"
        self.requests, self._leases = list(requests), list(leases)
        self.marks: list[Mark] = []
        self.hits: Hits | None = None
        self._state: Any = None
        self._extension: tuple[torch.Tensor, torch.Tensor] | None = None
        self.prompt_tokens = self.tokens_read = 0
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

    def next_rows(self) -> int:
        """Rows that the next round puts through the model."""
        if self._search.level:
            return sum(self._search.counts)
        prompts: dict[bytes, int] = {}
        for request in self.requests:
            prompts.setdefault(request.prompt.tobytes(), request.tokens)
        return sum(prompts.values()) + len(self.requests) - len(prompts)  # of a prompt that several have, the last token is read for each

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one round; whether there is another one.

        Raises: PermanentError where the model's logits are not numbers, and what the model itself raises.
        """
        model, search, level = self._bundle.model, self._search, self._search.level
        start = self._clock()
        if level == 0:
            device = self._bundle.trie.device
            tokens_T = torch.as_tensor(np.concatenate([request.prompt for request in self.requests]), device=device)
            offsets_R1 = torch.as_tensor(np.cumsum([0, *(len(request.prompt) for request in self.requests)]), device=device)
            last = [request.last_prompt() for request in self.requests]
            self.prompt_tokens, self.tokens_read = sum(request.places for request in self.requests), self.next_rows()
            logits, self._state = model.begin(tokens_T, offsets_R1, last if any(last) else None, self._leases or None)
            start = self._mark("prefill", start)
        else:
            assert self._extension is not None, "advanced past the end"
            logits = model.step(self._state, level, *self._extension, search.counts)
            start = self._mark(f"step_{level}", start)
        self._extension = search.select(logits)
        if self._extension is None:
            self.hits = search.hits()
        self._mark("select", start)
        return self._extension is not None

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> None:
        """Go on with these queries only; the memory of the others is free at once."""
        gone = set(range(len(self.requests))) - set(places)
        self._search.keep(places)
        if self._extension is not None:
            self._bundle.model.keep(self._state, places)
            width = max(1, *self._search.counts)
            parents_RW, codes_RW = self._extension
            self._extension = parents_RW[list(places), :width], codes_RW[list(places), :width]
        self.requests = [self.requests[place] for place in places]
        self.widths, self._allowed = [self.widths[place] for place in places], [self._allowed[place] for place in places]
        for place in gone:
            if self._leases:
                self._leases[place].release()
        self._leases = [self._leases[place] for place in places] if self._leases else []

    def answers(self) -> list[Answer | SearchAgain]:
        """What was found, or that it has to be found again."""
        hits, bundle, after = self.hits, self._bundle, self._unavailable()
        assert hits is not None, "asked before the last round"
        seconds: dict[str, float] = {}
        for stage, begin, end in self.marks:
            seconds[stage] = seconds.get(stage, 0.0) + end - begin
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

    def remember(self) -> None:
        """Keep the users' prompts for the next time."""
        prompts = self._bundle.prompts
        for place, request in enumerate(self.requests):
            if request.query.user is not None and prompts.budget_bytes and not request.query.only_new:
                prompts.put(request.query.user, self._state.prompt_kv(place), self._state.read_R[place])

    def close(self) -> None:
        """Let go of the model's state and give all memory back."""
        self._state = self._extension = None
        for lease in self._leases:
            lease.release()
        self._leases = []

    def _mark(self, stage: str, start: float) -> float:
        now = self._clock()
        self.marks.append((stage, start, now))
        return now


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


def effective_width(query: Query, items: int) -> int:
    """The beams of a query: at least n, so that n items come back, at most one per item of the catalog."""
    return max(1, min(max(query.width, query.n), items))


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
