"""The retriever: HSTU or FuXi-alpha over item vectors that a table outside of it holds, so that the table may be far larger than the model.

Its layers take packed histories, see times and places as learned biases of the attention, and give one state per place that is compared with the
vectors of items. A learned begin row stands in front of every history, so an empty one has a ranking too.
Legend: T packed items, B sequences, N items, D hidden size, H heads, E head size, K time buckets, P distances.
Source: Zhai et al., Actions Speak Louder than Words (HSTU), arXiv 2402.17152; Ye et al., FuXi-alpha, arXiv 2502.03036.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.kernels.dropout import dropout
from semantide.kernels.jagged_fusion_attention import jagged_bias_attention, jagged_fusion_attention
from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.models.pretrained import fill, read_config, read_weights, write_config, write_weights

_VECTORS = "vectors.parquet"
_ROWS = 1 << 16  # of a row group of the vectors' file


@dataclass(frozen=True)
class RetrieverConfig:
    """Shape of the retriever."""

    layer: Literal["hstu", "fuxi"] = "hstu"
    """``hstu``: biases are added to the scores, and the gated attention is the whole layer. ``fuxi``: times and places have channels of their own, and a
    gated feed-forward follows."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    max_items: int = 50
    """Longest history, items; the most recent ones are kept."""
    time_buckets: int = 128
    """Buckets of the time between two events, each about 1.35 times as long as the one before. 0: times are not looked at."""
    position_bias: bool = True
    """Whether the distance between two places is a bias of the attention."""
    places: Literal["start", "end", "none"] = "start"
    """Whether a vector of its place is added to each item's, counted from the first or back from the last."""
    dropout: float = 0.2
    embedding_dropout: float = 0.2
    embedding_scale: float = 0.0
    """Factor on item vectors as inputs. 0: the root of ``hidden_size``."""
    cosine: bool = True
    """Whether items are ranked by the cosine over ``temperature``, or by the plain product."""
    temperature: float = 0.05
    initializer_range: float = 0.02
    actions: tuple[str, ...] = ()
    """Actions that have a vector, which is added to that of the item they were done with. Empty: what was done makes no difference."""

    def __post_init__(self) -> None:
        for name, choices in (("layer", ("hstu", "fuxi")), ("places", ("start", "end", "none"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        for name in ("hidden_size", "num_layers", "num_heads", "max_items"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.time_buckets < 0 or not self.temperature > 0:
            raise ValueError(f"time_buckets is {self.time_buckets} and temperature {self.temperature}: give at least 0, and more than 0")
        if self.layer == "fuxi" and not (self.time_buckets or self.position_bias):
            raise ValueError("layer 'fuxi' has channels for times and places: give time_buckets, or set position_bias to true")

    @property
    def input_scale(self) -> float:
        """Factor on item vectors as inputs."""
        return self.embedding_scale or math.sqrt(self.hidden_size)


class _Biases(nn.Module):
    """The tables of one layer's biases, the same for all heads."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        self.time_1K = nn.Parameter(torch.empty(1, config.time_buckets)) if config.time_buckets else None
        self.position_1P = nn.Parameter(torch.empty(1, config.max_items + 1)) if config.position_bias else None
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)


class HSTULayer(nn.Module):
    """Pointwise attention with a gate: SiLU in the place of softmax, and no feed-forward."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.rate, self.num_heads = config.dropout, config.num_heads
        self.input_norm, self.attention_norm = nn.LayerNorm(size, eps=1e-6), nn.LayerNorm(size, eps=1e-6)
        self.uvqk, self.output = nn.Linear(size, 4 * size), nn.Linear(size, size)
        self.biases = _Biases(config)

    def forward(self, x_TD: Tensor, offsets_B1: Tensor, times_T: Tensor, share_T1: Tensor) -> Tensor:
        """One layer on packed sequences; ``share_T1`` is one over the number of items that each place sees."""
        u_TD, v_TD, q_TD, k_TD = F.silu(self.uvqk(self.input_norm(x_TD))).chunk(4, -1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q_TD, k_TD, v_TD))
        time, position = self.biases.time_1K, self.biases.position_1P
        mixed_THE = jagged_fusion_attention(q, k, v, offsets_B1, None if time is None else times_T, time, position, activation="silu", scale=1.0)
        gated_TD = self.attention_norm(mixed_THE.flatten(1) * share_T1) * u_TD
        y_TD: Tensor = x_TD + self.output(dropout(gated_TD, self.rate, self.training))
        return y_TD


class FuXiLayer(nn.Module):
    """Attention, times and places each as a channel; gate, projection, and a gated feed-forward behind it."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.rate, self.num_heads = config.dropout, config.num_heads
        self.biases = _Biases(config)
        self.channels = 1 + sum(1 for _ in self.biases.parameters())
        self.input_norm, self.feedforward_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.attention_norm = nn.RMSNorm(self.channels * size, eps=1e-6)
        self.vqku, self.output = nn.Linear(size, (3 + self.channels) * size), nn.Linear(self.channels * size, size)
        self.gate, self.up, self.down = (nn.Linear(size, size, bias=False) for _ in range(3))

    def forward(self, x_TD: Tensor, offsets_B1: Tensor, times_T: Tensor, share_T1: Tensor) -> Tensor:
        """One layer on packed sequences; ``share_T1`` is one over the number of items that each place sees."""
        size = x_TD.shape[1]
        v_TD, q_TD, k_TD, u_TC = F.silu(self.vqku(self.input_norm(x_TD))).split([size, size, size, self.channels * size], -1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q_TD, k_TD, v_TD))
        mixed = [jagged_fusion_attention(q, k, v, offsets_B1, activation="silu", scale=1.0)]
        if self.biases.time_1K is not None:
            mixed.append(jagged_bias_attention(v, offsets_B1, times_T, self.biases.time_1K.expand(self.num_heads, -1)))
        if self.biases.position_1P is not None:
            mixed.append(jagged_bias_attention(v, offsets_B1, position_weights_HP=self.biases.position_1P.expand(self.num_heads, -1)))
        gated_TC = self.attention_norm(torch.cat([x.flatten(1) for x in mixed], 1) * share_T1) * u_TC
        x_TD = x_TD + self.output(dropout(gated_TC, self.rate, self.training))
        y_TD = self.feedforward_norm(x_TD)
        z_TD: Tensor = x_TD + dropout(self.down(F.silu(self.gate(y_TD)) * self.up(y_TD)), self.rate, self.training)
        return z_TD


class Retriever(nn.Module):
    """The dense part; vectors of items come in and go out."""

    def __init__(self, config: RetrieverConfig) -> None:
        super().__init__()
        self.config = config
        self.begin = nn.Parameter(torch.zeros(config.hidden_size))
        self.places = nn.Embedding(config.max_items + 1, config.hidden_size) if config.places != "none" else None
        # Number 0 is an action that is not known, and adds nothing.
        self.actions = nn.Embedding(len(config.actions) + 1, config.hidden_size, padding_idx=0) if config.actions else None
        layer = HSTULayer if config.layer == "hstu" else FuXiLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6) if config.layer == "hstu" else nn.RMSNorm(config.hidden_size, eps=1e-6)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2 and "biases" not in name:
                    parameter.normal_(std=config.initializer_range)
                elif name.endswith("bias"):
                    parameter.zero_()
            if self.actions is not None:
                self.actions.weight[0] = 0.0

    def forward(self, vectors_TD: Tensor, begins_T: Tensor, offsets_B1: Tensor, times_T: Tensor, actions_T: Tensor | None = None) -> Tensor:
        """States of packed histories, each with a first place that ``begins_T`` marks, whose own vector does not count.

        ``actions_T`` numbers what was done, as ``action_numbers``; None where it is not known.
        Shapes: [T, D], [T] bool, [B + 1], [T] int64, [T] int64 -> [T, D].
        Units: ``times_T`` seconds; all 0 where they are not known.
        Raises: ValueError for a history longer than ``max_items``.
        """
        config = self.config
        lengths_B = offsets_B1.diff()
        if len(lengths_B) and int(lengths_B.max()) > config.max_items + 1:
            raise ValueError(f"a history of {int(lengths_B.max()) - 1} items: cut it to the last {config.max_items}")
        places_T = torch.arange(len(vectors_TD), device=vectors_TD.device) - offsets_B1[:-1].repeat_interleave(lengths_B)
        if self.actions is not None and actions_T is not None:
            vectors_TD = vectors_TD + self.actions(actions_T)
        x_TD = torch.where(begins_T.unsqueeze(-1), self.begin.to(vectors_TD.dtype), vectors_TD) * config.input_scale
        if self.places is not None:
            from_end_T = lengths_B.repeat_interleave(lengths_B) - 1 - places_T
            x_TD = x_TD + self.places(places_T if config.places == "start" else from_end_T)
        x_TD = dropout(x_TD, config.embedding_dropout, self.training)
        share_T1 = (1.0 / (places_T + 1)).to(x_TD.dtype).unsqueeze(-1)
        for layer in self.layers:
            x_TD = layer(x_TD, offsets_B1, times_T, share_T1)
        hidden_TD: Tensor = self.norm(x_TD)
        return self.scored(hidden_TD)

    def action_numbers(self, actions: Iterable[str]) -> list[int]:
        """Number of each action; 0 for one without a vector."""
        numbers = {action: number for number, action in enumerate(self.config.actions, 1)}
        return [numbers.get(action, 0) for action in actions]

    def scored(self, vectors: Tensor) -> Tensor:
        """States or item vectors in the form whose product over the temperature ranks: [..., D] -> the same."""
        return F.normalize(vectors, dim=-1, eps=1e-6) if self.config.cosine else vectors

    @property
    def temperature(self) -> float:
        """What products of states and item vectors are divided by."""
        return self.config.temperature if self.config.cosine else 1.0

    def save_dense(self, folder: Path) -> None:
        """Write all but the table: ``config.json`` and ``model.safetensors``."""
        write_weights(folder, self.state_dict())
        write_config(folder, {"model_type": "retriever", **asdict(self.config)})

    def save_pretrained(self, folder: Path, vectors_ND: Tensor | Iterable[Tensor], item_ids: Sequence[str]) -> None:
        """Write ``config.json``, ``model.safetensors``, and the table as ``vectors.parquet`` (item, vector), which the tokenizer reads too.

        A table that is not in memory comes in pieces, in order.
        """
        self.save_dense(folder)
        size, written = self.config.hidden_size, 0
        with pq.ParquetWriter(folder / _VECTORS, pa.schema([("item", pa.string()), ("vector", pa.list_(pa.float32(), size))])) as writer:
            for piece_VD in vectors_ND.split(_ROWS) if isinstance(vectors_ND, Tensor) else vectors_ND:
                items = list(item_ids[written : written + len(piece_VD)])
                if piece_VD.shape != (len(items), size):
                    raise ValueError(f"vectors {tuple(piece_VD.shape)} for {len(items)} items of size {size}: give [N, D]")
                flat = pa.array(piece_VD.detach().float().cpu().numpy().ravel())
                writer.write_table(pa.table({"item": pa.array(items, pa.string()), "vector": pa.FixedSizeListArray.from_arrays(flat, size)}))
                written += len(items)
        if written != len(item_ids):
            raise ValueError(f"{written} vectors for {len(item_ids)} items: give one of each item")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Retriever:
        """Read the dense part of what ``save_pretrained`` wrote.

        Raises: NotFound, Corrupt, Conflict.
        """
        header = read_config(folder)
        if header.get("model_type") != "retriever":
            raise Conflict(f"{folder}: model_type is {header.get('model_type')!r}, not 'retriever'")
        try:
            shape = {field.name: header[field.name] for field in fields(RetrieverConfig) if field.name != "actions"}
            model = cls(RetrieverConfig(**shape, actions=tuple(header.get("actions", ()))))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{folder}/config.json: {error}: a field is missing or out of range; copy the model folder again") from error
        fill(model, read_weights(folder), folder)
        return model.eval()


@dataclass(frozen=True)
class ItemVectors:
    """The table of a trained retriever: which items, and their vectors.

    Shapes: ``vectors_ND``.
    """

    item_ids: tuple[str, ...]
    vectors_ND: Tensor

    @classmethod
    def load(cls, folder: Path) -> ItemVectors:
        """Read ``vectors.parquet`` of a model's folder.

        Raises: NotFound, Corrupt.
        """
        path = folder / _VECTORS
        if not path.is_file():
            raise NotFound(f"{path} does not exist: give the folder of a retriever")
        try:
            table = pq.read_table(path, columns=["item", "vector"]).combine_chunks()
            ids = tuple(table["item"].to_pylist())
            flat: npt.NDArray[np.float32] = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return cls(ids, torch.from_numpy(flat.astype(np.float32).reshape(len(ids), -1)))
        except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
            raise Corrupt(f"{path} is truncated or damaged ({error}): copy the model folder again") from error
