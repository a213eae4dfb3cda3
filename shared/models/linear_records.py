"""What a layer of linear attention records of tokens that follow shared states: beams that are searched, and given items behind prompts.

Legend: B tokens in question, N recorded ones, S behind and with each, R shared states and what came before them, M states to go on from, C channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semantide.kernels.beam_convolution import beam_convolution
from semantide.kernels.beam_linear_attention import BeamRecords, beam_linear_attention
from semantide.shared.models.linear_layer import Form, LinearAttention, LinearConfig


@dataclass(frozen=True)
class TokenRecords:
    """A row for each token, written once: what it did to the state, and what went into the convolution.

    Shapes: ``inputs_NC`` [N, C].
    """

    steps: BeamRecords
    inputs_NC: Tensor

    @classmethod
    def empty(cls, rows: int, config: LinearConfig, form: Form, like: Tensor, dtype: torch.dtype) -> TokenRecords:
        """Room for so many tokens, in this type but for the decays; ``like`` says where and how wide sums are."""
        wide = torch.promote_types(like.dtype, torch.float32)
        states = like.new_empty(0, config.num_value_heads, config.key_head_dim, config.value_head_dim, dtype=wide)
        steps = BeamRecords.empty(rows, states, config.num_key_heads, form.rule.per_channel, dtype)
        return cls(steps, like.new_empty(rows, config.channels, dtype=dtype))

    @property
    def num_bytes(self) -> int:
        """What all rows occupy."""
        return self.steps.num_bytes + self.inputs_NC.nbytes

    def rows(self, rows_N: Tensor) -> TokenRecords:
        """These rows alone, in this order."""
        return TokenRecords(self.steps.rows(rows_N), self.inputs_NC[rows_N])

    def grown(self, rows: int, used: int) -> TokenRecords:
        """Room for so many rows, the first ``used`` of which are these."""
        inputs_NC = self.inputs_NC.new_empty(rows, self.inputs_NC.shape[1])
        inputs_NC[:used] = self.inputs_NC[:used]
        return TokenRecords(self.steps.grown(rows, used), inputs_NC)

    def read(
        self,
        mixer: LinearAttention,
        x_BD: Tensor,
        before_RQC: Tensor,
        requests_B: Tensor,
        states_MHde: Tensor,
        bases_B: Tensor,
        rows_BS: Tensor,
        since: int = 0,
    ) -> Tensor:
        """What tokens read, [B, H, e], from a layer's normalised input; what is recorded of them goes to the rows that ``rows_BS`` names last.

        The state that a token goes on from knows of the first ``since`` columns already.
        """
        given = mixer.operands(x_BD, beam_convolution(mixer.in_proj_qkv(x_BD), mixer.taps_CK, before_RQC, requests_B, self.inputs_NC, rows_BS))
        wide = states_MHde.dtype
        g_BH1 = given.g.to(wide) if given.g.dim() == 3 else given.g.to(wide).unsqueeze(-1)
        beta_BH = None if given.beta_TH is None else given.beta_TH.to(wide)
        operands = (given.q_TGd.to(wide), given.k_TGd.to(wide), given.v_THe.to(wide), g_BH1, beta_BH)
        return given.result(beam_linear_attention(*operands, states_MHde, bases_B, self.steps, rows_BS[:, since:]).to(x_BD.dtype))
