"""The generator: a decoder-only transformer over the tokens of semantic ids, with the layers of the Qwen family.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU; queries and keys are normalised as in Qwen3 or have biases as in Qwen2.5.
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

import torch
from torch import Tensor, nn

from semantide.kernels.attention import jagged_attention
from semantide.kernels.dropout import dropout
from semantide.kernels.gating import silu_product
from semantide.kernels.normalisation import rms_norm
from semantide.kernels.rotary import norm_rotate
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
        if self.seen_bias and not self.layout.plain:
            raise ValueError(f"seen_bias counts the items of histories with one begin token and nothing between items, not of {self.layout}")
        if self.merger.enabled and not self.layout.plain:
            raise ValueError(f"merger merges the items of histories with one begin token and nothing between items, not of {self.layout}")
        for name in ("dropout", "embedding_dropout", "token_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share from 0 up to but not including 1")


class RMSNorm(nn.Module):
    """Division by the root mean square, and a learned factor per feature."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotated queries and keys."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, d], keys and values [T, G, d] at the given rotations."""
        return self.queries(x_TD, cos_T1d, sin_T1d), *self.keys_values(x_TD, cos_T1d, sin_T1d)

    def queries(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        """Queries [T, H, d]."""
        return self._turn(self.q_proj(x_TD), self.q_norm, cos_T1d, sin_T1d)

    def keys_values(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, d]."""
        return self._turn(self.k_proj(x_TD), self.k_norm, cos_T1d, sin_T1d), self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))

    def _turn(self, x: Tensor, norm: nn.Module, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        x_THd = x.unflatten(-1, (-1, self.head_dim))
        if isinstance(norm, RMSNorm):
            return norm_rotate(x_THd, norm.weight, cos_T1d, sin_T1d, norm.eps)
        return norm_rotate(x_THd, None, cos_T1d, sin_T1d)

    def output(self, o_THd: Tensor) -> Tensor:
        """Heads back to the hidden size."""
        y: Tensor = self.o_proj(o_THd.flatten(-2))
        return y


class SwiGLU(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Feature mixing at each place."""
        y: Tensor = self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))
        return y


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        self.rate = config.dropout

    def project(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this layer's input."""
        return self.self_attn.project(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def queries(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        """Queries alone, for a layer of whose places few are asked for."""
        return self.self_attn.queries(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def keys_values(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone."""
        return self.self_attn.keys_values(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def finish(self, x_TD: Tensor, o_THd: Tensor) -> Tensor:
        """The layer's output from its input and the attention's result."""
        x_TD = x_TD + dropout(self.self_attn.output(o_THd), self.rate, self.training)
        y_TD: Tensor = x_TD + dropout(self.mlp(self.post_attention_layernorm(x_TD)), self.rate, self.training)
        return y_TD


class Trunk(nn.Module):
    """Embedding, layers and last normalisation: what Hugging Face calls ``model``."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


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
                damping = (2 * self.config.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
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
        before_B1 = torch.arange(len(offsets_B1), device=device)
        item_tokens_B1 = offsets_B1 - before_B1
        if bool((item_tokens_B1 % shape.tokens_per_unit).any()):
            raise ValueError(
                f"prompts of {offsets_B1.diff().tolist()[:8]} tokens: this model reads a begin token and then {shape.tokens_per_unit} numbers of each item"
            )
        place_offsets_B1 = before_B1 + item_tokens_B1 // shape.tokens_per_unit * shape.places_per_unit
        if places_N is None:
            places_N = torch.arange(int(place_offsets_B1[-1]), device=device)
        prompts_N = torch.searchsorted(place_offsets_B1, places_N, right=True) - 1
        ahead_N = places_N - place_offsets_B1[prompts_N]  # of its prompt's begin
        begin_K = (ahead_N == 0).nonzero().squeeze(1)
        item_I = ((ahead_N - 1) % shape.places_per_unit == 0).logical_and_(ahead_N > 0).nonzero().squeeze(1)
        first_I = offsets_B1[prompts_N[item_I]] + 1 + (ahead_N[item_I] - 1) // shape.places_per_unit * shape.tokens_per_unit
        merged_ID = self._merged(tokens_T[first_I.unsqueeze(1) + torch.arange(shape.tokens_per_unit, device=device)])
        # What is neither lies between two items.
        x_ND = (self.merger.places or (merged_ID.new_zeros(merged_ID.shape[1]),))[0].repeat(len(places_N), 1)
        x_ND = x_ND.index_copy(0, begin_K, self._scaled(tokens_T[offsets_B1[prompts_N[begin_K]]])).index_copy(0, item_I, merged_ID)
        return self._dropped(x_ND), place_offsets_B1

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
        powers = torch.arange(0, self.config.head_dim, 2, device=positions.device).float() / self.config.head_dim
        angles = positions.to(torch.float32).unsqueeze(-1) * self.config.rope_theta**-powers
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
            x_TD = layer.finish(x_TD, jagged_attention(*layer.project(x_TD, cos_T1d, sin_T1d), offsets_B1))
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

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` as Hugging Face's Qwen3ForCausalLM or Qwen2ForCausalLM."""
        from semantide.shared.models.pretrained import save_generator

        save_generator(self, folder)

    @classmethod
    def from_pretrained(cls, folder: Path, level_sizes: tuple[int, ...] | None = None) -> Generator:
        """Read a folder that ``save_pretrained`` or transformers' Qwen3ForCausalLM or Qwen2ForCausalLM (Qwen2.5) wrote.

        ``level_sizes`` says how the tokens divide where the folder's config does not; ``pretrained.py`` says how a folder tells where they lie.
        Raises: NotFound, Corrupt, Conflict.
        """
        from semantide.shared.models.pretrained import load_generator

        return load_generator(folder, level_sizes)
