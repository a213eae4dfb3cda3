"""What training minimises: the next token of every place, each level over its own code row; for SASRec the next item.

Legend: T items of a batch, B sequences, N items, L levels, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.services.training.recipes import TrainConfig
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.sasrec import SASRec
from semantide.shared.models.vocabulary import BEGIN


class Objective(Protocol):
    """A loss of packed histories of item rows."""

    model: nn.Module
    tokens_per_item: int

    def loss(self, batch: Jagged) -> tuple[Tensor, Tensor]:
        """The loss to minimise, and its unweighted parts."""
        ...


class NextToken:
    """Cross entropy of the generator, summed over levels; every place of every history is supervised and none is padding."""

    def __init__(self, model: Generator, item_tokens_NL: Tensor, config: TrainConfig) -> None:
        levels = model.vocabulary.levels
        if config.level_weights and len(config.level_weights) != levels:
            raise ValueError(f"level_weights has {len(config.level_weights)} numbers for {levels} levels: give one per level or none")
        self.model, self.tokens_per_item = model, levels
        self._item_tokens_NL, self._smoothing = item_tokens_NL, config.label_smoothing
        self._weights_L = torch.tensor(config.level_weights or (1.0,) * levels, device=item_tokens_NL.device)

    def loss(self, batch: Jagged) -> tuple[Tensor, Tensor]:
        """Loss, and the loss of each level [L]."""
        vocabulary = self.model.vocabulary
        targets_TL = self._item_tokens_NL[batch.values]
        offsets_B1 = batch.offsets_B1 * vocabulary.levels
        hidden_TLD = self.model(_shifted(targets_TL.flatten(), offsets_B1, BEGIN), offsets_B1).unflatten(0, (-1, vocabulary.levels))
        parts_L = torch.stack([
            F.cross_entropy(self.model.logits(hidden_TLD[:, level], level).float(), targets_TL[:, level] - vocabulary.first(level), label_smoothing=self._smoothing)
            for level in range(vocabulary.levels)
        ])  # fmt: skip
        return (parts_L * self._weights_L).sum(), parts_L.detach()


class NextItem:
    """Softmax cross entropy of SASRec over all items or sampled ones."""

    def __init__(self, model: SASRec, config: TrainConfig) -> None:
        self.model, self.tokens_per_item = model, 1
        self._negatives, self._smoothing = config.num_negatives, config.label_smoothing

    def loss(self, batch: Jagged) -> tuple[Tensor, Tensor]:
        """Loss, and itself as the only part."""
        hidden_TD = self.model(_shifted(batch.values, batch.offsets_B1, -1), batch.offsets_B1)
        loss = self.model.loss(hidden_TD, batch.values, self._negatives, self._smoothing)
        return loss, loss.detach().unsqueeze(0)


def _shifted(values_T: Tensor, offsets_B1: Tensor, begin: int) -> Tensor:
    """Each sequence with ``begin`` in front and without its last value: the inputs that predict ``values_T``."""
    inputs_T = values_T.roll(1)
    inputs_T[offsets_B1[:-1]] = begin
    return inputs_T
