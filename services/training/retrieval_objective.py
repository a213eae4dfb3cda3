"""What the retriever minimises: the next item of every place against sampled items, or against all of them where there are few.

The ids of a step are known before it: the batch's items and the negatives, which the table looks up while earlier steps still compute.
Legend: T items of a batch, B sequences, N items of the data set, S negatives that the batch shares, R negatives of each target, D hidden size,
U fetched rows.
Source: TurboGR (arXiv 2605.13433), negative sampling; Bengio and Senecal, Adaptive Importance Sampling (logQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.jagged_embedding import unique_ids
from semantide.kernels.sampled_softmax import known_keys, sampled_softmax
from semantide.services.training.batches import HistoryBatch
from semantide.services.training.negatives import BatchNegatives
from semantide.services.training.objective import LossSum, TableRows, shifted
from semantide.services.training.recipes import TrainConfig
from semantide.shared.models.item_features import ItemFeatures, pooled
from semantide.shared.models.retriever import Retriever

ITEMS, FEATURES = "items", "features"  # names of tables


@dataclass(frozen=True)
class FeatureTable:
    """What items have in common, and the table of its vectors: all features in one, so that a step asks for all of them at once."""

    features: ItemFeatures
    table: Any


class NextItemSampled:
    """Sampled softmax over item vectors of a table; ``negatives`` draws what its targets are compared with.

    With ``featured`` an item's vector is that of its row plus the mean of those of its features, wherever it stands: in histories, as target, as negative.
    """

    def __init__(
        self,
        model: Retriever,
        table: Any,
        counts_N: Tensor,
        config: TrainConfig,
        negatives: BatchNegatives | None = None,
        featured: FeatureTable | None = None,
        actions_E: Tensor | None = None,
    ) -> None:
        """``actions_E``: the model's number of what was done in each training event, where it has vectors for actions."""
        self.model, self.tokens_per_item = model, 1
        self.tables: Mapping[str, Any] = {ITEMS: table} if featured is None else {ITEMS: table, FEATURES: featured.table}
        self._features, self._actions_E = None if featured is None else featured.features, actions_E
        self._num_items, self._config = len(counts_N), config
        self._negatives = negatives or BatchNegatives.of(config, counts_N.numpy())
        hard = config.negatives
        self._all = config.num_negatives >= self._num_items or not (config.num_negatives or hard.in_batch or hard.prefix or hard.beams)

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The items of the batch, then the negatives: [T + T * R + S]; and the features of each of those items once."""
        items_T = batch.items.values.cpu()
        items_R = torch.cat([items_T, torch.arange(self._num_items) if self._all else self._negatives.draw(batch, generator)])
        if self._features is None:
            return {ITEMS: items_R}
        return {ITEMS: items_R, FEATURES: self._features.asked(unique_ids(items_R, self._num_items).ids_U)}

    def read(self, items_T: Tensor) -> Tensor:
        """The vectors [T, D] of items as they are: between two steps with settled tables, on all ranks, which may ask for different ones."""
        vectors_TD: Tensor = self.tables[ITEMS].read(items_T)
        if self._features is None:
            return vectors_TD
        shared_FD, lengths_T = self.tables[FEATURES].read(self._features.asked(items_T)), self._features.lengths(items_T)
        return vectors_TD + pooled(shared_FD, torch.arange(len(shared_FD), device=shared_FD.device), lengths_T.to(shared_FD.device))

    def touched(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Items whose vector changes with these rows of the tables: bool [N]."""
        places_N, rows_K = self.tables[ITEMS].places_N, rows[ITEMS].cpu()
        changed = torch.zeros(self._num_items if places_N is None else int(places_N.max()) + 1, dtype=torch.bool).index_fill_(0, rows_K, True)
        items_N = changed if places_N is None else changed[places_N]
        return items_N if self._features is None else items_N | self._features.of_rows(rows[FEATURES])

    def counts(self, batch: HistoryBatch) -> Tensor:
        """Every item."""
        return batch.items.offsets_B1[-1:]

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows]) -> LossSum:
        """One part: the next item."""
        items, config, found = batch.items, self._config, rows[ITEMS]
        num_targets = len(items.values)
        vectors_UD, inverse_R = self._composed(rows)
        targets_T, others = inverse_R[:num_targets], inverse_R[num_targets:]
        hidden_TD = self.hidden(batch, vectors_UD, targets_T)
        scored_UD = self.model.scored(vectors_UD)
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
                **self._negatives.arguments(items.values, found.asked_R[num_targets:], others),
            )
            total = losses_T.sum()
        return LossSum(total.unsqueeze(0), self.counts(batch), torch.ones(1, device=total.device))

    def _composed(self, rows: Mapping[str, TableRows]) -> tuple[Tensor, Tensor]:
        """Vectors of what was asked for, each once, and where each asked item is among them: [U, D], [R]."""
        found = rows[ITEMS]
        if self._features is None:
            return found.vectors_UD, found.inverse_R
        more = rows[FEATURES]
        items_U, inverse_R = unique_ids(found.asked_R, self._num_items)
        # Items may share a row; each has a vector of its own here, as their features may differ.
        rows_U = torch.empty_like(items_U).scatter_(0, inverse_R, found.inverse_R)
        shared_UD = pooled(more.vectors_UD, more.inverse_R, self._features.lengths(items_U.cpu()).to(items_U.device))
        return F.embedding(rows_U, found.vectors_UD) + shared_UD, inverse_R

    def hidden(self, batch: HistoryBatch, vectors_UD: Tensor, inverse_T: Tensor) -> Tensor:
        """States from which each item of the batch is predicted: those of the place before it."""
        items = batch.items
        firsts_B = items.offsets_B1[:-1]
        inputs_T = shifted(inverse_T, items.offsets_B1, 0)
        begins_T = torch.zeros(len(inputs_T), dtype=torch.bool, device=inputs_T.device)
        begins_T[firsts_B] = True
        times_T = batch.times_T.roll(1)
        times_T[firsts_B] = batch.times_T[firsts_B]  # the begin row happens with the first event
        actions_T = None
        if self._actions_E is not None and batch.events_T is not None:
            actions_T = shifted(self._actions_E[batch.events_T.cpu()].long().to(inputs_T.device), items.offsets_B1, 0)
        hidden_TD: Tensor = self.model(F.embedding(inputs_T, vectors_UD), begins_T, items.offsets_B1, times_T, actions_T)
        return hidden_TD
