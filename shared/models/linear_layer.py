"""The mixer of a linear-attention layer: a state per head in the place of attention over all earlier tokens.

Queries, keys and values are mixed over a few tokens by a short convolution; decay and share of writing are learned of each token; what is read is
normalised and gated. ``FORMS`` says in what the four published forms differ, by the names that a config's ``layer_types`` gives. Parameters are named as in Hugging
Face's Qwen3.5.
Legend: T packed tokens, B sequences, D hidden size, H value heads, G key heads, d size of a key, e size of a value, C channels of the convolution, Q inputs before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.kernels.branch_linear_attention import Branches, branch_linear_attention
from semantide.kernels.gating import silu_product
from semantide.kernels.linear_attention import Rule, linear_attention
from semantide.kernels.normalisation import rms_norm
from semantide.kernels.short_convolution import last_inputs, short_convolution


@dataclass(frozen=True)
class LinearConfig:
    """Shape of the linear-attention layers."""

    num_key_heads: int = 2
    num_value_heads: int = 2
    key_head_dim: int = 32
    value_head_dim: int = 32
    conv_kernel: int = 4
    """Tokens that the short convolution sees, the present one among them."""

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel"):
            if getattr(self, name) < 1:
                raise ValueError(f"linear.{name} is {getattr(self, name)}: give at least 1")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"linear.num_value_heads {self.num_value_heads} must be a multiple of linear.num_key_heads {self.num_key_heads}")

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Form:
    """What a form of linear attention does beside decaying and writing."""

    rule: Rule
    unit_keys: bool = False
    """Whether queries and keys have length 1, without which the delta rule could grow."""
    steps: bool = False
    """Whether a value is written by the token's step size and also goes past the state, as in a state space."""


FORMS: dict[str, Form] = {
    "linear_attention": Form(Rule(delta=True, per_channel=False), unit_keys=True),
    "kda": Form(Rule(delta=True, per_channel=True), unit_keys=True),
    "gla": Form(Rule(delta=False, per_channel=True)),
    "mamba2": Form(Rule(delta=False, per_channel=False), steps=True),
}
"""``linear_attention`` is the gated delta rule, as Hugging Face calls it."""


class Operands(NamedTuple):
    """What the operator wants of each token, and what goes past it (None where nothing does).

    Shapes: ``q_TGd``, ``k_TGd``, ``v_THe``, ``g`` [T, H] or [T, H, d], ``beta_TH`` or None, ``past_THe`` or None.
    """

    q_TGd: Tensor
    k_TGd: Tensor
    v_THe: Tensor
    g: Tensor
    beta_TH: Tensor | None
    past_THe: Tensor | None

    def result(self, o_THe: Tensor) -> Tensor:
        """What a token gets, from what it read of the state."""
        return o_THe if self.past_THe is None else o_THe + self.past_THe


class LinearState(NamedTuple):
    """All that sequences leave behind, however long they are.

    Shapes: ``inputs_BQC`` of the convolution, ``state_BHde`` in float32.
    """

    inputs_BQC: Tensor
    state_BHde: Tensor


class HeadNorm(nn.Module):
    """Normalisation of each head's result, then the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, o_THe: Tensor, gate_THe: Tensor) -> Tensor:
        """Shapes: twice [T, H, e] -> [T, H, e]."""
        return silu_product(gate_THe, rms_norm(o_THe, self.weight.to(o_THe.dtype), self.eps))


class LinearAttention(nn.Module):
    """Linear attention with short convolution, decay, output norm and gate."""

    def __init__(self, config: LinearConfig, form: Form, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.config, self.form = config, form
        heads, decays = config.num_value_heads, config.num_value_heads * (config.key_head_dim if form.rule.per_channel else 1)
        self.in_proj_qkv = nn.Linear(hidden_size, config.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, heads * config.value_head_dim, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, decays, bias=False)
        if form.rule.delta:
            self.in_proj_b = nn.Linear(hidden_size, heads, bias=False)
        self.conv1d = nn.Conv1d(config.channels, config.channels, config.conv_kernel, groups=config.channels, bias=False)
        # Half-lives from a token to some hundred, over the heads' channels.
        self.A_log = nn.Parameter(nn.init.uniform_(torch.empty(heads), 1, 16).log_())
        step = nn.init.uniform_(torch.empty(decays), -6.9, -2.3).exp_()
        self.dt_bias = nn.Parameter(step + (-(-step).expm1()).log())
        if form.steps:
            self.D = nn.Parameter(torch.ones(heads))
        self.norm = HeadNorm(config.value_head_dim, eps)
        self.out_proj = nn.Linear(heads * config.value_head_dim, hidden_size, bias=False)

    @property
    def taps_CK(self) -> Tensor:
        """Weights of the short convolution."""
        weight: Tensor = self.conv1d.weight
        return weight.squeeze(1)

    def operands(self, x_TD: Tensor, mixed_TC: Tensor) -> Operands:
        """What the operator wants of tokens, from the layer's normalised input and the short convolution of its ``in_proj_qkv``."""
        config, form = self.config, self.form
        keys = config.num_key_heads * config.key_head_dim
        q, k, v = mixed_TC.split([keys, keys, config.num_value_heads * config.value_head_dim], -1)
        q_TGd, k_TGd = (x.unflatten(-1, (-1, config.key_head_dim)) for x in (q, k))
        v_THe, past_THe = v.unflatten(-1, (-1, config.value_head_dim)), None
        if form.unit_keys:
            q_TGd, k_TGd = (_unit(x) for x in (q_TGd, k_TGd))
        # Exponentials of a number in a short type have few digits left.
        step = F.softplus(self.in_proj_a(x_TD).float() + self.dt_bias)
        if form.rule.per_channel:
            step = step.unflatten(-1, (-1, config.key_head_dim))
        rate_H = self.A_log.float().exp()
        g = -(rate_H[:, None] if form.rule.per_channel else rate_H) * step
        beta_TH = self.in_proj_b(x_TD).sigmoid().to(v_THe.dtype) if form.rule.delta else None
        if form.steps:
            past_THe = self.D[:, None] * v_THe
            v_THe = (step.unsqueeze(-1) * v_THe).to(v_THe.dtype)
        else:
            q_TGd = q_TGd * config.key_head_dim**-0.5
        return Operands(q_TGd, k_TGd, v_THe, g, beta_TH, past_THe)

    def read(self, x_TD: Tensor, offsets_B1: Tensor, before: LinearState | None = None) -> tuple[Tensor, LinearState]:
        """What the tokens of packed sequences read, [T, H, e], and what the sequences leave behind; ``output`` brings it back to the hidden size."""
        before = before if before is not None else self.nothing(len(offsets_B1) - 1, x_TD)
        inputs_TC = self._inputs(x_TD)
        given = self.operands(x_TD, short_convolution(inputs_TC, self.taps_CK, offsets_B1, before.inputs_BQC))
        o_THe, state_BHde = linear_attention(*given[:5], offsets_B1, before.state_BHde, self.form.rule)
        return given.result(o_THe), LinearState(last_inputs(inputs_TC, offsets_B1, before.inputs_BQC), state_BHde)

    def read_branches(self, x_TD: Tensor, branches: Branches) -> Tensor:
        """What tokens of packed sequences, and behind them those of branches off these, read, [T, H, e]; see ``branch_linear_attention``."""
        trunk_NC, own_IC = self._inputs(x_TD).tensor_split([branches.trunk])
        mixed_NC = short_convolution(trunk_NC, self.taps_CK, branches.offsets_B1)
        mixed_IC = short_convolution(own_IC, self.taps_CK, branches.offsets_J1, branches.inputs_before(trunk_NC, self.config.conv_kernel - 1))
        given = self.operands(x_TD, torch.cat([mixed_NC, mixed_IC]))
        return given.result(branch_linear_attention(*given[:5], branches, self.form.rule))

    def _inputs(self, x_TD: Tensor) -> Tensor:
        """What the short convolution mixes; under autocast all that follows is float32, in which states and decays are kept."""
        inputs_TC: Tensor = self.in_proj_qkv(x_TD)
        return inputs_TC.float() if torch.is_autocast_enabled(inputs_TC.device.type) else inputs_TC

    def nothing(self, sequences: int, x_TD: Tensor) -> LinearState:
        """What stands before the first tokens."""
        config = self.config
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        return LinearState(
            x_TD.new_zeros(sequences, config.conv_kernel - 1, config.channels),
            x_TD.new_zeros(sequences, config.num_value_heads, config.key_head_dim, config.value_head_dim, dtype=wide),
        )

    def output(self, x_TD: Tensor, o_THe: Tensor) -> Tensor:
        """Heads back to the hidden size, gated by the layer's normalised input."""
        gate_THe = self.in_proj_z(x_TD).unflatten(-1, (-1, self.config.value_head_dim))
        y_TD: Tensor = self.out_proj(self.norm(o_THe, gate_THe).flatten(-2))
        return y_TD


def _unit(x: Tensor) -> Tensor:
    """Each row divided by its length."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
