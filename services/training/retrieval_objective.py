"""What the retriever minimises: the next item of every place against sampled items, or against all of them where there are few.

The ids of a step are known before it: the batch's items and the negatives, which the table looks up while earlier steps still compute.
Legend: T items of a batch, B sequences, N items of the data set, S negatives that the batch shares, R negatives of each target, D hidden size, U fetched
rows.
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
from semantide.services.training.objective import LossSum, TableRows, shifted
from semantide.services.training.recipes import TrainConfig
from semantide.shared.models.retriever import Retriever

ITEMS = "items"  # the table's name


class NextItemSampled:
    """Sampled softmax over item vectors of a table.

    Negatives are drawn with probability proportional to ``counts_N`` to the power ``negative_power``, and their logits corrected for it.
    """

    def __init__(self, model: Retriever, table: Any, counts_N: Tensor, config: TrainConfig) -> None:
        self.model, self.tokens_per_item = model, 1
        self.tables: Mapping[str, Any] = {ITEMS: table}
        self._num_items, self._config = len(counts_N), config
        self._all = config.num_negatives == 0 or config.num_negatives >= self._num_items
        weights_N = counts_N.double().clamp_min(1.0) ** config.negative_power
        self._cumulative_N = weights_N.cumsum(0) / weights_N.sum()
        self._log_q_N = (weights_N / weights_N.sum()).log().float()

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The items of the batch, then the negatives: [T + S], or [T + T * R]."""
        items_T = batch.items.values.cpu()
        if self._all:
            return {ITEMS: torch.cat([items_T, torch.arange(self._num_items)])}
        number = self._config.num_negatives * (len(items_T) if self._config.negative_scope == "target" else 1)
        if self._config.negative_power:
            # Found by bisection: torch.multinomial takes no more than 2 ** 24 items.
            drawn = torch.searchsorted(self._cumulative_N, torch.rand(number, dtype=torch.float64, generator=generator)).clamp_max(self._num_items - 1)
        else:
            drawn = torch.randint(self._num_items, (number,), generator=generator)
        return {ITEMS: torch.cat([items_T, drawn])}

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
            log_q = self._log_q_N.to(targets_T.device)[found.ids_U[others]]
            per_target = config.negative_scope == "target"
            losses_T = sampled_softmax(
                hidden_TD.float(),
                scored_UD.float(),
                targets_T,
                others.view(num_targets, -1) if per_target else None,
                None if per_target else others,
                log_q_TR=log_q.view(num_targets, -1) if per_target else None,
                log_q_S=None if per_target else log_q,
                temperature=self.model.temperature,
                sequences_T=sequences_T,
                known_K=known_K,
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
