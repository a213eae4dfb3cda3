"""What training minimises: the next token of every place, each level over its own code row; for SASRec the next item.

Legend: T items of a batch, B sequences, N items, L levels, F side features, S numbers of an item in a prompt (L + F), D hidden size, K parts of a loss,
R ids asked of a table, U unique ones among them, E training events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.recipes import TrainConfig
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.sasrec import SASRec
from semantide.shared.models.seen_bias import earlier_counts
from semantide.shared.models.targets import TargetBlocks, target_hidden


@dataclass(frozen=True)
class LossSum:
    """A loss as sums and numbers of targets, so that ranks can add theirs up: what is minimised is the weighted sum of the parts' means.

    A rank divides by the numbers of all ranks together; the sum of the ranks' gradients is then that of one process with the whole batch.
    Shapes: ``sums_K`` (carries the gradient), ``counts_K`` int64, ``weights_K``.
    """

    sums_K: Tensor
    counts_K: Tensor
    weights_K: Tensor

    def parts_K(self, counts_K: Tensor | None = None) -> Tensor:
        """Each part's sum over its number of targets: this batch's own, or ``counts_K`` of all ranks."""
        return self.sums_K / (self.counts_K if counts_K is None else counts_K).clamp_min(1)

    def total(self, counts_K: Tensor | None = None) -> Tensor:
        """What is minimised; see ``parts_K``."""
        return (self.parts_K(counts_K) * self.weights_K).sum()


@dataclass(frozen=True)
class TableRows:
    """What a table answered to ``Objective.draw``: each row once, its vector, where each asked id's row is among them, and the asked ids.

    Shapes: ``ids_U``, ``vectors_UD`` (a leaf that gathers the gradient), ``inverse_R`` and ``asked_R`` in the order of the drawn ids.
    """

    ids_U: Tensor
    vectors_UD: Tensor
    inverse_R: Tensor
    asked_R: Tensor


class Objective(Protocol):
    """A loss of packed histories of item rows: a dense model whose parameters are trained in full, and tables of which a step touches some rows."""

    model: nn.Module
    tables: Mapping[str, Any]
    """Embedding tables by name; empty where all parameters are the model's."""
    tokens_per_item: int

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """The ids of each table that the batch needs, negatives included: called ahead of the step, on the CPU, while the batch is loaded."""
        ...

    def counts(self, batch: HistoryBatch) -> Tensor:
        """``LossSum.counts_K`` of a batch before its loss is known: ranks add theirs up ahead of the step."""
        ...

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows]) -> LossSum:
        """The loss of a batch with the rows that were drawn for it."""
        ...


class NextToken:
    """Cross entropy of the generator, summed over levels; every place of every history is supervised and none is padding."""

    def __init__(self, model: Generator, item_tokens_NL: Tensor, config: TrainConfig, side: Callable[[HistoryBatch], Tensor] | None = None) -> None:
        """``side`` gives the side features [T, F] of the histories' items, where the model's prompts have them."""
        levels = model.vocabulary.levels
        if config.level_weights and len(config.level_weights) != levels:
            raise ValueError(f"level_weights has {len(config.level_weights)} numbers for {levels} levels: give one per level or none")
        merged = model.config.merger.enabled
        self.model, self.tokens_per_item = model, levels - 1 + model.prompt_shape.places_per_item if merged else levels
        self.tables: Mapping[str, Any] = {}
        self._item_tokens_NL, self._smoothing, self._repeat_weight = item_tokens_NL, config.label_smoothing, config.repeat_weight
        self._weights_L, self._side = torch.tensor(config.level_weights or (1.0,) * levels, device=item_tokens_NL.device), side

    def _side_features(self, batch: HistoryBatch, probes_T: Tensor | None) -> Tensor:
        """What the model's prompts say beside codes, [T, F]; what a repeat would say nobody reads."""
        known = torch.ones_like(batch.items.values, dtype=torch.bool) if probes_T is None else ~probes_T
        side_TF = batch.items.values.new_zeros(len(known), len(self.model.config.merger.features))
        if self._side is not None:
            side_TF[known] = self._side(batch)
        return side_TF

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Nothing: the codes' embeddings are the model's own."""
        return {}

    def counts(self, batch: HistoryBatch) -> Tensor:
        """Every place of every level, and one repeat a history where they are unlearned."""
        probes = [len(batch)] if self._repeat_weight else []
        return torch.tensor([len(batch.items.values)] * self.model.vocabulary.levels + probes, device=batch.items.values.device)

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows] | None = None) -> LossSum:
        """The loss of each level [L], then that of repeats where they are unlearned."""
        items, vocabulary = batch.items, self.model.vocabulary
        probes_T = None
        if self._repeat_weight:
            items, probes_T = with_probes(items)
        targets_TL = self._item_tokens_NL[items.values]
        hidden_TLD = next_item_hidden(self.model, targets_TL, items.offsets_B1, self._side_features(batch, probes_T))
        firsts_L = torch.tensor([vocabulary.first(level) for level in range(vocabulary.levels)], device=targets_TL.device)
        seen = [
            earlier_counts(targets_TL - firsts_L, items.offsets_B1, level, size) if self.model.config.seen_bias else None
            for level, size in enumerate(vocabulary.level_sizes)
        ]
        probe = None
        if probes_T is not None:
            last, counts_TK = vocabulary.levels - 1, seen[-1]
            logits_BK = wide(self.model.logits(hidden_TLD[probes_T, last], last, None if counts_TK is None else counts_TK[probes_T]))
            code_B1 = (targets_TL[probes_T, last] - vocabulary.first(last)).unsqueeze(-1)
            # -log(1 - p), with 1 - p as the sum of the other codes: stable where p is nearly 1.
            others_B = logits_BK.scatter(1, code_B1, -torch.inf).logsumexp(-1)
            probe = (logits_BK.logsumexp(-1) - others_B).sum()
            hidden_TLD, targets_TL = hidden_TLD[~probes_T], targets_TL[~probes_T]
            seen = [None if counts_TK is None else counts_TK[~probes_T] for counts_TK in seen]
        sums_L = torch.stack([
            F.cross_entropy(
                wide(self.model.logits(hidden_TLD[:, level], level, seen[level])),
                targets_TL[:, level] - vocabulary.first(level),
                label_smoothing=self._smoothing,
                reduction="sum",
            )
            for level in range(vocabulary.levels)
        ])  # fmt: skip
        if probe is None:
            return LossSum(sums_L, self.counts(batch), self._weights_L)
        return LossSum(
            torch.cat([sums_L, probe.unsqueeze(0)]),
            self.counts(batch),
            torch.cat([self._weights_L, self._weights_L.new_tensor([self._repeat_weight])]),
        )


def next_item_hidden(model: Generator, tokens_TL: Tensor, offsets_B1: Tensor, side_TF: Tensor) -> Tensor:
    """Hidden states that predict each code of each item of packed histories from all items before it.

    Where the items of a prompt are merged, every item follows the merged beginning of its history code by code, as in decoding: a history costs as many places
    as without a merger, but all the pairs of them only a share.
    Shapes: [T, L], [B + 1], [T, F] -> [T, L, D].
    """
    levels, begin = model.vocabulary.levels, model.vocabulary.begin
    if not model.config.merger.enabled:
        offsets = offsets_B1 * levels
        plain_TLD: Tensor = model(shifted(tokens_TL.flatten(), offsets, begin), offsets).unflatten(0, (-1, levels))
        return plain_TLD
    lengths_B = offsets_B1.diff()
    history_T = torch.arange(len(lengths_B), device=tokens_TL.device).repeat_interleave(lengths_B)
    place_T = torch.arange(len(tokens_TL), device=tokens_TL.device) - offsets_B1[:-1][history_T]
    tokens_TS = torch.cat([tokens_TL, side_TF], 1)
    # Nothing follows the last item of a history.
    before_T = place_T < lengths_B[history_T] - 1
    prompt_offsets_B1 = torch.zeros_like(offsets_B1)
    prompt_offsets_B1[1:] = (1 + tokens_TS.shape[1] * (lengths_B - 1).clamp_min(0)).cumsum(0)
    prompt = tokens_TL.new_full((int(prompt_offsets_B1[-1]),), begin)
    inside = torch.ones_like(prompt, dtype=torch.bool)
    inside[prompt_offsets_B1[:-1]] = False
    prompt[inside] = tokens_TS[before_T].flatten()
    hidden_SD = target_hidden(model, prompt, prompt_offsets_B1, TargetBlocks.of_items(tokens_TL, history_T, place_T))
    return hidden_SD.view(-1, levels, hidden_SD.shape[-1])


class NextItem:
    """Softmax cross entropy of SASRec over all items or sampled ones."""

    def __init__(self, model: SASRec, config: TrainConfig) -> None:
        self.model, self.tokens_per_item = model, 1
        self.tables: Mapping[str, Any] = {}
        self._negatives, self._smoothing = config.num_negatives, config.label_smoothing

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Nothing: the items' embeddings are the model's own."""
        return {}

    def counts(self, batch: HistoryBatch) -> Tensor:
        """Every item."""
        return batch.items.offsets_B1[-1:]

    def loss(self, batch: HistoryBatch, rows: Mapping[str, TableRows] | None = None) -> LossSum:
        """One part: the next item."""
        items = batch.items
        hidden_TD = self.model(shifted(items.values, items.offsets_B1, -1), items.offsets_B1)
        total = self.model.loss(hidden_TD, items.values, self._negatives, self._smoothing, reduction="sum")
        return LossSum(total.unsqueeze(0), self.counts(batch), torch.ones(1, device=total.device))


def with_probes(batch: Jagged) -> tuple[Jagged, Tensor]:
    """Each sequence with one of its own items put behind it once more, half the time the last one; and which rows those are.

    The model then learns at the repeated item's last code that it must not come again; nothing else is supervised there.
    """
    lengths_B = batch.lengths_B
    chance_2B = torch.rand(2, len(lengths_B), device=batch.values.device)
    # The last item is the likeliest to be repeated.
    place_B = torch.where(chance_2B[0] < 0.5, lengths_B - 1, (chance_2B[1] * lengths_B).long())
    drawn_B = batch.offsets_B1[:-1] + place_B
    offsets_B1 = batch.offsets_B1 + torch.arange(len(batch) + 1, device=batch.values.device)
    probes_T = torch.zeros(int(offsets_B1[-1]), dtype=torch.bool, device=batch.values.device)
    probes_T[offsets_B1[1:] - 1] = True
    values = torch.empty(len(probes_T), dtype=batch.values.dtype, device=batch.values.device)
    values[~probes_T], values[probes_T] = batch.values, batch.values[drawn_B]
    return Jagged(values, offsets_B1), probes_T


def shifted(values_T: Tensor, offsets_B1: Tensor, begin: int) -> Tensor:
    """Each sequence with ``begin`` in front and without its last value: the inputs that predict ``values_T``."""
    inputs_T = values_T.roll(1)
    inputs_T[offsets_B1[:-1]] = begin
    return inputs_T


def wide(logits: Tensor) -> Tensor:
    """At least float32: a sum of many exponentials loses too much in shorter types."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
