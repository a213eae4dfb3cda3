"""What the retriever minimises: the next item of every place against sampled items, or against all of them where there are few.

The ids of a step are known before it: the batch's items and the negatives, which the table looks up while earlier steps still compute.
Legend: T items of a batch, B sequences, N items of the data set, S negatives that the batch shares, R negatives of each target, D hidden size,
U fetched rows.
Source: TurboGR (arXiv 2605.13433), negative sampling; Bengio and Senecal, Adaptive Importance Sampling (logQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.sampled_softmax import known_keys, sampled_softmax
from semantide.services.training.batches import HistoryBatch
from semantide.services.training.negatives import BatchNegatives
from semantide.services.training.objective import LossSum, TableRows, shifted
from semantide.services.training.recipes import TrainConfig
from semantide.shared.models.retriever import Retriever

ITEMS = "items"  # the table's name


class NextItemSampled:
    """Sampled softmax over item vectors of a table; ``negatives`` draws what its targets are compared with."""

    def __init__(self, model: Retriever, table: Any, counts_N: Tensor, config: TrainConfig, negatives: BatchNegatives | None = None) -> None:
        self.model, self.tokens_per_item = model, 1
        self.tables: Mapping[str, Any] = {ITEMS: table}
        self._num_items, self._config = len(counts_N), config
        self._negatives = negatives or BatchNegatives.of(config, counts_N.numpy())
        hard = config.negatives
        self._all = config.num_negatives >= self._num_items or not (config.num_negatives or hard.in_batch or hard.prefix or hard.beams)

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The items of the batch, then the negatives: [T + T * R + S]."""
        items_T = batch.items.values.cpu()
        return {ITEMS: torch.cat([items_T, torch.arange(self._num_items) if self._all else self._negatives.draw(batch, generator)])}

    def counts(self, batch: HistoryBatch) -> Tensor:
        """Every item."""
        return batch.items.offsets_B1[-1:]

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows]) -> LossSum:
        """One part: the next item."""
        items, config, found = batch.items, self._config, rows[ITEMS]
        num_targets = len(items.values)
        targets_T, others = found.inverse_R[:num_targets], found.inverse_R[num_targets:]
        hidden_TD = self.hidden(batch, found.vectors_UD, targets_T)
        scored_UD = self.model.scored(found.vectors_UD)
        if self._all:
            logits_TN = (hidden_TD @ scored_UD[others].T).float() / self.model.temperature
            total = F.cross_entropy(logits_TN, items.values, label_smoothing=config.label_smoothing, reduction="sum")
        else:
            sequences_T = known_K = None
            if config.mask_history:
                sequences_T = torch.arange(len(items), device=targets_T.device).repeat_interleave(items.lengths_B)
                known_K = known_keys(sequences_T, targets_T, len(scored_UD))
            losses_T = sampled_softmax(
                hidden_TD.float(),
                scored_UD.float(),
                targets_T,
                temperature=self.model.temperature,
                sequences_T=sequences_T,
                known_K=known_K,
                **self._negatives.arguments(items.values, found.ids_U[others], others),
            )
            total = losses_T.sum()
        return LossSum(total.unsqueeze(0), self.counts(batch), torch.ones(1, device=total.device))

    def hidden(self, batch: HistoryBatch, vectors_UD: Tensor, inverse_T: Tensor) -> Tensor:
        """States from which each item of the batch is predicted: those of the place before it."""
        items = batch.items
        firsts_B = items.offsets_B1[:-1]
        inputs_T = shifted(inverse_T, items.offsets_B1, 0)
        begins_T = torch.zeros(len(inputs_T), dtype=torch.bool, device=inputs_T.device)
        begins_T[firsts_B] = True
        times_T = batch.times_T.roll(1)
        times_T[firsts_B] = batch.times_T[firsts_B]  # the begin row happens with the first event
        hidden_TD: Tensor = self.model(F.embedding(inputs_T, vectors_UD), begins_T, items.offsets_B1, times_T)
        return hidden_TD
