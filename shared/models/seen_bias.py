"""A learned correction of the logits by what the history already holds.

Attention alone is slow to learn that an item does not come twice, or how often a group of items does: the rule is about every code of every history at once.
Here each code's logit gets a learned factor times log(1 + n), n being the history's items that agree with the code and with the prefix before it. Data
without repeats drives the last level's factors down, data with repeats up; at the first levels a factor says how much a taste persists.
Legend: T places, B sequences, L levels, K codes of a level, I items of the histories, P pairs, R requests, B live beams of all requests while beams grow,
S targets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from semantide.shared.models.vocabulary import Vocabulary

_GAIN = 8.0  # so that the factors move within the steps of an ordinary learning rate


class SeenBias(nn.Module):
    """One factor per token; they begin at zero, which changes nothing."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocabulary.size))
        self._vocabulary = vocabulary

    def forward(self, counts: Tensor, level: int) -> Tensor:
        """What to add to the logits of a level.

        Shapes: [..., K] -> [..., K].
        """
        return counts.log1p() * (_GAIN * self.weight[self._vocabulary.row(level)])


def earlier_counts(codes_TL: Tensor, offsets_B1: Tensor, level: int, num_codes: int) -> Tensor:
    """For every item of packed sequences, how many earlier ones of its sequence share its codes before ``level`` and have code k there.

    Shapes: [T, L] -> [T, K], float32.
    """
    lengths_B = offsets_B1.diff()
    keys_T = torch.arange(len(lengths_B), device=codes_TL.device).repeat_interleave(lengths_B)
    for before in range(level):
        # Ranks instead of products keep the key small whatever the number of levels and codes.
        keys_T = torch.unique(torch.stack([keys_T, codes_TL[:, before]]), dim=1, return_inverse=True)[1]
    later_P, earlier_P = _pairs(keys_T)
    counts_TK = torch.zeros(len(keys_T), num_codes, device=codes_TL.device)
    counts_TK.view(-1).index_add_(0, later_P * num_codes + codes_TL[earlier_P, level], torch.ones(len(later_P), device=codes_TL.device))
    return counts_TK


def shared_counts(codes_IL: Tensor, offsets_R1: Tensor, targets_SL: Tensor, histories_S: Tensor, items_S: Tensor, level: int, num_codes: int) -> Tensor:
    """For every target, how many of the first ``items_S`` items of its history share its codes before ``level`` and have code k there.

    Shapes: histories [I, L] packed by ``offsets_R1``, targets [S, L], ``histories_S`` the history of each -> [S, K], float32.
    """
    device, many = codes_IL.device, len(codes_IL)
    history_I = torch.arange(len(offsets_R1) - 1, device=device).repeat_interleave(offsets_R1.diff())
    keys = torch.cat([history_I, histories_S])
    for before in range(level):
        keys = torch.unique(torch.stack([keys, torch.cat([codes_IL[:, before], targets_SL[:, before]])]), dim=1, return_inverse=True)[1]
    order_I = torch.argsort(keys[:many], stable=True)
    sorted_I = keys[:many][order_I]
    first_S = torch.searchsorted(sorted_I, keys[many:])
    many_S = torch.searchsorted(sorted_I, keys[many:], right=True) - first_S
    target_P = torch.arange(len(many_S), device=device).repeat_interleave(many_S)
    item_P = order_I[torch.arange(len(target_P), device=device) + (first_S - many_S.cumsum(0) + many_S)[target_P]]
    seen_P = item_P - offsets_R1[histories_S[target_P]] < items_S[target_P]
    counts = torch.zeros(len(targets_SL) * num_codes, device=device)
    places_P = target_P * num_codes + codes_IL[item_P, level]
    return counts.index_add_(0, places_P, seen_P.to(counts.dtype)).view(-1, num_codes)


def _pairs(keys_T: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of places with one key: the later place, and the earlier one."""
    order_T = torch.argsort(keys_T, stable=True)
    sizes = torch.unique_consecutive(keys_T[order_T], return_counts=True)[1]
    starts_T = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places_T = torch.arange(len(keys_T), device=keys_T.device)
    ranks_T = places_T - starts_T
    later_P = places_T.repeat_interleave(ranks_T)
    first_T = ranks_T.cumsum(0) - ranks_T
    earlier_P = torch.arange(len(later_P), device=keys_T.device) - (first_T - starts_T).repeat_interleave(ranks_T)
    return order_T[later_P], order_T[earlier_P]


class SeenItems:
    """The items of a batch of prompts, for counting while beams grow; ``prefix_B`` numbers the prefix of every live beam."""

    def __init__(self, tokens_T: Tensor, offsets_R1: Tensor, vocabulary: Vocabulary, tokens_per_item: int = 0) -> None:
        """``tokens_per_item``: numbers of an item in the prompts, of which its codes are the first; 0: its codes alone."""
        levels, lengths_R = vocabulary.levels, offsets_R1.diff()
        stride = tokens_per_item or levels
        places_T = torch.arange(len(tokens_T), device=tokens_T.device) - offsets_R1[:-1].repeat_interleave(lengths_R)
        whole_R = (lengths_R - 1) // stride
        inside_T = (places_T >= 1) & (places_T <= stride * whole_R.repeat_interleave(lengths_R))
        firsts_L = torch.tensor([vocabulary.first(level) for level in range(levels)], device=tokens_T.device)
        codes_IL = tokens_T[inside_T].view(-1, stride)[:, :levels] - firsts_L
        # A prompt may hold tokens that are no item's, for example those of another model's text.
        valid_I = ((codes_IL >= 0) & (codes_IL < torch.tensor(vocabulary.level_sizes, device=tokens_T.device))).all(1)
        self._codes_IL = codes_IL[valid_I]
        self._keys_I = torch.arange(len(lengths_R), device=tokens_T.device).repeat_interleave(whole_R)[valid_I]
        self._sizes = vocabulary.level_sizes
        self.prefix_B = torch.arange(len(lengths_R), device=tokens_T.device)

    def extend(self, level: int, parents_B: Tensor, codes_B: Tensor) -> None:
        """Let every new beam follow a live one and take a code of ``level``."""
        self.prefix_B = self.prefix_B[parents_B] * self._sizes[level] + codes_B
        self._keys_I = self._keys_I * self._sizes[level] + self._codes_IL[:, level]

    def keep(self, beams_B: Tensor) -> None:
        """Go on with these live beams only."""
        self.prefix_B = self.prefix_B[beams_B]

    def counts(self, level: int) -> Tensor:
        """How many items share a beam's prefix and have code k at ``level``: [B, K], float32."""
        order_I = torch.argsort(self._keys_I)
        sorted_I = self._keys_I[order_I]
        first_B = torch.searchsorted(sorted_I, self.prefix_B)
        many_B = torch.searchsorted(sorted_I, self.prefix_B, right=True) - first_B
        rows_P = torch.arange(len(self.prefix_B), device=sorted_I.device).repeat_interleave(many_B)
        places_P = torch.arange(len(rows_P), device=sorted_I.device) + (first_B - many_B.cumsum(0) + many_B)[rows_P]
        num_codes = self._sizes[level]
        counts = torch.zeros(len(self.prefix_B) * num_codes, device=sorted_I.device)
        counts.index_add_(0, rows_P * num_codes + self._codes_IL[order_I[places_P], level], torch.ones(len(rows_P), device=sorted_I.device))
        return counts.view(-1, num_codes)
