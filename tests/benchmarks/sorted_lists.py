"""The best of many sorted lists without looking at most of them: early termination as it was published, with a heap, and vectorised with a threshold.

Here every beam comes with its codes already sorted, as a model's top-k gives them, and no item trie says which are allowed.
``kernels/beam_select.py``, which stands beside it in the benchmark, needs no sorted lists, and sorting costs more than all that it does.
Both are exact; of equal scores the earlier beam comes first, then the earlier place in its list.
Source: early sorting termination of xGR (arXiv 2512.11529); the threshold form is ours.
Legend: W beams, K sorted log-probabilities of a beam, N chosen.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """The best candidates, best first, and how many were looked at.

    Shapes: ``scores_N`` float64, ``beams_N``, ``places_N`` (place in the beam's list) int64.
    """

    scores_N: Tensor
    beams_N: Tensor
    places_N: Tensor
    visited: int


def best_by_heap(before_W: Tensor, sorted_WK: Tensor, width: int) -> Chosen:
    """Keep a heap of the best ``width``; a list ends at its first entry that cannot enter, everything ends at the first list whose head cannot.

    Raises: ValueError for a width below 1.
    """
    _check(before_W, sorted_WK, width)
    before, lists = before_W.tolist(), sorted_WK.double().tolist()
    heads = (before_W + sorted_WK[:, 0].double()).tolist() if sorted_WK.shape[1] else []
    heap: list[tuple[float, int, int]] = []  # places are negative, so that of equal scores the later one is the least
    visited = 0
    for beam in sorted(range(len(heads)), key=lambda beam: -heads[beam]):
        if len(heap) == width and heads[beam] < heap[0][0]:
            visited += 1
            break
        for place, value in enumerate(lists[beam]):
            visited += 1
            entry = (before[beam] + value, -beam, -place)
            if len(heap) < width:
                heappush(heap, entry)
            elif entry > heap[0]:
                heapreplace(heap, entry)
            else:
                break
    chosen = sorted(heap, reverse=True)
    return Chosen(
        torch.tensor([score for score, _, _ in chosen], dtype=torch.float64),
        torch.tensor([-beam for _, beam, _ in chosen], dtype=torch.int64),
        torch.tensor([-place for _, _, place in chosen], dtype=torch.int64),
        visited,
    )


def best_by_threshold(before_W: Tensor, sorted_WK: Tensor, width: int, probe: int = 8) -> Chosen:
    """The ``width``-th best of every list's first ``probe`` entries is a lower bound of the ``width``-th best of all; what reaches it is a prefix of each list.

    Raises: ValueError for a width or a probe below 1.
    """
    _check(before_W, sorted_WK, width)
    if probe < 1:
        raise ValueError(f"probe is {probe}: look at at least 1 entry of each list")
    beams, length = sorted_WK.shape
    probe = min(probe, length)
    probed = (before_W[:, None] + sorted_WK[:, :probe].double()).flatten()
    if len(probed) >= width:
        threshold = torch.topk(probed, width).values[-1]
        # In the lists' own scale, and a little lower, so that rounding loses nothing.
        lowest_W = (threshold - before_W) - 1e-6 * (threshold.abs() + before_W.abs())
        reach_W = torch.searchsorted(-sorted_WK.double(), -lowest_W[:, None], right=True).squeeze(1)
    else:
        reach_W = torch.full((beams,), length, dtype=torch.int64, device=sorted_WK.device)
    beams_C = torch.repeat_interleave(torch.arange(beams, device=sorted_WK.device), reach_W)
    places_C = torch.arange(len(beams_C), device=sorted_WK.device) - (reach_W.cumsum(0) - reach_W)[beams_C]
    scores_C = before_W[beams_C] + sorted_WK[beams_C, places_C].double()
    scores_C, order = torch.sort(scores_C, descending=True, stable=True)
    order = order[:width]
    visited = int(reach_W.clamp(min=probe).sum())
    return Chosen(scores_C[:width], beams_C[order], places_C[order], visited)


def _check(before_W: Tensor, sorted_WK: Tensor, width: int) -> None:
    if width < 1:
        raise ValueError(f"width is {width}: give at least 1")
    if before_W.shape != sorted_WK.shape[:1]:
        raise ValueError(f"scores of {tuple(before_W.shape)} beams and lists {tuple(sorted_WK.shape)}: give one sorted list per beam")
