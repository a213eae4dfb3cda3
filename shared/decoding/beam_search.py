"""Constrained beam search over the item trie, for a batch of requests with widths of their own.

Only children of a beam's trie node are scored, so an invalid id cannot come up; only nodes with an allowed item below are entered, so a filter never
empties a beam. As every alive node has an alive child, a request ends with min(width, allowed items) results: n items come back whenever n are allowed and
width >= n, without widening. Should items vanish between two levels (a filter that changes), the beam ends there, is counted, and the list is shorter.

Beams are kept in node order, which is the lexicographic order of their codes. Candidates then come in node order too, so the first of several equal
candidates is the one with the smallest codes: ties are settled by position, and a parent's children stay adjacent.
Legend: R requests, W beams, B live beams of all requests, L levels, K codes of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from semantide.kernels.beam_select import beam_select
from semantide.shared.decoding.protocol import StepModel
from semantide.shared.decoding.search_trie import NodeFilter, SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.trie import Trie

Normalisation = Literal["row", "children"]


@dataclass(frozen=True)
class Hits:
    """The best items of each request, best first; equal scores in the order of their codes.

    ``complete`` says that no item outside the list can score higher: every prefix that was dropped scores below the request's last result
    (log-probabilities only fall).
    ``dead_ends`` counts beams below which nothing allowed was left; ``candidates`` the children of all beams, ``visited`` those of them whose score was
    compared with others'.

    Shapes: ``rows_RW`` int64 (catalog row, -1 past the end), ``scores_RW`` float64 (log-probability, -inf past the end), ``level_scores_RWL`` float64,
    ``counts_R``, ``dead_ends_R`` int64, ``dropped_R`` float64 (best score that was dropped).
    """

    rows_RW: Tensor
    scores_RW: Tensor
    level_scores_RWL: Tensor
    counts_R: Tensor
    dead_ends_R: Tensor
    dropped_R: Tensor
    candidates: int
    visited: int
    seconds: dict[str, float]

    def complete(self, request: int, n: int) -> bool:
        """Whether the first n results are certainly the n best allowed items."""
        last = min(n, int(self.counts_R[request]))
        return bool(self.dropped_R[request] == -torch.inf) or (last > 0 and bool(self.scores_RW[request, last - 1] > self.dropped_R[request]))


class Search:
    """A batch of searches, one level at a time; it knows no model.

    Give each level's logits to ``select`` and its answer to the model, until it answers None.
    """

    def __init__(self, trie: SearchTrie, widths: Sequence[int], node_filter: NodeFilter | None = None, normalisation: Normalisation = "row") -> None:
        for request, width in enumerate(widths):
            if width < 1:
                raise ValueError(f"request {request} has beam width {width}: give at least 1")
        self._trie, self._filter, self._normalisation = trie, node_filter, normalisation
        device, requests = trie.device, len(widths)
        self.level = 0
        self.candidates = 0
        self.visited = 0
        self._owners_R = torch.arange(requests, device=device)
        self._widths_R = torch.tensor([min(width, len(trie)) for width in widths], dtype=torch.int64, device=device)
        self._nodes_RW = torch.zeros(requests, 1, dtype=torch.int64, device=device)
        self._live_R = torch.ones(requests, dtype=torch.int64, device=device)
        self._scores_RW = torch.zeros(requests, 1, dtype=torch.float64, device=device)
        self._path: list[tuple[Tensor, Tensor]] = []  # parents and the score of the step, per level: followed back once, at the end
        self._dead_ends_R = torch.zeros(requests, dtype=torch.int64, device=device)
        self._dropped_R = torch.full((requests,), -torch.inf, dtype=torch.float64, device=device)

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take the logits of this level, keep the best children, and say how the beams go on: parents and codes [R, W], or None at the end.

        Shapes: ``logits`` [R, K] at level 0, else [R, W, K] for the beams of the last answer, or [B, K] for the real ones among them.

        Raises: PermanentError where the model's logits are not numbers.
        """
        trie, level = self._trie, self.level
        logits = self._table(logits)
        assert logits.shape[:2] == self._nodes_RW.shape, (logits.shape, self._nodes_RW.shape)
        if logits.shape[2] < trie.num_codes[level]:
            raise ValueError(
                f"the model has {logits.shape[2]} codes at level {level} and the catalog uses {trie.num_codes[level]}: use the catalog the model was trained for"
            )
        leaves = None if self._filter is None else self._filter.at(level + 1).leaves(level + 1, self._owners_R)
        beams, among_children = (self._nodes_RW, self._live_R, self._scores_RW, self._widths_R), self._normalisation == "children"
        try:
            chosen = beam_select(logits, *beams, trie.offsets[level], trie.tokens[level], leaves, among_children)
        except FloatingPointError:
            raise PermanentError(
                f"the model's logits of level {level} are not finite numbers: its weights are damaged or overflow their type; promote another model"
            ) from None
        self.candidates += chosen.children
        self.visited += chosen.visited
        self._nodes_RW, self._live_R, self._scores_RW = chosen.nodes_RW, chosen.kept_R, chosen.scores_RW
        self._path.append((chosen.parents_RW, chosen.steps_RW))
        self._dropped_R = torch.maximum(self._dropped_R, chosen.dropped_R)
        if level:
            self._dead_ends_R += chosen.dead_ends_R
        self.level += 1
        if self.level == trie.levels or not any(chosen.kept_R.tolist()):
            return None
        return chosen.parents_RW, chosen.codes_RW

    @property
    def counts(self) -> tuple[int, ...]:
        """Live beams of each request, the first ones of its row."""
        return tuple(self._live_R.tolist())

    def _table(self, logits: Tensor) -> Tensor:
        """Logits as [R, W, K]; what stands in the place of dead beams is never read."""
        if logits.dim() == 3:
            return logits
        if len(logits) == self._nodes_RW.numel():
            return logits.view(*self._nodes_RW.shape, -1)
        table_RWK = logits.new_empty(*self._nodes_RW.shape, logits.shape[1])
        table_RWK[torch.arange(table_RWK.shape[1], device=logits.device) < self._live_R[:, None]] = logits
        return table_RWK

    def keep(self, requests: Sequence[int]) -> None:
        """Go on with these requests of the batch alone, in this order; the model's state has to be narrowed alike."""
        rows_R = torch.as_tensor(list(requests), dtype=torch.int64, device=self._trie.device)
        self._owners_R, self._widths_R, self._live_R = self._owners_R[rows_R], self._widths_R[rows_R], self._live_R[rows_R]
        width = max([1, *self.counts])
        self._nodes_RW, self._scores_RW = self._nodes_RW[rows_R, :width], self._scores_RW[rows_R, :width]
        self._dead_ends_R, self._dropped_R = self._dead_ends_R[rows_R], self._dropped_R[rows_R]
        self._path = [(parents_RW[rows_R], steps_RW[rows_R]) for parents_RW, steps_RW in self._path]

    def hits(self, seconds: dict[str, float] | None = None) -> Hits:
        """The results; call it after ``select`` has answered None."""
        finished = self.level == self._trie.levels
        counts_R = self._live_R if finished else torch.zeros_like(self._live_R)
        live_RW = torch.arange(self._nodes_RW.shape[1], device=self._trie.device) < counts_R[:, None]
        scores_RW, order = torch.sort(self._scores_RW.masked_fill(~live_RW, -torch.inf), dim=1, descending=True, stable=True)
        live_RW = live_RW.gather(1, order)
        leaves_RW = self._nodes_RW.gather(1, order).masked_fill(~live_RW, 0)
        level_scores_RWL = torch.zeros(*order.shape, self._trie.levels, dtype=torch.float64, device=self._trie.device)
        slots_RW = order
        for level, (parents_RW, steps_RW) in reversed(list(enumerate(self._path))):
            level_scores_RWL[:, :, level] = steps_RW.gather(1, slots_RW)
            slots_RW = parents_RW.gather(1, slots_RW)
        return Hits(
            rows_RW=self._trie.leaf_items[leaves_RW].masked_fill(~live_RW, -1),
            scores_RW=scores_RW,
            level_scores_RWL=level_scores_RWL,
            counts_R=counts_R,
            dead_ends_R=self._dead_ends_R,
            dropped_R=self._dropped_R,
            candidates=self.candidates,
            visited=self.visited,
            seconds=seconds or {},
        )


@torch.inference_mode()
def beam_search(
    model: StepModel,
    trie: SearchTrie | Trie,
    tokens_T: Tensor,
    offsets_R1: Tensor,
    widths: int | Sequence[int],
    *,
    node_filter: NodeFilter | None = None,
    normalisation: Normalisation = "row",
    clock: Callable[[], float] | None = None,
) -> Hits:
    """The best items of R requests, found with ``widths`` beams (one width for all, or one each).

    ``normalisation`` "row" takes log-probabilities over the level's full code row, as in training; "children" over the codes that the catalog has
    below the beam (before filters, so that a filter never changes a score). With a ``clock``, ``seconds`` says where the time went.

    Shapes: ``tokens_T`` [T], ``offsets_R1`` [R + 1], as in ``StepModel.begin``.

    Raises: ValueError for a width below 1; PermanentError where the model's logits are not numbers.
    """
    requests = len(offsets_R1) - 1
    if requests < 1:
        raise ValueError(f"offsets have length {len(offsets_R1)}: give at least one request")
    if isinstance(trie, Trie):
        trie = SearchTrie.build(trie, tokens_T.device)
    every = [widths] * requests if isinstance(widths, int) else list(widths)
    if len(every) != requests:
        raise ValueError(f"{len(every)} widths for {requests} requests: give one width, or one for each request")
    now = clock or (lambda: 0.0)
    seconds = {"prefill": 0.0, "step": 0.0, "select": 0.0}
    search = Search(trie, every, node_filter, normalisation)
    start = now()
    logits, state = model.begin(tokens_T, offsets_R1)
    seconds["prefill"] = now() - start
    while True:
        start = now()
        extension = search.select(logits)
        seconds["select"] += now() - start
        if extension is None:
            return search.hits(seconds)
        start = now()
        logits = model.step(state, search.level, *extension, search.counts)
        seconds["step"] += now() - start
