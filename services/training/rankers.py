"""Rankings of the data set's items after a history, by each kind of model; all of them rank every item that they know.

An item that a model lacks (row -1) is never among its lists, and of histories it is left out, as in serving.

Legend: R requests, n length of a list, N items of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.services.training.row_matching import inverse
from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.popularity import Popularity
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.retriever_search import Read, states
from semantide.shared.models.sasrec import SASRec
from semantide.shared.trie import Trie

IntArray = npt.NDArray[np.int64]
Rows = npt.NDArray[np.integer]

_HISTORIES, _ITEMS = 64, 1 << 14  # at a time: histories that the retriever reads, items whose scores are in memory


class Ranker(Protocol):
    """Ranks items after each history."""

    num_unknown: int
    """Items of the data set that it does not know."""

    def rank(self, histories: Sequence[Rows], n: int, exclude_seen: bool, times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> IntArray:
        """Rows of the n best items of each history [R, n], best first, -1 where a list ends early.

        ``actions``: the data set's number of each event's action; nothing where they are not known.
        Units: ``times`` of each history's events, seconds; nothing where they are not known.
        """
        ...


@dataclass(frozen=True)
class _Told:
    """What a model is told of one history: its own rows of the items that it knows, and when and what each was."""

    rows: IntArray
    times: Rows | None
    actions: Rows | None

    @classmethod
    def of(cls, rows_N: IntArray, history: Rows, times: Rows | None, actions: Rows | None) -> _Told:
        """Leave out what the model does not know."""
        rows = rows_N[np.asarray(history, dtype=np.int64)]
        known = rows >= 0
        if known.all():
            return cls(rows, times, actions)
        return cls(rows[known], None if times is None else np.asarray(times)[known], None if actions is None else np.asarray(actions)[known])


def _told(rows_N: IntArray, histories: Sequence[Rows], times: Sequence[Rows | None], actions: Sequence[Rows | None]) -> list[_Told]:
    return [_Told.of(rows_N, history, *(each[place] if place < len(each) else None for each in (times, actions))) for place, history in enumerate(histories)]


class PopularityRanker:
    """The same list for everybody, less what each has seen."""

    def __init__(self, popularity: Popularity) -> None:
        self._ranking, self.num_unknown = popularity.ranking(), 0

    def rank(self, histories: Sequence[Rows], n: int, exclude_seen: bool, times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> IntArray:
        """See ``Ranker``."""
        lists = np.full((len(histories), n), -1, dtype=np.int64)
        for request, history in enumerate(histories):
            top = self._ranking[: n + len(history)] if exclude_seen else self._ranking[:n]
            best = top[~np.isin(top, history)][:n] if exclude_seen else top
            lists[request, : len(best)] = best
        return lists


class SASRecRanker:
    """Exact scores of every item.

    ``model_rows`` [N] gives the model's row of each item of the data set.
    """

    def __init__(self, model: SASRec, model_rows: IntArray, max_items: int) -> None:
        self._model, self._max_items = model, min(max_items, model.config.max_items)
        self._device = model.items.weight.device
        self._rows = model_rows
        self._rows_N = torch.from_numpy(model_rows).to(self._device)
        self.num_unknown = int((model_rows < 0).sum())

    @torch.inference_mode()
    def rank(self, histories: Sequence[Rows], n: int, exclude_seen: bool, times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> IntArray:
        """See ``Ranker``."""
        known = _told(self._rows, histories, (), ())
        packed = Jagged.from_sequences(np.concatenate([[-1], told.rows[-self._max_items :]]) for told in known).to(self._device)
        hidden_RD = self._model.eval()(packed.values, packed.offsets_B1)[packed.last_rows_B()]
        scores_RN = self._model.logits(hidden_RD)[:, self._rows_N.clamp_min(0)].float()
        return _best(scores_RN.masked_fill(self._rows_N < 0, -torch.inf), histories, n, exclude_seen)


class RetrieverRanker:
    """Exact scores of every item from its vector, some items at a time: the table is never in one place, and neither are all scores.

    ``read`` gives vectors of some of the model's items; ``model_rows`` [N] is the model's row of each item of the data set, ``model_actions`` the model's number of each of its actions. Where reading is a talk with other ranks,
    these rank at the same time, as often (``rank`` of no histories included), and ``agree`` gives all of them the largest of their numbers.
    """

    def __init__(
        self,
        model: Retriever,
        read: Read,
        model_rows: IntArray,
        max_items: int,
        *,
        model_actions: Rows | None = None,
        agree: Callable[[int], int] = lambda number: number,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._read, self._max_items = model, read, min(max_items, model.config.max_items)
        self._rows, self._actions, self._agree, self._beat = model_rows, model_actions, agree, beat
        self.num_unknown = int((model_rows < 0).sum())

    @torch.inference_mode()
    def rank(self, histories: Sequence[Rows], n: int, exclude_seen: bool, times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> IntArray:
        """See ``Ranker``."""
        model, num_items = self._model, len(self._rows)
        states_RD = self._states(histories, times, actions)
        best = torch.full((len(histories), 0), -torch.inf, device=states_RD.device), torch.zeros(len(histories), 0, dtype=torch.int64, device=states_RD.device)
        for begin in range(0, num_items, _ITEMS):
            self._beat()
            items = torch.from_numpy(self._rows[begin : begin + _ITEMS])
            scores_RV = (states_RD @ model.scored(self._read(items.clamp_min(0)).to(states_RD.device)).T).float() / model.temperature
            if self.num_unknown:
                scores_RV = scores_RV.masked_fill((items < 0).to(scores_RV.device), -torch.inf)
            if exclude_seen:
                for request, history in enumerate(histories):
                    seen = np.asarray(history, dtype=np.int64) - begin
                    scores_RV[request, torch.from_numpy(seen[(seen >= 0) & (seen < len(items))])] = -torch.inf
            top = scores_RV.topk(min(n, len(items)), dim=1)
            scores = torch.cat([best[0], top.values], 1)
            merged = scores.topk(min(n, scores.shape[1]), dim=1)
            best = merged.values, torch.cat([best[1], top.indices + begin], 1).gather(1, merged.indices)
        lists = np.full((len(histories), n), -1, dtype=np.int64)
        lists[:, : best[1].shape[1]] = best[1].masked_fill(best[0] == -torch.inf, -1).cpu().numpy()
        return lists

    def _states(self, histories: Sequence[Rows], times: Sequence[Rows | None], actions: Sequence[Rows | None]) -> Tensor:
        parts = []
        for part in range(self._agree(-(-len(histories) // _HISTORIES))):
            some = slice(part * _HISTORIES, (part + 1) * _HISTORIES)
            known = _told(self._rows, histories[some], times[some], actions[some])
            done = [None if told.actions is None or self._actions is None else self._actions[told.actions] for told in known]
            parts.append(states(self._model, [told.rows for told in known], [told.times for told in known], self._read, self._max_items, done))
            self._beat()
        return torch.cat(parts) if parts else torch.zeros(0, self._model.config.hidden_size, device=self._model.begin.device)


def _best(scores_RN: Tensor, histories: Sequence[Rows], n: int, exclude_seen: bool) -> IntArray:
    """The n best items of each request."""
    if exclude_seen:
        for request, history in enumerate(histories):
            scores_RN[request, torch.from_numpy(np.asarray(history, dtype=np.int64))] = -torch.inf
    best = scores_RN.topk(min(n, scores_RN.shape[1]), dim=1)
    lists = np.full((len(histories), n), -1, dtype=np.int64)
    lists[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values == -torch.inf, -1).cpu().numpy()
    return lists


class GeneratorRanker:
    """Beam search over the catalog's trie.

    ``catalog_rows`` [N] gives the catalog's row of each item of the data set; catalog items beyond those are not recommended here. ``model_actions`` is the
    model's number of each of the data set's actions, where its prompts say what was done.
    """

    def __init__(
        self, model: Generator, trie: Trie, codes: IntArray, catalog_rows: IntArray, max_items: int, beam_width: int, model_actions: Rows | None = None
    ) -> None:
        self._decoder, self._max_items, self._beam_width = GeneratorDecoder(model), max_items, beam_width
        self._device = model.head_VD.device
        self._trie = SearchTrie.build(trie, self._device)
        self._spelling, self._actions = PromptSpelling.of(model, codes), model_actions
        self._catalog_rows, self._item_of = catalog_rows, inverse(catalog_rows, len(codes))
        self._mask = self._trie.prefix_counts(self._item_of >= 0)
        self._everything = bool((self._item_of >= 0).all())
        self.num_unknown = int((catalog_rows < 0).sum())

    def rank(self, histories: Sequence[Rows], n: int, exclude_seen: bool, times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> IntArray:
        """See ``Ranker``; the search keeps at least n beams. Of a long history the model reads what serving has it read."""
        known = _told(self._catalog_rows, histories, times, actions)
        prompts = Jagged.from_sequences(map(self._prompt, known))
        node_filter = None
        if exclude_seen or not self._everything:
            seen: list[IntArray | list[int]] = [told.rows if exclude_seen else [] for told in known]
            node_filter = ItemFilter.build(self._trie, [self._mask], [0] * len(histories), seen)
        self._decoder.generator.eval()
        prompts = prompts.to(self._device)
        hits = beam_search(self._decoder, self._trie, prompts.values, prompts.offsets_B1, max(n, self._beam_width), node_filter=node_filter)
        rows = hits.rows_RW[:, :n].cpu().numpy()
        lists = np.full((len(histories), n), -1, dtype=np.int64)
        lists[:, : rows.shape[1]] = np.where(rows >= 0, self._item_of[rows], -1)
        return lists

    def _prompt(self, told: _Told) -> IntArray:
        window = history_window(told.rows, self._max_items)
        first = len(told.rows) - len(window)
        return self._spelling.prompt(
            window,
            None if told.actions is None or self._actions is None else self._actions[told.actions[first:]],
            None if told.times is None else told.times[first:],
        )
