"""The layers of the generator: normalisation, softmax or linear attention, feed-forward.

Legend: T packed tokens, B sequences, D hidden size, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from semantide.kernels.attention import jagged_attention
from semantide.kernels.dropout import dropout
from semantide.kernels.gating import silu_product
from semantide.kernels.normalisation import rms_norm
from semantide.kernels.rotary import norm_rotate
from semantide.shared.models.linear_layer import FORMS, LinearAttention

if TYPE_CHECKING:
    from semantide.shared.models.generator import GeneratorConfig


class RMSNorm(nn.Module):
    """Division by the root mean square, and a learned factor per feature."""

    def __init__(self, size: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps, self.centred = eps, centred

    @property
    def factor(self) -> Tensor:
        """What each feature is multiplied by."""
        return 1 + self.weight if self.centred else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.factor, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotated queries and keys."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        if config.attention_gate:
            self.gate_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.centred_norms) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.centred_norms) if config.qk_norm else nn.Identity()
        self.gated = config.attention_gate

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
            return norm_rotate(x_THd, norm.factor, cos_T1d, sin_T1d, norm.eps)
        return norm_rotate(x_THd, None, cos_T1d, sin_T1d)

    def output(self, x_TD: Tensor, o_THd: Tensor) -> Tensor:
        """Heads back to the hidden size, where wanted gated by the layer's normalised input."""
        heads = o_THd.flatten(-2)
        y: Tensor = self.o_proj(heads * self.gate_proj(x_TD).sigmoid() if self.gated else heads)
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
    """Attention, softmax or linear, and feed-forward, each added to the residual stream."""

    def __init__(self, config: GeneratorConfig, kind: str) -> None:
        super().__init__()
        self.linear = kind in FORMS
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.centred_norms)
        if self.linear:
            self.linear_attn = LinearAttention(config.linear, FORMS[kind], config.hidden_size, config.rms_norm_eps)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.centred_norms)
        self.mlp = SwiGLU(config)
        self.rate = config.dropout

    def attend(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, offsets_B1: Tensor) -> Tensor:
        """What packed sequences read of their earlier tokens, by heads."""
        if self.linear:
            return self.linear_attn.read(self.input_layernorm(x_TD), offsets_B1)[0]
        return jagged_attention(*self.project(x_TD, cos_T1d, sin_T1d), offsets_B1)

    def project(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax: queries, keys and values of this layer's input."""
        return self.self_attn.project(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def queries(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        """Softmax: queries alone, for a layer of whose places few are asked for."""
        return self.self_attn.queries(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def keys_values(self, x_TD: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax: keys and values alone."""
        return self.self_attn.keys_values(self.input_layernorm(x_TD), cos_T1d, sin_T1d)

    def finish(self, x_TD: Tensor, o_THd: Tensor) -> Tensor:
        """The layer's output from its input and the attention's result."""
        mixer: Attention | LinearAttention = self.linear_attn if self.linear else self.self_attn
        # Only a gate looks at the input again.
        gating_TD = self.input_layernorm(x_TD) if self.linear or self.self_attn.gated else x_TD
        x_TD = x_TD + dropout(mixer.output(gating_TD, o_THd), self.rate, self.training)
        y_TD: Tensor = x_TD + dropout(self.mlp(self.post_attention_layernorm(x_TD)), self.rate, self.training)
        return y_TD
