"""SASRec with a softmax loss: a small causal transformer over item rows, the strong and simple baseline.

Legend: T packed items, B sequences, D hidden size, N items, S sampled negatives.
Source: Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018; the softmax loss as in later replications.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.kernels.attention import jagged_attention
from semantide.kernels.dropout import dropout
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.pretrained import fill, read_config, read_weights, write_config, write_weights


@dataclass(frozen=True)
class SASRecConfig:
    """Shape of SASRec. Each sequence gets a learned begin row, so that an empty history has a ranking too."""

    num_items: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    feedforward_size: int = 128
    max_items: int = 50
    """Longest history, items; the most recent ones are kept."""
    positions: Literal["start", "end"] = "end"
    """Whether places are counted from the first item or back from the last."""
    dropout: float = 0.2
    embedding_dropout: float = 0.2
    initializer_range: float = 0.05
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.positions not in ("start", "end"):
            raise ValueError(f"positions is {self.positions!r}: give 'start' or 'end'")


class SASRecLayer(nn.Module):
    """Attention and feed-forward with normalisation before each."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.rate, self.num_heads = config.dropout, config.num_heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, config.feedforward_size), nn.Linear(config.feedforward_size, size)

    def forward(self, x_TD: Tensor, offsets_B1: Tensor) -> Tensor:
        """One layer on packed sequences."""
        q, k, v = self.qkv(self.attention_norm(x_TD)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        x_TD = x_TD + dropout(self.output(jagged_attention(q, k, v, offsets_B1).flatten(1)), self.rate, self.training)
        y_TD: Tensor = x_TD + dropout(self.down(F.relu(self.up(self.feedforward_norm(x_TD)))), self.rate, self.training)
        return y_TD


class SASRec(nn.Module):
    """Next-item model; item embeddings serve as the head."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        if config.num_items < 1:
            raise ValueError(f"num_items is {config.num_items}: give the number of items of the data set")
        self.config = config
        self.items = nn.Embedding(config.num_items, config.hidden_size)
        self.begin = nn.Parameter(torch.zeros(config.hidden_size))
        self.places = nn.Embedding(config.max_items + 1, config.hidden_size)
        self.layers = nn.ModuleList(SASRecLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        with torch.no_grad():
            self.items.weight.normal_(std=config.initializer_range)
            self.places.weight.normal_(std=0.02)

    def forward(self, rows_T: Tensor, offsets_B1: Tensor) -> Tensor:
        """Hidden states of packed histories whose first row is -1, the begin row.

        Shapes: [T], [B + 1] -> [T, D].
        Raises: ValueError for a history longer than ``max_items``.
        """
        lengths_B = offsets_B1.diff()
        if len(lengths_B) and int(lengths_B.max()) > self.config.max_items + 1:
            raise ValueError(f"a history of {int(lengths_B.max()) - 1} items: cut it to the last {self.config.max_items}")
        places_T = torch.arange(len(rows_T), device=rows_T.device) - offsets_B1[:-1].repeat_interleave(lengths_B)
        if self.config.positions == "end":
            places_T = (lengths_B - 1).repeat_interleave(lengths_B) - places_T
        x_TD = torch.where(rows_T.unsqueeze(-1) < 0, self.begin, self.items(rows_T.clamp_min(0)))
        x_TD = dropout(x_TD * self.config.embedding_scale + self.places(places_T), self.config.embedding_dropout, self.training)
        for layer in self.layers:
            x_TD = layer(x_TD, offsets_B1)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all items: [..., D] -> [..., N]."""
        scores: Tensor = hidden @ self.items.weight.T
        return scores

    def loss(
        self, hidden_TD: Tensor, targets_T: Tensor, num_negatives: int = 0, label_smoothing: float = 0.0, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Softmax cross entropy over all items, or over the target and ``num_negatives`` uniform samples that the batch shares."""
        if num_negatives == 0 or num_negatives >= self.config.num_items:
            return F.cross_entropy(_wide(self.logits(hidden_TD)), targets_T, label_smoothing=label_smoothing, reduction=reduction)
        negatives_S = torch.randint(self.config.num_items, (num_negatives,), device=hidden_TD.device)
        positive_T = _wide((hidden_TD * self.items(targets_T)).sum(-1))
        # The sampled sum stands for that over all items, so each sample weighs N / S.
        negative_TS = _wide(hidden_TD @ self.items(negatives_S).T) + math.log(self.config.num_items / num_negatives)
        negative_TS = negative_TS.masked_fill(targets_T.unsqueeze(-1) == negatives_S, -math.inf)
        loss_T: Tensor = torch.logaddexp(positive_T, negative_TS.logsumexp(-1)) - positive_T
        return loss_T.sum() if reduction == "sum" else loss_T.mean()

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        write_weights(folder, self.state_dict())
        write_config(folder, {"model_type": "sasrec", **asdict(self.config)})

    @classmethod
    def from_pretrained(cls, folder: Path) -> SASRec:
        """Read what ``save_pretrained`` wrote.

        Raises: NotFound, Corrupt, Conflict.
        """
        header = read_config(folder)
        if header.get("model_type") != "sasrec":
            raise Conflict(f"{folder}: model_type is {header.get('model_type')!r}, not 'sasrec'")
        try:
            model = cls(SASRecConfig(**{field.name: header[field.name] for field in fields(SASRecConfig)}))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{folder}/config.json: {error}: a field is missing or out of range; copy the model folder again") from error
        fill(model, read_weights(folder), folder)
        return model.eval()


def _wide(logits: Tensor) -> Tensor:
    """At least float32: a sum of many exponentials loses too much in shorter types."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
