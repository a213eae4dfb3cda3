"""The generator: a decoder-only transformer over the tokens of semantic ids, with the layers of the Qwen family.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU; queries and keys are normalised as in Qwen3 or have biases as in Qwen2.5. Any layers
may have linear attention in the place of softmax, as in Qwen3-Next and Qwen3.5 (``linear_layer.py``).
Parameter names are those of Hugging Face, so that weights load and save without conversion. Dropout and the scales are training-time additions that do not change the
saved model: ``save_pretrained`` folds the scales into the weights.
With a merger the items of a prompt are one vector each (``token_merger.py``), and what is generated after it stays code by code.
Legend: T packed tokens, B sequences, D hidden size, H query heads, G key/value heads, d head size, K codes of a level, V tokens, P places of prompts,
N chosen ones, I items, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.kernels.dropout import dropout
from semantide.shared.models.generator_layers import Layer, RMSNorm
from semantide.shared.models.linear_layer import FORMS, LinearConfig
from semantide.shared.models.seen_bias import SeenBias
from semantide.shared.models.token_merger import MergedRows, MergerConfig, PromptShape, TokenMerger
from semantide.shared.models.vocabulary import Layout, Vocabulary


@dataclass(frozen=True)
class GeneratorConfig:
    """Shape of the generator. ``vocab_size`` 0 stands for the vocabulary's own size; a larger one leaves unused rows.

    Without ``level_sizes`` it is a recipe's shape, which becomes a model's with ``dataclasses.replace(config, level_sizes=...)``.
    """

    level_sizes: tuple[int, ...] = ()
    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    """Whether queries and keys are normalised per head."""
    qkv_bias: bool = False
    output_bias: bool = False
    layer_types: tuple[str, ...] = ()
    """Of each layer: ``full_attention`` (softmax), ``linear_attention`` (the gated delta rule), ``kda``, ``gla`` or ``mamba2``. Empty: softmax all of them."""
    linear: LinearConfig = field(default_factory=LinearConfig)
    """Shape of the layers that are not softmax."""
    attention_gate: bool = False
    """Whether what softmax attention gives is gated by its layer's input, as in Qwen3.5."""
    rotary_share: float = 1.0
    """Share of a softmax head's features that turn with the position."""
    centred_norms: bool = False
    """Whether the norms' factors are 1 plus what is learned, as in Qwen3.5."""
    vocab_size: int = 0
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    """Of what each block adds to the residual stream, while training."""
    embedding_dropout: float = 0.0
    token_dropout: float = 0.0
    """Share of whole input tokens that are blanked while training."""
    initializer_range: float = 0.05
    embedding_scale: float = 1.0
    """Factor on the embeddings as they enter the first layer (not where they serve as the head); folded into the weights when saved."""
    level_scales: bool = False
    """Whether each level's logits get a learned factor; folded into the head when saved."""
    seen_bias: bool = False
    """Whether logits are corrected by what the history holds (``seen_bias.py``); a saved model keeps it as a tensor of its own, which others leave out."""
    merger: MergerConfig = field(default_factory=MergerConfig)
    """Whether the items of a prompt are merged to one vector each; a saved model keeps its tensors beside those that others know."""
    layout: Layout = field(default_factory=Layout)
    """Which tokens are which."""

    def __post_init__(self) -> None:
        size = Vocabulary(self.level_sizes, self.layout).size if self.level_sizes else 0
        if self.vocab_size == 0:
            object.__setattr__(self, "vocab_size", size)
        if self.vocab_size < size:
            raise ValueError(f"vocab_size {self.vocab_size} is smaller than the {size} tokens of levels {self.level_sizes}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}, and head_dim {self.head_dim} even")
        known = ("full_attention", *FORMS)
        if self.layer_types and (len(self.layer_types) != self.num_layers or not set(self.layer_types) <= set(known)):
            raise ValueError(f"layer_types is {list(self.layer_types)}: give one of {', '.join(known)} for each of the {self.num_layers} layers, or nothing")
        if not 0 < self.rotary_share <= 1 or self.rotary_size % 2:
            raise ValueError(f"rotary_share is {self.rotary_share}: give a share of head_dim {self.head_dim} that is an even number of features")
        if self.seen_bias and not self.layout.plain:
            raise ValueError(f"seen_bias counts the items of histories with one begin token and nothing between items, not of {self.layout}")
        if self.merger.enabled and not self.layout.plain:
            raise ValueError(f"merger merges the items of histories with one begin token and nothing between items, not of {self.layout}")
        for name in ("dropout", "embedding_dropout", "token_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share from 0 up to but not including 1")

    @property
    def types(self) -> tuple[str, ...]:
        """Of every layer."""
        return self.layer_types or ("full_attention",) * self.num_layers

    @property
    def rotary_size(self) -> int:
        """Features of a softmax head that turn."""
        return int(self.head_dim * self.rotary_share)


class Trunk(nn.Module):
    """Embedding, layers and last normalisation: what Hugging Face calls ``model``."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.centred_norms)


class Generator(nn.Module):
    """Decoder-only model of histories spelled in semantic ids."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = Vocabulary(config.level_sizes, config.layout)
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.level_scales:
            self.level_log_scale = nn.Parameter(torch.zeros(self.vocabulary.levels))
        if config.seen_bias:
            self.seen_bias = SeenBias(self.vocabulary)
        if config.merger.enabled:
            self.merger = TokenMerger(config.merger, self.vocabulary.levels, config.hidden_size)
        self._merged_rows: tuple[tuple[Any, ...], MergedRows] | None = None
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.normal_(std=self.config.initializer_range)
            elif parameter.ndim == 2 and not name.startswith("merger."):
                # What is added to the residual stream starts small, so that depth does not blow it up.
                damping = (2 * self.config.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(std=damping * parameter.shape[1] ** -0.5)
            elif name.endswith(".bias"):
                parameter.zero_()
        if self.config.merger.enabled:
            self.merger.initialise(self.config.initializer_range * self.config.embedding_scale)

    @property
    def layers(self) -> list[Layer]:
        """The transformer layers, first to last."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states that enter the first layer."""
        return self._dropped(self._scaled(tokens))

    def _scaled(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.model.embed_tokens(tokens)
        return x * self.config.embedding_scale if self.config.embedding_scale != 1 else x

    def _dropped(self, x: Tensor) -> Tensor:
        if self.training and self.config.token_dropout:
            x = x * (torch.rand(*x.shape[:-1], 1, device=x.device) >= self.config.token_dropout)
        return dropout(x, self.config.embedding_dropout, self.training)

    @property
    def prompt_shape(self) -> PromptShape:
        """How the tokens of a prompt become places."""
        levels, merger = self.vocabulary.levels, self.config.merger
        if not merger.enabled:
            return PromptShape(1, 1, levels)
        return PromptShape(levels + len(merger.features), 2 if merger.separator == "kept" else 1, 1)

    def prompt_vectors(self, tokens_T: Tensor, offsets_B1: Tensor, places_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What enters the first layer for packed prompts, and where each begins: with a merger one vector per item, else one per token.

        ``places_N`` asks for some places only; the offsets are those of all.
        Shapes: [T], [B + 1] -> [P, D] or [N, D], [B + 1].
        Raises: ValueError for a prompt that is not the begin token and whole items, where they are merged.
        """
        if not self.config.merger.enabled:
            return self.embed(tokens_T if places_N is None else tokens_T[places_N]), offsets_B1
        shape, device = self.prompt_shape, tokens_T.device
        # Whole numbers of some hundred places: numpy takes a fraction of the time that as many small tensor operations do.
        offsets = offsets_B1.cpu().numpy()
        before = np.arange(len(offsets))
        items, rest = np.divmod(offsets - before, shape.tokens_per_unit)
        if rest.any():
            raise ValueError(
                f"prompts of {offsets_B1.diff().tolist()[:8]} tokens: this model reads a begin token and then {shape.tokens_per_unit} numbers of each item"
            )
        place_offsets = before + items * shape.places_per_unit
        places = np.arange(place_offsets[-1]) if places_N is None else places_N.cpu().numpy()
        prompts = np.searchsorted(place_offsets, places, side="right") - 1
        unit, within = np.divmod(places - place_offsets[prompts] - 1, shape.places_per_unit)
        begins, merged = unit < 0, (unit >= 0) & (within == 0)
        firsts = offsets[prompts] + 1 + unit * shape.tokens_per_unit
        rows_IS = torch.from_numpy(firsts[merged][:, None] + np.arange(shape.tokens_per_unit)).to(device)
        parts, order = [self._merged(tokens_T[rows_IS])], [np.flatnonzero(merged)]
        if begins.any():
            parts.append(self._scaled(tokens_T[torch.from_numpy(offsets[prompts[begins]]).to(device)]))
            order.append(np.flatnonzero(begins))
        between = len(places) - sum(map(len, order))
        if between:
            parts.append(self.merger.places[0].expand(between, -1))
            order.append(np.flatnonzero(~(begins | merged)))
        x_ND = parts[0]
        if len(parts) > 1:
            x_ND = torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(order))).to(device)]
        return self._dropped(x_ND), torch.from_numpy(place_offsets).to(device)

    def _merged(self, numbers_IS: Tensor) -> Tensor:
        """One vector per item of a prompt."""
        levels, weight = self.vocabulary.levels, self.merger.proj.weight
        if weight.requires_grad or self.training:
            merged_ID: Tensor = self.merger(self._scaled(numbers_IS[:, :levels]), numbers_IS[:, levels:])
            return merged_ID
        # Weights that nobody trains are multiplied out once; should they be replaced after all, once more.
        key = (weight.data_ptr(), weight._version, weight.dtype, self.model.embed_tokens.weight.data_ptr(), self.model.embed_tokens.weight._version)
        if self._merged_rows is None or self._merged_rows[0] != key:
            firsts = [self.vocabulary.first(level) for level in range(levels)]
            codes = [self._scaled(torch.arange(first, first + size, device=weight.device)) for first, size in zip(firsts, self.config.level_sizes, strict=True)]
            self._merged_rows = key, self.merger.rows(codes, firsts)
        return self._merged_rows[1](numbers_IS)

    def item_vectors(self, tokens_NL: Tensor) -> Tensor:
        """One vector per item, of its codes alone: as a merger reads it, else the sum of its tokens' embeddings.

        Shapes: [N, L] -> [N, D].
        """
        codes_NLD = self._scaled(tokens_NL)
        if not self.config.merger.enabled:
            return codes_NLD.sum(1)
        merged_ND: Tensor = self.merger(codes_NLD, tokens_NL.new_zeros(len(tokens_NL), len(self.config.merger.features)))
        return merged_ND

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, d / 2] of rotary positions."""
        # Frequencies are no buffer: a model in a short type would round them, and turn far places by wrong angles.
        size = self.config.rotary_size
        powers = torch.arange(0, size, 2, device=positions.device).float() / size
        angles = positions.to(torch.float32).unsqueeze(-1) * self.config.rope_theta**-powers
        if size < self.config.head_dim:
            angles = F.pad(angles, (0, (self.config.head_dim - size) // 2))  # the last pairs of a head do not turn
        dtype = self.model.embed_tokens.weight.dtype
        return angles.cos().unsqueeze(-2).to(dtype), angles.sin().unsqueeze(-2).to(dtype)

    def forward(self, tokens_T: Tensor, offsets_B1: Tensor) -> Tensor:
        """Hidden states of packed prompts, one per place; each prompt is causal in itself and counts positions from 0.

        Shapes: [T], [B + 1] -> [P, D], normalised for ``logits``; without a merger every token is a place.
        """
        x_TD, offsets_B1 = self.prompt_vectors(tokens_T, offsets_B1)
        positions_T = torch.arange(len(x_TD), device=x_TD.device) - offsets_B1[:-1].repeat_interleave(offsets_B1.diff())
        cos_T1d, sin_T1d = self.rotation(positions_T)
        for layer in self.layers:
            x_TD = layer.finish(x_TD, layer.attend(x_TD, cos_T1d, sin_T1d, offsets_B1))
        hidden_TD: Tensor = self.model.norm(x_TD)
        return hidden_TD

    @property
    def head_VD(self) -> Tensor:
        """Weight of the head; the embedding's where they are tied."""
        module = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        weight: Tensor = module.weight
        return weight

    def logits(self, hidden: Tensor, level: int, seen_counts: Tensor | None = None) -> Tensor:
        """Logits over a level's full code row; ``seen_counts`` is what a model with ``seen_bias`` wants to know of the history.

        Shapes: [..., D], [..., K] -> [..., K].
        """
        logits = hidden @ self.head_VD[self.vocabulary.row(level)].T
        if self.config.level_scales:
            logits = logits * self.level_log_scale[level].exp()
        if seen_counts is not None:
            logits = logits + self.seen_bias(seen_counts, level).to(logits.dtype)
        return logits

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Logits over every token, [..., V], as Hugging Face computes them; level scales and ``seen_bias`` do not apply."""
        return hidden @ self.head_VD.T

    def save_pretrained(self, folder: Path, kind: str | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` as one of Hugging Face's causal models: Qwen2, Qwen3, or with linear attention Qwen3.5.

        ``kind`` ``qwen3_next`` writes the latter as Qwen3-Next. Layers that Hugging Face has in no model keep our own names.
        """
        from semantide.shared.models.pretrained import save_generator

        save_generator(self, folder, kind)

    @classmethod
    def from_pretrained(cls, folder: Path, level_sizes: tuple[int, ...] | None = None) -> Generator:
        """Read a folder that ``save_pretrained`` or transformers' Qwen2 (Qwen2.5), Qwen3, Qwen3-Next (without experts) or Qwen3.5 wrote.

        ``level_sizes`` says how the tokens divide where the folder's config does not; ``pretrained.py`` says how a folder tells where they lie.
        Raises: NotFound, Corrupt, Conflict.
        """
        from semantide.shared.models.pretrained import load_generator

        return load_generator(folder, level_sizes)
