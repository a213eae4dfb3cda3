"""Constrained beam search over the item trie, for a batch of requests with widths of their own.

Only children of a beam's trie node are scored, so an invalid id cannot come up; only nodes with an allowed item below are entered, so a filter never
empties a beam. As every alive node has an alive child, a request ends with min(width, allowed items) results: n items come back whenever n are allowed and
width >= n, without widening. Should items vanish between two levels (a filter that changes), the beam ends there, is counted, and the list is shorter.

Beams are kept in node order, which is the lexicographic order of their codes. Candidates then come in node order too, so the first of several equal
candidates is the one with the smallest codes: ties are settled by position, and a parent's children stay adjacent.
Legend: R requests, W beams, L levels, K codes of a level, B live beams of all requests, C candidates of all requests, P candidates of the busiest request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from semantide.shared.decoding.protocol import StepModel
from semantide.shared.decoding.search_trie import NodeFilter, SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.trie import Trie

Normalisation = Literal["row", "children"]

_LOWEST = -1e300  # of a valid candidate; below it only padding (-inf)


@dataclass(frozen=True)
class Hits:
    """The best items of each request, best first; equal scores in the order of their codes.

    ``complete`` says that no item outside the list can score higher: every prefix that was dropped scores below the request's last result
    (log-probabilities only fall).
    ``dead_ends`` counts beams below which nothing allowed was left.

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
        self.counts: tuple[int, ...] = (1,) * requests
        self._origin_R = torch.arange(requests, device=device)  # the filter's numbers of the requests
        self._widths_R = torch.tensor([min(width, len(trie)) for width in widths], dtype=torch.int64, device=device)
        self._nodes_RW = torch.zeros(requests, 1, dtype=torch.int64, device=device)
        self._live_RW = torch.ones(requests, 1, dtype=torch.bool, device=device)
        self._scores_RW = torch.zeros(requests, 1, dtype=torch.float64, device=device)
        self._paths_RWL = torch.zeros(requests, 1, trie.levels, dtype=torch.float64, device=device)
        self._dead_ends_R = torch.zeros(requests, dtype=torch.int64, device=device)
        self._dropped_R = torch.full((requests,), -torch.inf, dtype=torch.float64, device=device)

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take the logits of this level, keep the best children, and say how the beams go on: parents and codes [R, W], or None at the end.

        Shapes: ``logits`` [R, K] at level 0, else [R, W, K] for the beams of the last answer, or [B, K] for the real ones among them.

        Raises: PermanentError where the model's logits are not numbers.
        """
        trie, level = self._trie, self.level
        (requests, width), num_codes = self._nodes_RW.shape, logits.shape[-1]
        if num_codes < trie.num_codes[level]:
            raise ValueError(
                f"the model has {num_codes} codes at level {level} and the catalog uses {trie.num_codes[level]}: use the catalog the model was trained for"
            )

        # Children of every live beam, in the order (request, node).
        beams_B = self._live_RW.flatten().nonzero().squeeze(1)
        nodes_B = self._nodes_RW.flatten()[beams_B]
        first_B = trie.offsets[level][nodes_B]
        counts_B = trie.offsets[level][nodes_B + 1] - first_B
        positions_C = torch.repeat_interleave(torch.arange(len(beams_B), device=trie.device), counts_B)
        starts_B = counts_B.cumsum(0) - counts_B
        children_C = torch.arange(len(positions_C), device=trie.device) + (first_B - starts_B)[positions_C]
        self.candidates += len(children_C)

        rows_BK = logits if logits.dim() == 2 else logits.reshape(requests * width, num_codes)
        if logits.dim() != 2 and len(beams_B) != len(rows_BK):
            rows_BK = rows_BK[beams_B]
        assert len(rows_BK) == len(beams_B), (logits.shape, self.counts)
        if self._normalisation == "row":
            norms_B = torch.logsumexp(rows_BK.float(), 1).double()
        else:
            norms_B = _segment_logsumexp(rows_BK[positions_C, trie.tokens[level][children_C]].double(), positions_C, len(beams_B))
        if not bool(torch.isfinite(norms_B).all()):
            raise PermanentError(
                f"the model's logits of level {level} are not finite numbers: its weights are damaged or overflow their type; promote another model"
            )

        if self._filter is not None:
            alive_C = self._filter.alive(level + 1, self._origin_R[beams_B[positions_C] // width], children_C).nonzero().squeeze(1)
            children_C, positions_C = children_C[alive_C], positions_C[alive_C]
            if level:
                ended_B = torch.bincount(positions_C, minlength=len(beams_B)) == 0
                self._dead_ends_R += torch.bincount(beams_B[ended_B] // width, minlength=requests)
        slots_C = beams_B[positions_C]
        requests_C = slots_C // width
        codes_C = trie.tokens[level][children_C]
        # A code of probability zero is still a valid one: it stays above the padding.
        step_C = (rows_BK[positions_C, codes_C].double() - norms_B[positions_C]).clamp_(min=_LOWEST)
        scores_C = (self._scores_RW.flatten()[slots_C] + step_C).clamp_(min=_LOWEST)

        chosen_C, kept_R = self._best(scores_C, requests_C, requests)
        beams = max(int(kept_R.max()), 1)
        owner = requests_C[chosen_C]
        place = owner * beams + torch.arange(len(chosen_C), device=trie.device) - (kept_R.cumsum(0) - kept_R)[owner]

        def arrange(values: Tensor, fill: float) -> Tensor:
            table = torch.full((requests * beams,), fill, dtype=values.dtype, device=trie.device)
            table[place] = values
            return table.view(requests, beams)

        parents_RW = arrange(slots_C[chosen_C] % width, 0)
        codes_RW = arrange(codes_C[chosen_C], 0)
        self._live_RW = torch.arange(beams, device=trie.device) < kept_R[:, None]
        self._nodes_RW = arrange(children_C[chosen_C], 0)
        self._scores_RW = arrange(scores_C[chosen_C], -torch.inf)
        self._paths_RWL = self._paths_RWL.gather(1, parents_RW[:, :, None].expand(-1, -1, trie.levels))
        self._paths_RWL[:, :, level] = arrange(step_C[chosen_C], 0)
        self.level += 1
        self.counts = tuple(kept_R.tolist())
        if self.level == trie.levels or not len(chosen_C):
            return None
        return parents_RW, codes_RW

    def keep(self, requests: Sequence[int]) -> None:
        """Go on with these requests of the batch only, in this order."""
        kept = torch.tensor(list(requests), dtype=torch.int64, device=self._trie.device)
        self.counts = tuple(self.counts[request] for request in requests)
        width = max(self.counts, default=1)
        self._origin_R, self._widths_R = self._origin_R[kept], self._widths_R[kept]
        self._dead_ends_R, self._dropped_R = self._dead_ends_R[kept], self._dropped_R[kept]
        self._nodes_RW, self._live_RW = self._nodes_RW[kept, :width], self._live_RW[kept, :width]
        self._scores_RW, self._paths_RWL = self._scores_RW[kept, :width], self._paths_RWL[kept, :width]

    def _best(self, scores_C: Tensor, requests_C: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Which candidates stay (ascending) and how many of each request: the highest scores, the first of equal ones."""
        counts_R = torch.bincount(requests_C, minlength=requests)
        kept_R = torch.minimum(counts_R, self._widths_R)
        if bool((kept_R == counts_R).all()):
            return torch.arange(len(scores_C), device=scores_C.device), kept_R
        starts_R = counts_R.cumsum(0) - counts_R
        columns_C = torch.arange(len(scores_C), device=scores_C.device) - starts_R[requests_C]
        if requests == 1:
            table_RP = scores_C[None]
        else:
            table_RP = torch.full((requests, int(counts_R.max())), -torch.inf, dtype=torch.float64, device=scores_C.device)
            table_RP[requests_C, columns_C] = scores_C
        ranked = torch.topk(table_RP, int(kept_R.max()), dim=1).values
        threshold_R1 = ranked.gather(1, (kept_R[:, None] - 1).clamp_(min=0))
        above_RP = table_RP > threshold_R1
        equal_RP = (table_RP == threshold_R1) & (kept_R[:, None] > 0)
        room_R1 = kept_R[:, None] - above_RP.sum(1, keepdim=True)
        chosen_RP = above_RP | (equal_RP & (equal_RP.cumsum(1) <= room_R1))
        self._dropped_R = torch.maximum(self._dropped_R, table_RP.masked_fill(chosen_RP, -torch.inf).amax(1))
        return chosen_RP[requests_C, columns_C].nonzero().squeeze(1), kept_R

    def hits(self, seconds: dict[str, float] | None = None) -> Hits:
        """The results; call it after ``select`` has answered None."""
        finished = self.level == self._trie.levels
        live_RW = self._live_RW if finished else torch.zeros_like(self._live_RW)
        scores_RW, order = torch.sort(self._scores_RW.masked_fill(~live_RW, -torch.inf), dim=1, descending=True, stable=True)
        live_RW = live_RW.gather(1, order)
        leaves_RW = self._nodes_RW.gather(1, order).masked_fill(~live_RW, 0)
        return Hits(
            rows_RW=self._trie.leaf_items[leaves_RW].masked_fill(~live_RW, -1),
            scores_RW=scores_RW,
            level_scores_RWL=self._paths_RWL.gather(1, order[:, :, None].expand(-1, -1, self._trie.levels)),
            counts_R=live_RW.sum(1),
            dead_ends_R=self._dead_ends_R,
            dropped_R=self._dropped_R,
            candidates=self.candidates,
            seconds=seconds or {},
        )


def _segment_logsumexp(values_C: Tensor, segments_C: Tensor, count: int) -> Tensor:
    """Log of the sum of exponentials within each segment."""
    top = torch.full((count,), -torch.inf, dtype=values_C.dtype, device=values_C.device).scatter_reduce_(0, segments_C, values_C, "amax")
    return torch.zeros_like(top).index_add_(0, segments_C, torch.exp(values_C - top[segments_C])).log() + top


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
