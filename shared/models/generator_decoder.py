"""Decoding steps of a generator: prompts are read once per request, beams append keys and values and never move them.

Legend: R requests, W beams, T packed prompt tokens, N = R * W rows of a step, D hidden size, H query heads, G key/value heads, d head size,
K codes of a level, C capacity of the beams' stores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semantide.kernels.attention import beam_attention, jagged_attention
from semantide.shared.decoding.ancestry import Ancestry
from semantide.shared.models.generator import Generator
from semantide.shared.models.seen_bias import SeenItems


class DecodingState:
    """Keys and values of a batch of requests: of each prompt once, and of every beam of every step so far."""

    def __init__(self, offsets_R1: Tensor, num_layers: int) -> None:
        self.offsets_R1 = offsets_R1
        self.prompts: list[tuple[Tensor, Tensor]] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.ancestry = Ancestry(len(offsets_R1) - 1, offsets_R1.device)
        self.seen: SeenItems | None = None
        self._num_layers = num_layers

    def reserve(self, rows: int, steps_left: int) -> None:
        """Make room for this step's rows, and for as many in each step that is left."""
        needed = self.ancestry.num_rows + rows
        if self.own and len(self.own[0][0]) >= needed:
            return
        capacity = needed + rows * steps_left
        template = self.prompts[0][0]
        grown = []
        for layer in range(self._num_layers):
            pair = (template.new_empty(capacity, *template.shape[1:]), template.new_empty(capacity, *template.shape[1:]))
            if self.own:
                for new, old in zip(pair, self.own[layer], strict=True):
                    new[: self.ancestry.num_rows] = old[: self.ancestry.num_rows]
            grown.append(pair)
        self.own = grown


class GeneratorDecoder:
    """What beam search needs of a generator: logits of level 0 from prompts, then of each level from the chosen codes."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator.eval()
        self.level_sizes = generator.config.level_sizes

    @torch.inference_mode()
    def begin(self, tokens_T: Tensor, offsets_R1: Tensor) -> tuple[Tensor, DecodingState]:
        """Read the prompts of R requests and return the logits [R, K] of level 0.

        Shapes: ``tokens_T`` packs prompts of at least one token each.
        Raises: ValueError for an empty prompt.
        """
        lengths = offsets_R1.diff()
        if len(lengths) and int(lengths.min()) < 1:
            raise ValueError(f"prompt {int(lengths.argmin())} is empty: a prompt begins with token 0")
        generator = self.generator
        state = DecodingState(offsets_R1, generator.config.num_layers)
        positions_T = torch.arange(len(tokens_T), device=tokens_T.device) - offsets_R1[:-1].repeat_interleave(lengths)
        cos_T1d, sin_T1d = generator.rotation(positions_T)
        x_TD = generator.embed(tokens_T)
        for layer in generator.layers:
            q_THd, k_TGd, v_TGd = layer.project(x_TD, cos_T1d, sin_T1d)
            state.prompts.append((k_TGd, v_TGd))
            x_TD = layer.finish(x_TD, jagged_attention(q_THd, k_TGd, v_TGd, offsets_R1))
        counts_RK = None
        if generator.config.seen_bias:
            state.seen = SeenItems(tokens_T, offsets_R1, generator.vocabulary)
            counts_RK = state.seen.counts(0).squeeze(1)
        return generator.logits(generator.model.norm(x_TD[offsets_R1[1:] - 1]), 0, counts_RK), state

    @torch.inference_mode()
    def step(self, state: DecodingState, level: int, parents_RW: Tensor, codes_RW: Tensor) -> Tensor:
        """Let beam w of request r extend beam ``parents_RW[r, w]`` by a code of level - 1; return the logits [R, W, K] of ``level``.

        Raises: ValueError when levels are not taken in order.
        """
        taken = state.ancestry.rows_RWS.shape[-1]
        if level != taken + 1 or level >= len(self.level_sizes):
            raise ValueError(f"level {level} after {taken} steps: levels follow one another, from 1 to {len(self.level_sizes) - 1}")
        generator, (requests, width) = self.generator, parents_RW.shape
        rows = requests * width
        state.reserve(rows, len(self.level_sizes) - 1 - level)
        begin = state.ancestry.num_rows
        state.ancestry.extend(parents_RW)
        tokens_N = (codes_RW + generator.vocabulary.first(level - 1)).flatten()
        positions_N = (state.offsets_R1.diff() + level - 1).repeat_interleave(width)
        cos_N1d, sin_N1d = generator.rotation(positions_N)
        x_ND = generator.embed(tokens_N)
        for layer, (prompt_k, prompt_v), (own_k, own_v) in zip(generator.layers, state.prompts, state.own, strict=True):
            q_NHd, k_NGd, v_NGd = layer.project(x_ND, cos_N1d, sin_N1d)
            own_k[begin : begin + rows], own_v[begin : begin + rows] = k_NGd, v_NGd
            q_RWHd = q_NHd.unflatten(0, (requests, width))
            o_RWHd = beam_attention(q_RWHd, prompt_k, prompt_v, state.offsets_R1, own_k, own_v, state.ancestry.rows_RWS)
            x_ND = layer.finish(x_ND, o_RWHd.flatten(0, 1))
        hidden_RWD = generator.model.norm(x_ND).unflatten(0, (requests, width))
        if state.seen is None:
            return generator.logits(hidden_RWD, level)
        state.seen.extend(level - 1, parents_RW, codes_RW)
        return generator.logits(hidden_RWD, level, state.seen.counts(level))
