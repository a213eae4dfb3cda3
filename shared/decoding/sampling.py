"""Groups of items drawn from a generator's own distribution over the catalog, and what it decodes without the catalog.

The policy is the generator under the trie: at each level the codes that lead to an allowed item, with logits divided by a temperature and normalised among them. A
group is drawn from it with replacement, or without (Gumbel top-k over the trie: what comes out is an exact ordered sample without replacement, found with as many
beams as items), and some places of the group may go to the best beams. Whatever is drawn is an item of the catalog, and its log-probability is exact.
Source: Kool et al., Stochastic Beams and Where to Find Them (arXiv 1903.06059).
Legend: R requests, W slots of a request, G items of a group, N rows of any kind, L levels, K codes of a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semantide.shared.decoding.protocol import StepModel
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.errors import PermanentError


@dataclass(frozen=True)
class Sampling:
    """How a group is drawn. Every number that decides what comes out is here."""

    group: int = 16
    """Items of a group."""
    beams: int = 0
    """How many of them are the best beams; the others are drawn."""
    temperature: float = 1.0
    """Divides the logits; beams are searched by the same policy."""
    distinct: bool = True
    """Whether items are drawn without replacement; no item then comes twice in a group, beams included."""

    def __post_init__(self) -> None:
        if not 1 <= self.group <= 4096 or not 0 <= self.beams <= self.group:
            raise ValueError(f"group is {self.group} and beams {self.beams}: give a group from 1 to 4096, and no more beams than that")
        if not 1e-3 <= self.temperature <= 100:
            raise ValueError(f"temperature is {self.temperature}: give a number from 0.001 to 100")


@dataclass(frozen=True)
class Groups:
    """What was drawn, beams first, then in the order of the draw.

    Shapes: ``rows_RG`` catalog rows, -1 where fewer items are allowed than asked for; ``log_probs_RGL`` of each code under the policy.
    """

    rows_RG: Tensor
    log_probs_RGL: Tensor


class Policy:
    """The allowed continuations of trie nodes, and the policy's probabilities over them."""

    def __init__(self, trie: SearchTrie, temperature: float = 1.0, node_filter: ItemFilter | None = None) -> None:
        self.trie, self.temperature, self._filter = trie, temperature, node_filter

    def children(self, level: int, nodes_N: Tensor, owners_N: Tensor, num_codes: int) -> Tensor:
        """For each node of depth ``level`` and each code the child that it leads to, -1 where nothing below is allowed; ``owners_N`` says whose request it is.

        Shapes: -> int64 [N, K].
        """
        trie, device = self.trie, nodes_N.device
        first_N = trie.offsets[level][nodes_N]
        many_N = trie.offsets[level][nodes_N + 1] - first_N
        rows_C = torch.arange(len(nodes_N), device=device).repeat_interleave(many_N)
        children_C = torch.arange(len(rows_C), device=device) + (first_N - many_N.cumsum(0) + many_N)[rows_C]
        table_NK = torch.full((len(nodes_N), num_codes), -1, dtype=torch.int64, device=device)
        codes_C = trie.tokens[level][children_C]
        if len(codes_C) and trie.num_codes[level] > num_codes:
            raise ValueError(
                f"the model has {num_codes} codes at level {level} and the catalog uses {trie.num_codes[level]}: use the catalog the model was trained for"
            )
        if self._filter is not None:
            alive_C = self._allowed(level + 1, children_C, owners_N[rows_C]) > 0
            rows_C, codes_C, children_C = rows_C[alive_C], codes_C[alive_C], children_C[alive_C]
        table_NK[rows_C, codes_C] = children_C
        return table_NK

    def _allowed(self, depth: int, nodes_C: Tensor, owners_C: Tensor) -> Tensor:
        """How many items below each node its request allows."""
        rules = self._filter
        assert rules is not None
        bounds = self.trie.leaf_bounds[depth]
        first_C, end_C = bounds[nodes_C], bounds[nodes_C + 1]
        masks_C = rules.mask_of_R[owners_C]
        counts_C = (rules.counts_BN1[masks_C, end_C] - rules.counts_BN1[masks_C, first_C]).long()
        if len(rules.excluded_E):
            base_C = owners_C * (len(self.trie) + 1)
            counts_C = counts_C - (torch.searchsorted(rules.excluded_E, base_C + end_C) - torch.searchsorted(rules.excluded_E, base_C + first_C))
        return counts_C

    def log_probs(self, logits_NK: Tensor, children_NK: Tensor) -> Tensor:
        """Log-probabilities of the allowed codes, -inf for all others; where nothing is allowed, -inf everywhere."""
        masked_NK = (logits_NK.float() / self.temperature).masked_fill(children_NK < 0, -torch.inf)
        total_N1 = masked_NK.logsumexp(-1, keepdim=True)
        return masked_NK - total_N1.masked_fill(total_N1 == -torch.inf, 0.0)


@dataclass
class _Slots:
    """Paths that grow together: node, score (log-probability), what orders them, and whether there is anything there."""

    nodes_RW: Tensor
    scores_RW: Tensor
    order_RW: Tensor
    live_RW: Tensor
    steps_RWL: Tensor


@torch.inference_mode()
def sample_groups(
    model: StepModel,
    trie: SearchTrie,
    tokens_T: Tensor,
    offsets_R1: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    node_filter: ItemFilter | None = None,
) -> Groups:
    """Draw a group for each of R prompts; the same for the same ``generator``, which is one of the CPU's.

    Raises: ValueError for a catalog of another model; PermanentError where the model's logits are not numbers.
    """
    policy, requests, device = Policy(trie, sampling.temperature, node_filter), len(offsets_R1) - 1, trie.device
    searched = min(sampling.beams, len(trie))
    # Of what is drawn the beams may hold up to ``beams`` already.
    drawn = min(sampling.group, len(trie)) if sampling.distinct else sampling.group - sampling.beams
    if sampling.beams == sampling.group:
        drawn = 0
    owners_R1 = torch.arange(requests, device=device)[:, None]
    parts = [_Slots(
        torch.zeros(requests, 1, dtype=torch.int64, device=device),
        torch.zeros(requests, 1, device=device), torch.zeros(requests, 1, device=device),
        torch.ones(requests, 1, dtype=torch.bool, device=device), torch.zeros(requests, 1, 0, device=device),
    ) for _ in range(2)]  # fmt: skip
    logits, state = model.begin(tokens_T, offsets_R1)
    logits_RWK = logits[:, None].expand(-1, 2, -1)
    for level in range(trie.levels):
        if not bool(torch.isfinite(logits_RWK).all()):
            raise PermanentError(f"the model's logits of level {level} are not finite numbers: its weights are damaged, go back to an earlier model")
        parents, codes, begin = [], [], 0
        for place, (slots, width) in enumerate(zip(parts, (searched, drawn), strict=True)):
            many = slots.nodes_RW.shape[1]
            own_RWK = logits_RWK[:, begin : begin + many]
            children_RWK = policy.children(level, slots.nodes_RW.flatten(), owners_R1.expand(-1, many).flatten(), own_RWK.shape[2]).view(own_RWK.shape)
            log_probs_RWK = policy.log_probs(own_RWK, children_RWK).masked_fill(~slots.live_RW[:, :, None], -torch.inf)
            parts[place], parents_RW, codes_RW = _extended(slots, log_probs_RWK, children_RWK, width, place == 1, sampling.distinct, generator)
            parents.append(parents_RW + begin if level else torch.zeros_like(parents_RW))
            codes.append(codes_RW)
            begin += many
        if level + 1 < trie.levels:
            answer = model.step(state, level + 1, torch.cat(parents, 1), torch.cat(codes, 1))
            logits_RWK = answer if answer.dim() == 3 else answer.view(requests, searched + drawn, -1)
    return _joined(parts, trie, sampling, requests)


def _extended(
    slots: _Slots, log_probs_RWK: Tensor, children_RWK: Tensor, width: int, drawn: bool, distinct: bool, generator: torch.Generator
) -> tuple[_Slots, Tensor, Tensor]:
    """The slots after one more code; their parents and codes, those of slot 0 where there is nothing."""
    requests, many, num_codes = log_probs_RWK.shape
    device = log_probs_RWK.device
    if not width:
        none = torch.zeros(requests, 0, dtype=torch.int64, device=device)
        steps = torch.zeros(requests, 0, slots.steps_RWL.shape[2] + 1, device=device)
        return _Slots(none, none.float(), none.float(), none.bool(), steps), none, none
    scores_RWK = slots.scores_RW[:, :, None] + log_probs_RWK
    if drawn and not distinct:
        # Each slot is a walk of its own; the first step has one slot to walk from. What cannot be taken adds nothing to the sum, so no draw falls on it.
        sums_RWK = log_probs_RWK.expand(-1, width, -1).double().exp().cumsum(2)
        drawn_RW1 = torch.rand(requests, width, 1, generator=generator, dtype=torch.float64).to(device) * sums_RWK[:, :, -1:]
        codes_RW = torch.searchsorted(sums_RWK, drawn_RW1, right=True).clamp_max(num_codes - 1).squeeze(2)
        parents_RW = torch.arange(width, device=device).expand(requests, -1) if many == width else torch.zeros_like(codes_RW)
        chosen_RW = log_probs_RWK.expand(-1, width, -1).gather(2, codes_RW[:, :, None]).squeeze(2)
        flat_RW = parents_RW * num_codes + codes_RW
    else:
        order_RWK = scores_RWK
        if drawn:
            order_RWK = _conditioned(scores_RWK + _gumbel(tuple(scores_RWK.shape), generator, device), slots.order_RW)
        kept = min(width, many * num_codes)
        chosen_RW, flat_RW = order_RWK.flatten(1).topk(kept, dim=1)
        if kept < width:
            fill = width - kept
            chosen_RW = torch.cat([chosen_RW, chosen_RW.new_full((requests, fill), -torch.inf)], 1)
            flat_RW = torch.cat([flat_RW, flat_RW[:, :1].expand(-1, fill)], 1)
    live_RW = chosen_RW > -torch.inf
    flat_RW = torch.where(live_RW, flat_RW, flat_RW[:, :1])
    parents_RW, codes_RW = flat_RW // num_codes, flat_RW % num_codes

    def of(values_RWK: Tensor) -> Tensor:
        return values_RWK.flatten(1).gather(1, flat_RW)

    steps_RWL = slots.steps_RWL.gather(1, parents_RW[:, :, None].expand(-1, -1, slots.steps_RWL.shape[2]))
    grown = _Slots(of(children_RWK).clamp_min(0), of(scores_RWK), chosen_RW, live_RW, torch.cat([steps_RWL, of(log_probs_RWK)[:, :, None]], 2))
    return grown, parents_RW, codes_RW


def _gumbel(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    # Drawn on the CPU: one seed gives one group on every device.
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp_(1e-300, 1 - 1e-16)
    return uniform.log_().neg_().log_().neg_().float().to(device)


def _conditioned(perturbed_RWK: Tensor, parent_RW: Tensor) -> Tensor:
    """Perturbed scores of children, made such that the best child of each parent has the parent's own perturbed score."""
    best_RW1 = perturbed_RWK.amax(2, keepdim=True)
    parent_RW1 = parent_RW[:, :, None]
    shift = parent_RW1 - perturbed_RWK + torch.log1p(-torch.exp(perturbed_RWK - best_RW1))
    conditioned = parent_RW1 - shift.clamp_min(0) - torch.log1p(torch.exp(-shift.abs()))
    dead = (perturbed_RWK == -torch.inf) | (parent_RW1 == -torch.inf)
    return conditioned.masked_fill(dead, -torch.inf)


def _joined(parts: list[_Slots], trie: SearchTrie, sampling: Sampling, requests: int) -> Groups:
    """One group of both parts; what was drawn and is a beam already makes room for what was drawn after it."""
    nodes_RW, live_RW = torch.cat([part.nodes_RW for part in parts], 1), torch.cat([part.live_RW for part in parts], 1)
    steps_RWL = torch.cat([part.steps_RWL for part in parts], 1)
    width, searched = nodes_RW.shape[1], parts[0].nodes_RW.shape[1]
    places_W = torch.arange(width, device=nodes_RW.device)
    if sampling.distinct and searched:
        known_RW = (nodes_RW[:, :, None] == nodes_RW[:, None, :searched]) & live_RW[:, None, :searched]
        live_RW = live_RW & ~(known_RW.any(2) & (places_W >= searched))
    order_RW = torch.argsort(torch.where(live_RW, places_W, width), dim=1, stable=True)[:, : sampling.group]
    if order_RW.shape[1] < sampling.group:
        order_RW = torch.cat([order_RW, order_RW[:, -1:].expand(-1, sampling.group - order_RW.shape[1])], 1)
    kept_RG = live_RW.gather(1, order_RW)
    kept_RG = kept_RG & (torch.arange(sampling.group, device=kept_RG.device) < width)
    leaves_RG = nodes_RW.gather(1, order_RW)
    log_probs_RGL = steps_RWL.gather(1, order_RW[:, :, None].expand(-1, -1, trie.levels)).masked_fill(~kept_RG[:, :, None], 0.0)
    return Groups(trie.leaf_items[leaves_RG].masked_fill(~kept_RG, -1), log_probs_RGL)


@torch.inference_mode()
def free_beams(model: StepModel, level_sizes: tuple[int, ...], tokens_T: Tensor, offsets_R1: Tensor, width: int) -> Tensor:
    """The codes of the best beams that a model finds without a catalog: [R, W, L], best first."""
    logits, state = model.begin(tokens_T, offsets_R1)
    requests = len(offsets_R1) - 1
    scores_RW = torch.zeros(requests, 1, device=logits.device)
    codes_RWL = torch.zeros(requests, 1, 0, dtype=torch.int64, device=logits.device)
    logits_RWK = logits[:, None]
    for level, num_codes in enumerate(level_sizes):
        scores_RWK = scores_RW[:, :, None] + logits_RWK.float().log_softmax(-1)
        scores_RW, flat_RW = scores_RWK.flatten(1).topk(min(width, scores_RWK[0].numel()), dim=1)
        parents_RW, new_RW = flat_RW // num_codes, flat_RW % num_codes
        codes_RWL = torch.cat([codes_RWL.gather(1, parents_RW[:, :, None].expand(-1, -1, level)), new_RW[:, :, None]], 2)
        if level + 1 < len(level_sizes):
            answer = model.step(state, level + 1, parents_RW, new_RW)
            logits_RWK = answer if answer.dim() == 3 else answer.view(requests, flat_RW.shape[1], -1)
    return codes_RWL


def spelled_rows(trie: SearchTrie, codes: Tensor) -> Tensor:
    """The catalog row that codes spell, -1 where they spell none.

    Shapes: [..., L] -> [...].
    """
    flat_NL = codes.reshape(-1, trie.levels)
    nodes_N = torch.zeros(len(flat_NL), dtype=torch.int64, device=flat_NL.device)
    for level in range(trie.levels):
        # Children lie in the order of their codes, so a node and a code make one key that ascends over the whole level.
        parents_M = torch.repeat_interleave(torch.arange(len(trie.offsets[level]) - 1, device=flat_NL.device), trie.offsets[level].diff())
        span = max(trie.num_codes[level], int(flat_NL[:, level].max()) + 1 if len(flat_NL) else 1)
        keys_M, wanted_N = parents_M * span + trie.tokens[level], nodes_N.clamp_min(0) * span + flat_NL[:, level]
        found_N = torch.searchsorted(keys_M, wanted_N).clamp_max(len(keys_M) - 1)
        nodes_N = torch.where((nodes_N >= 0) & (keys_M[found_N] == wanted_N), found_N, -1)
    rows_N = torch.where(nodes_N >= 0, trie.leaf_items[nodes_N.clamp_min(0)], -1)
    return rows_N.view(codes.shape[:-1])
