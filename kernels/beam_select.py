"""Which children of the beams go on: the step between a model's logits and its next step.

Only codes that the item trie has below a beam's node are candidates, and only nodes with an allowed item below. Beams stand in node order, which is the
order of their codes, so a request's candidates do too: of equal scores the smaller node is the one with the smaller codes.

The C++ version looks at the beams with the highest bounds first. Once W + 1 candidates of a request are known, the worst of them is a lower bound of the
(W + 1)-th best: beams whose bound lies below it are passed over whole, children below it are passed over sixteen at a time, and the filter is asked for the
rest alone. No mask is built and nothing has to be undone. The result is exact, ties included, and so is the best score that was dropped.
Legend: R requests, W beams, K codes of the level, M nodes of the beams' depth, C nodes of the depth below, N items, B distinct masks, E excluded leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.dispatch import kernel

LOWEST = -1e300  # of a valid candidate, even of a code of probability zero; below it lies only padding


class AllowedLeaves(NamedTuple):
    """Which leaves each request may reach, as counts: a node is alive when its range of leaves holds an allowed one.

    Shapes: ``node_bounds_M1`` [M + 1] and ``child_bounds_C1`` [C + 1] first leaf below each node, ``counts_BN1`` int32 [B, N + 1] allowed leaves before
    each, ``excluded_E`` sorted ``owner * (N + 1) + leaf``; ``owners_R`` says which of the requests that the filter was made for each row is, ``mask_of``
    which mask an owner uses.
    """

    node_bounds_M1: Tensor
    child_bounds_C1: Tensor
    counts_BN1: Tensor
    mask_of: Tensor
    excluded_E: Tensor
    owners_R: Tensor

    def alive(self, bounds: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """Whether each request (a row of R) may return an item below each node, whose leaves ``bounds`` gives."""
        owners, first, last = self.owners_R[rows], bounds[nodes], bounds[nodes + 1]
        masks = self.mask_of[owners]
        count = self.counts_BN1[masks, last] - self.counts_BN1[masks, first]
        if len(self.excluded_E):
            base = owners * self.counts_BN1.shape[1]
            count = count - torch.searchsorted(self.excluded_E, base + last) + torch.searchsorted(self.excluded_E, base + first)
        return count > 0


class Selection(NamedTuple):
    """The chosen children of each request in node order; W is the widest request's number.

    ``children`` counts what the trie has below the beams, ``visited`` the candidates whose score was compared with others'.

    Shapes: ``parents_RW``, ``codes_RW``, ``nodes_RW`` int64 (0 past the end), ``scores_RW`` float64 (-inf past the end), ``steps_RW`` float64;
    ``kept_R``, ``dead_ends_R`` int64 (beams with nothing allowed below), ``dropped_R`` float64 (best score that was not chosen).
    """

    parents_RW: Tensor
    codes_RW: Tensor
    nodes_RW: Tensor
    scores_RW: Tensor
    steps_RW: Tensor
    kept_R: Tensor
    dead_ends_R: Tensor
    dropped_R: Tensor
    children: int
    visited: int


@kernel
def beam_select(
    logits_RWK: Tensor,
    nodes_RW: Tensor,
    live_R: Tensor,
    scores_RW: Tensor,
    widths_R: Tensor,
    offsets_M1: Tensor,
    codes_C: Tensor,
    leaves: AllowedLeaves | None = None,
    among_children: bool = False,
) -> Selection:
    """The best ``widths_R[r]`` children of the first ``live_R[r]`` beams of each request, by the sum of the beam's score and the code's log-probability.

    Log-probabilities are over the full row of codes, or ``among_children`` over those that the trie has below the beam, filtered or not.

    Raises: FloatingPointError where a live beam's logits are not numbers.
    """
    (requests, width, _), device = logits_RWK.shape, logits_RWK.device
    logits_NK = logits_RWK.flatten(0, 1)
    slots_B = (torch.arange(width, device=device) < live_R[:, None]).flatten().nonzero().squeeze(1)
    nodes_B = nodes_RW.flatten()[slots_B]
    first_B = offsets_M1[nodes_B]
    counts_B = offsets_M1[nodes_B + 1] - first_B
    beam_C = torch.repeat_interleave(torch.arange(len(slots_B), device=device), counts_B)
    children_C = torch.arange(len(beam_C), device=device) + (first_B - (counts_B.cumsum(0) - counts_B))[beam_C]
    children = len(children_C)
    if among_children:
        norms_B = _segment_logsumexp(logits_NK[slots_B[beam_C], codes_C[children_C]].double(), beam_C, len(slots_B))
    else:
        norms_B = torch.logsumexp(logits_NK[slots_B].float(), 1).double()
    if not bool(torch.isfinite(norms_B).all()):
        raise FloatingPointError("logits are not finite numbers")
    dead_ends_R = torch.zeros_like(live_R)
    if leaves is not None:
        alive_C = leaves.alive(leaves.child_bounds_C1, slots_B[beam_C] // width, children_C).nonzero().squeeze(1)
        children_C, beam_C = children_C[alive_C], beam_C[alive_C]
        ended_B = torch.bincount(beam_C, minlength=len(slots_B)) == 0
        dead_ends_R = torch.bincount(slots_B[ended_B] // width, minlength=requests)
    slots_C = slots_B[beam_C]
    requests_C = slots_C // width
    steps_C = (logits_NK[slots_C, codes_C[children_C]].double() - norms_B[beam_C]).clamp_(min=LOWEST)
    scores_C = (scores_RW.flatten()[slots_C] + steps_C).clamp_(min=LOWEST)
    chosen_C, kept_R, dropped_R = _best(scores_C, requests_C, widths_R)
    beams = max(int(kept_R.max()), 1)
    owner = requests_C[chosen_C]
    place = owner * beams + torch.arange(len(chosen_C), device=device) - (kept_R.cumsum(0) - kept_R)[owner]

    def arrange(values: Tensor, fill: float) -> Tensor:
        table = torch.full((requests * beams,), fill, dtype=values.dtype, device=device)
        table[place] = values
        return table.view(requests, beams)

    return Selection(
        arrange(slots_C[chosen_C] % width, 0),
        arrange(codes_C[children_C[chosen_C]], 0),
        arrange(children_C[chosen_C], 0),
        arrange(scores_C[chosen_C], -torch.inf),
        arrange(steps_C[chosen_C], 0),
        kept_R,
        dead_ends_R,
        dropped_R,
        children,
        len(children_C),
    )


@beam_select.register("cpu")
def beam_select_native(
    logits_RWK: Tensor,
    nodes_RW: Tensor,
    live_R: Tensor,
    scores_RW: Tensor,
    widths_R: Tensor,
    offsets_M1: Tensor,
    codes_C: Tensor,
    leaves: AllowedLeaves | None = None,
    among_children: bool = False,
) -> Selection:
    """The same in C++, with bounds in place of a sort of everything; gradients take the torch way.

    Raises: ValueError when shapes or types do not fit, or a beam's node or a code below it does not exist.
    """
    library = native.library()
    if library is None or (torch.is_grad_enabled() and (logits_RWK.requires_grad or scores_RW.requires_grad)):
        return beam_select.reference(logits_RWK, nodes_RW, live_R, scores_RW, widths_R, offsets_M1, codes_C, leaves, among_children)
    requests, width, num_codes = logits_RWK.shape
    logits_RWK = logits_RWK.float().contiguous()
    nodes_RW, live_R, scores_RW, widths_R = (x.contiguous() for x in (nodes_RW, live_R, scores_RW, widths_R))
    _check(logits_RWK, nodes_RW, live_R, scores_RW, widths_R, offsets_M1, codes_C, leaves)
    room = max([1, *widths_R.tolist()])
    parents_RW, codes_RW, nodes_out_RW = (nodes_RW.new_empty(requests, room) for _ in range(3))
    scores_out_RW, steps_RW = (scores_RW.new_empty(requests, room) for _ in range(2))
    kept_R, dead_ends_R, children_R, visited_R = (live_R.new_empty(requests) for _ in range(4))
    dropped_R = scores_RW.new_empty(requests)
    filtering: tuple[int, ...] = (0,) * 8
    if leaves is not None:
        filtering = (
            *(x.data_ptr() for x in (leaves.node_bounds_M1, leaves.child_bounds_C1, leaves.counts_BN1)),
            leaves.counts_BN1.shape[1] - 1,
            *(x.data_ptr() for x in (leaves.mask_of, leaves.owners_R, leaves.excluded_E)),
            len(leaves.excluded_E),
        )
    tables = (logits_RWK, nodes_RW, live_R, scores_RW, widths_R, offsets_M1, codes_C)
    outputs = (parents_RW, codes_RW, nodes_out_RW, scores_out_RW, steps_RW, kept_R, dead_ends_R, dropped_R, children_R, visited_R)
    arguments = native.BEAM_SELECT.pack(
        *(requests, width, room, num_codes, len(offsets_M1) - 1, among_children), *(x.data_ptr() for x in tables), *filtering, *(x.data_ptr() for x in outputs)
    )
    failed = native.call(library, "semantide_beam_select", arguments)
    if failed == 1:
        raise FloatingPointError("logits are not finite numbers")
    if failed:
        raise ValueError(f"a beam's node is none of {len(offsets_M1) - 1}, or a code below it none of {num_codes}: take logits and trie of one level")
    beams = max([1, *kept_R.tolist()])
    if beams < room:
        parents_RW, codes_RW, nodes_out_RW, scores_out_RW, steps_RW = (x[:, :beams].contiguous() for x in outputs[:5])
    children, visited = sum(children_R.tolist()), sum(visited_R.tolist())
    return Selection(parents_RW, codes_RW, nodes_out_RW, scores_out_RW, steps_RW, kept_R, dead_ends_R, dropped_R, children, visited)


def _check(
    logits_RWK: Tensor,
    nodes_RW: Tensor,
    live_R: Tensor,
    scores_RW: Tensor,
    widths_R: Tensor,
    offsets_M1: Tensor,
    codes_C: Tensor,
    leaves: AllowedLeaves | None,
) -> None:
    """What C++ reads by address has to be there, in the type and order that it expects."""
    requests, width, _ = logits_RWK.shape
    whole: tuple[Tensor, ...] = (nodes_RW, live_R, widths_R, offsets_M1, codes_C)
    if leaves is not None:
        whole += (leaves.node_bounds_M1, leaves.child_bounds_C1, leaves.mask_of, leaves.excluded_E, leaves.owners_R)
        counts, sizes = leaves.counts_BN1, (len(leaves.node_bounds_M1), len(leaves.child_bounds_C1), len(leaves.owners_R))
        if counts.dtype != torch.int32 or not counts.is_contiguous() or sizes != (len(offsets_M1), len(codes_C) + 1, requests):
            raise ValueError("the allowed leaves are not those of this level: give int32 counts, bounds of its nodes and children, and an owner per request")
    if scores_RW.dtype != torch.float64 or any(x.dtype != torch.int64 or not x.is_contiguous() for x in whole):
        raise ValueError("give float64 scores, and contiguous int64 nodes, widths and tables")
    if not nodes_RW.shape == scores_RW.shape == (requests, width) or not live_R.shape == widths_R.shape == (requests,):
        raise ValueError(
            f"nodes {tuple(nodes_RW.shape)}, scores {tuple(scores_RW.shape)}, live {tuple(live_R.shape)}, widths {tuple(widths_R.shape)}: "
            f"give those of {requests} requests of {width} beams, as the logits are"
        )
    live, widths = live_R.tolist(), widths_R.tolist()
    if any(not 0 <= beams <= width for beams in live) or any(wanted < 0 for wanted in widths):
        raise ValueError(f"live {live[:5]}, widths {widths[:5]}: give at most {width} live beams per request, and no negative numbers")


def _best(scores_C: Tensor, requests_C: Tensor, widths_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which candidates stay (ascending), how many of each request, and the best score that goes: the highest stay, the first of equal ones."""
    requests, device = len(widths_R), scores_C.device
    counts_R = torch.bincount(requests_C, minlength=requests)
    kept_R = torch.minimum(counts_R, widths_R)
    dropped_R = torch.full((requests,), -torch.inf, dtype=torch.float64, device=device)
    if bool((kept_R == counts_R).all()):
        return torch.arange(len(scores_C), device=device), kept_R, dropped_R
    columns_C = torch.arange(len(scores_C), device=device) - (counts_R.cumsum(0) - counts_R)[requests_C]
    table_RP = torch.full((requests, int(counts_R.max())), -torch.inf, dtype=torch.float64, device=device)
    table_RP[requests_C, columns_C] = scores_C
    ranked = torch.topk(table_RP, int(kept_R.max()), dim=1).values
    threshold_R1 = ranked.gather(1, (kept_R[:, None] - 1).clamp_(min=0))
    above_RP = table_RP > threshold_R1
    equal_RP = (table_RP == threshold_R1) & (kept_R[:, None] > 0)
    room_R1 = kept_R[:, None] - above_RP.sum(1, keepdim=True)
    chosen_RP = above_RP | (equal_RP & (equal_RP.cumsum(1) <= room_R1))
    dropped_R = table_RP.masked_fill(chosen_RP, -torch.inf).amax(1)
    return chosen_RP[requests_C, columns_C].nonzero().squeeze(1), kept_R, dropped_R


def _segment_logsumexp(values_C: Tensor, segments_C: Tensor, count: int) -> Tensor:
    """Log of the sum of exponentials within each segment."""
    top = torch.full((count,), -torch.inf, dtype=values_C.dtype, device=values_C.device).scatter_reduce_(0, segments_C, values_C, "amax")
    return torch.zeros_like(top).index_add_(0, segments_C, torch.exp(values_C - top[segments_C])).log() + top
