"""How much of a device's arithmetic a training step uses: floating-point operations that the packed histories need, over the measured peak.

Counted are the matrix products that the model's definition asks for, without padding, without the half of the attention that causality forbids, and
without anything computed twice; look-ups, normalisations and activations are not. The backward pass counts twice the forward pass.
Legend: T items of a batch, B sequences, C blocks of targets, D hidden size, N items of the data set, R negatives of a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from semantide.services.training.negatives import mix_of
from semantide.services.training.page_targets import PageTargets
from semantide.services.training.recipes import TrainConfig
from semantide.shared.models.generator import Generator
from semantide.shared.models.linear_layer import LinearAttention
from semantide.shared.models.retriever import FuXiLayer, Retriever
from semantide.shared.models.sasrec import SASRec

_PASSES = 3  # the backward pass makes two products for each of the forward pass
_PEAK_SIZE = 1024
_PEAK_SECONDS = 0.3


@dataclass(frozen=True)
class StepWork:
    """What training costs, in multiply-adds of the forward pass.

    ``per_token`` of the layers; ``per_pair`` of a token and one that it sees, itself included; ``per_item`` of the loss.
    """

    per_token: float
    per_pair: float
    per_item: float
    tokens_per_item: int = 1
    per_item_pair: float = 0.0
    """Of two items of the same batch, wherever their histories are: in-batch negatives."""
    behind: int = 0
    """Of ``tokens_per_item``, those that stand behind the prompt: they see the items before theirs and one another. 0: all stand in it."""

    def flops(self, lengths_B: Tensor) -> float:
        """Operations of one step, forward and backward, on histories of these numbers of items; a multiply-add is two."""
        lengths = lengths_B.to(torch.float64).cpu()
        items, in_prompt = float(lengths.sum()), self.tokens_per_item - self.behind
        # Behind a prompt of merged items follow the targets, so the last item needs no place in it.
        prompts = in_prompt * lengths if not self.behind else 1 + in_prompt * (lengths - 1)
        before = lengths + in_prompt * lengths * (lengths - 1) / 2  # what is seen from behind, one token of each item
        pairs = float((prompts * (prompts + 1) / 2 + self.behind * before + lengths * self.behind * (self.behind + 1) / 2).sum())
        tokens = float(prompts.sum()) + items * self.behind
        return 2 * _PASSES * (self.per_token * tokens + self.per_pair * pairs + self.per_item * items + self.per_item_pair * items**2)

    def page_flops(self, lengths_B: Tensor, targets: PageTargets) -> float:
        """Operations of one step by pages: the histories are read once, and blocks of targets see a part of theirs and themselves."""
        levels, in_prompt = (self.behind + 1 if self.behind else self.tokens_per_item), self.tokens_per_item - self.behind
        prompts_B = 1 + in_prompt * lengths_B.to(torch.float64).cpu()
        # Nothing is predicted from a block's last token, and its first from the prompt.
        own_C = targets.offsets_C1.diff().to(torch.float64).cpu() * levels - 1
        seen_C = 1 + in_prompt * targets.seen_C.to(torch.float64).cpu()
        pairs = float((prompts_B * (prompts_B + 1) / 2).sum() + (own_C * seen_C + own_C * (own_C + 1) / 2).sum())
        tokens = float(prompts_B.sum() + own_C.sum())
        return 2 * _PASSES * (self.per_token * tokens + self.per_pair * pairs + self.per_item * len(targets.items_S))


def work_of(model: nn.Module, config: TrainConfig, num_items: int) -> StepWork:
    """The work of a model's training, from its own layers and the loss that ``config`` asks for."""
    if isinstance(model, Generator):
        shape = model.config
        linear = _linear(model.model.layers) + sum(_recurrence(layer.linear_attn) for layer in model.layers if layer.linear)
        pairs = shape.types.count("full_attention") * 2 * shape.num_heads * shape.head_dim
        levels, loss = model.vocabulary.levels, shape.hidden_size * sum(shape.level_sizes)
        if not shape.merger.enabled:
            return StepWork(linear, pairs, loss, levels)
        return StepWork(linear, pairs, loss + _linear(model.merger), model.prompt_shape.places_per_item + levels - 1, behind=levels - 1)
    if isinstance(model, SASRec):
        size = model.config.hidden_size
        sampled = 0 < config.num_negatives < num_items
        return StepWork(_linear(model.layers), 2 * size * model.config.num_layers, size * (config.num_negatives + 1 if sampled else num_items))
    if isinstance(model, Retriever):
        size, hard, mix = model.config.hidden_size, config.negatives, mix_of(config)
        layer = model.layers[0]
        channels = layer.channels if isinstance(layer, FuXiLayer) else 1
        own = mix.size if mix else 0
        if hard.sharing == "vectors":
            own *= hard.expansion
        shared = config.num_negatives if config.negative_scope == "batch" else 0
        compared = num_items if config.num_negatives >= num_items or not (own or shared or hard.in_batch) else 1 + own + shared
        # The attention has two products a pair; a channel of biases has one.
        return StepWork(
            _linear(model.layers), (1 + channels) * size * model.config.num_layers, size * compared, per_item_pair=float(size if hard.in_batch else 0)
        )
    raise ValueError(f"the work of a {type(model).__name__} is not known: give a generator, a SASRec or a retriever")


def _recurrence(mixer: LinearAttention) -> int:
    """Of a token in a layer of linear attention: the short convolution, one writing into each head's state and one or two readings."""
    shape = mixer.config
    state = shape.num_value_heads * shape.key_head_dim * shape.value_head_dim
    return shape.channels * shape.conv_kernel + (3 if mixer.form.rule.delta else 2) * state


def measured_peak(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """The most operations per second that a matrix product reached on this device, on as many threads as training has.

    Measured on square matrices that fit the caches; the best run counts, since what disturbs one only makes it slower.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, generator=generator).to(device, dtype) for _ in range(2))
    repeats = 1 if device.type == "cpu" else 32
    out = left @ right
    best, began = float("inf"), clock()
    while best == float("inf") or clock() - began < _PEAK_SECONDS:
        start = clock()
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, max(clock() - start, 1e-9))
    return 2.0 * _PEAK_SIZE**3 * repeats / best


class StepMeter:
    """Adds up the work of steps between two reports."""

    def __init__(self, work: StepWork, peak: float) -> None:
        """``peak`` in operations per second, as ``measured_peak`` has it."""
        self._work, self._peak, self._flops = work, peak, 0.0

    def add(self, lengths_B: Tensor, targets: PageTargets | None = None) -> None:
        """Count one step of this rank, of histories of these lengths, with the targets of pages where training goes by them."""
        self._flops += self._work.flops(lengths_B) if targets is None else self._work.page_flops(lengths_B, targets)

    def report(self, seconds: float) -> dict[str, float]:
        """``flops_per_second`` and ``mfu`` of the steps since the last report, which took ``seconds``."""
        rate = self._flops / max(seconds, 1e-9)
        self._flops = 0.0
        return {"flops_per_second": rate, "mfu": rate / self._peak}


def _linear(layers: nn.Module) -> float:
    """Weights of all linear layers: each is multiplied once with every token."""
    return float(sum(module.weight.numel() for module in layers.modules() if isinstance(module, nn.Linear)))
