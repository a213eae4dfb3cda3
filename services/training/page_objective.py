"""What training by pages minimises: the codes of what was taken, given the history before its page; exposed items as weak positives or as a contrast.

With ``parallel`` or ``point`` targets every item is predicted from the history alone, as in inference, so a step minimises what point-wise steps over the same pairs of
history and item would, at one reading of the history. With ``sequential`` ones an item sees those before it on its page.
Legend: T items of the histories, B histories, S targets, C blocks, L levels, N items, F side features, D hidden size, K parts of the loss, G pages.
Source: GenRec (arXiv 2604.14878), page-wise next-token prediction; parallel targets, intensity weights and the contrast are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.objective import LossSum, TableRows, wide
from semantide.services.training.page_targets import PageTargets
from semantide.services.training.recipes import TrainConfig
from semantide.shared.models.generator import Generator
from semantide.shared.models.targets import TargetBlocks, target_logits


class PageWise:
    """Cross entropy of each code of each target, weighted, over the number of targets; and the contrast with what was exposed beside the positives, over their number."""

    def __init__(self, model: Generator, item_tokens_NL: Tensor, config: TrainConfig, side: Callable[[HistoryBatch], Tensor] | None = None) -> None:
        """``side`` gives the side features [T, F] of the histories' items, where the model's prompts have them."""
        levels = model.vocabulary.levels
        if config.level_weights and len(config.level_weights) != levels:
            raise ValueError(f"level_weights has {len(config.level_weights)} numbers for {levels} levels: give one per level or none")
        self.model, self.tokens_per_item = model, levels
        self.tables: Mapping[str, Any] = {}
        self._item_tokens_NL, self._smoothing, self._side = item_tokens_NL, config.label_smoothing, side
        self._contrasted, self._contrast_weight = config.pages.exposed == "contrast", config.pages.exposed_weight
        self._weights_L = torch.tensor(config.level_weights or (1.0,) * levels, device=item_tokens_NL.device)

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Nothing: the codes' embeddings are the model's own."""
        return {}

    def counts(self, batch: HistoryBatch) -> Tensor:
        """The targets of every level, weak positives among them: however few positives share their batch, each counts by its weight. Then the positives, of the contrast."""
        exposed_S = _targets(batch).exposed_S
        positives = int((~exposed_S).sum())
        return torch.tensor(
            [positives if self._contrasted else len(exposed_S)] * self.model.vocabulary.levels + [positives] * self._contrasted,
            device=batch.items.values.device,
        )

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows] | None = None) -> LossSum:
        """The loss of each level [L], then the contrast's."""
        targets, model = _targets(batch), self.model
        vocabulary = model.vocabulary
        tokens_SL = self._item_tokens_NL[targets.items_S]
        prompt_T, prompt_offsets_B1 = self.prompts(batch)
        blocks = TargetBlocks(tokens_SL.flatten(), targets.offsets_C1 * vocabulary.levels, targets.histories_C, targets.seen_C)
        losses, likelihoods_S = [], torch.zeros(len(tokens_SL), device=tokens_SL.device)
        for level, logits_SK in enumerate(target_logits(model, prompt_T, prompt_offsets_B1, blocks)):
            logits_SK = wide(logits_SK)
            codes_S = tokens_SL[:, level] - vocabulary.first(level)
            each_S = F.cross_entropy(logits_SK, codes_S, label_smoothing=self._smoothing, reduction="none")
            losses.append((each_S * targets.weights_S).sum())
            if self._contrasted:
                likelihoods_S = likelihoods_S - F.cross_entropy(logits_SK, codes_S, reduction="none")
        if not self._contrasted:
            return LossSum(torch.stack(losses), self.counts(batch), self._weights_L)
        losses.append(page_contrast(likelihoods_S, targets))
        return LossSum(torch.stack(losses), self.counts(batch), torch.cat([self._weights_L, self._weights_L.new_tensor([self._contrast_weight])]))

    def prompts(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Begin token and items of each history, with their side features."""
        items = batch.items
        numbers_TX = self._item_tokens_NL[items.values]
        if self._side is not None:
            numbers_TX = torch.cat([numbers_TX, self._side(batch)], 1)
        offsets_B1 = items.offsets_B1 * numbers_TX.shape[1] + torch.arange(len(items) + 1, device=items.values.device)
        tokens = torch.full((int(offsets_B1[-1]),), self.model.vocabulary.begin, dtype=torch.int64, device=items.values.device)
        inside = torch.ones_like(tokens, dtype=torch.bool)
        inside[offsets_B1[:-1]] = False
        tokens[inside] = numbers_TX.flatten()
        return tokens, offsets_B1


def page_contrast(likelihoods_S: Tensor, targets: PageTargets) -> Tensor:
    """Sum over positives of -log of their probability among themselves and what was exposed on their page.

    Shapes: ``likelihoods_S`` logarithms of each item's probability; blocks are single items.
    """
    exposed_S = targets.exposed_S
    pages, page_S = torch.unique(targets.pages_C, return_inverse=True)
    others_G = _logsumexp(likelihoods_S[exposed_S], page_S[exposed_S], len(pages))
    positives = likelihoods_S[~exposed_S]
    against = others_G[page_S[~exposed_S]]
    # A page with nothing exposed has nothing to say; its infinity must not reach a gradient.
    real = against > -torch.inf
    return F.softplus(against[real] - positives[real]).sum()


def _logsumexp(values_S: Tensor, group_S: Tensor, num_groups: int) -> Tensor:
    """Logarithm of each group's sum of exponentials, -inf where it is empty."""
    top = values_S.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_S, values_S.detach(), "amax")
    sums = values_S.new_zeros(num_groups).index_add(0, group_S, (values_S - top[group_S]).exp())
    filled = sums > 0
    return torch.where(filled, torch.where(filled, sums, torch.ones_like(sums)).log() + torch.where(filled, top, torch.zeros_like(top)), -torch.inf)


def _targets(batch: HistoryBatch) -> PageTargets:
    assert batch.targets is not None, "batches of a PageSampler have targets"
    return batch.targets
