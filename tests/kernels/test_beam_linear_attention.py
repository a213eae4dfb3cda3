import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semantide.kernels.beam_linear_attention import BeamRecords, beam_linear_attention, break_even_depth, materialise

RULES = [(delta, per_channel) for delta in (False, True) for per_channel in (False, True)]


class Case:
    """Random beams of several requests, step by step, and what a state of each beam's own gives."""

    def __init__(self, requests: int, groups: int, share: int, size: int, value_size: int, rule: tuple[bool, bool], seed: int, dtype: torch.dtype, strength: float = 1.0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.groups, self.heads, self.size, self.value_size, self.dtype, self.strength = groups, groups * share, size, value_size, dtype, strength
        self.delta, self.per_channel = rule
        self.states = self.draw(requests, self.heads, size, value_size)
        self.own_states = self.states.double()
        self.bases = torch.arange(requests)
        self.rows = torch.empty(requests, 0, dtype=torch.long)
        self.records = BeamRecords.empty(0, self.states, groups, self.per_channel)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def tokens(self, beams: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        q, k = (torch.nn.functional.normalize(self.draw(beams, self.groups, self.size), dim=-1) for _ in range(2))
        decay = -self.strength * torch.rand(beams, self.heads, self.size if self.per_channel else 1, generator=self.random, dtype=torch.float64).to(self.dtype)
        beta = torch.rand(beams, self.heads, generator=self.random, dtype=torch.float64).to(self.dtype) if self.delta else None
        return q, k, self.draw(beams, self.heads, self.value_size), decay, beta

    def advance(self, width: int) -> None:
        """Beams follow random parents of their own request."""
        chosen = []
        for base in self.bases.unique().tolist():
            live = (self.bases == base).nonzero().squeeze(1)
            chosen.append(live[torch.randint(len(live), (width,), generator=self.random)])
        parents = torch.cat(chosen)
        begin = len(self.records)
        self.records = self.records.grown(begin + len(parents), begin)
        self.rows = torch.cat([self.rows[parents], torch.arange(begin, begin + len(parents))[:, None]], 1)
        self.bases, self.own_states = self.bases[parents], self.own_states[parents]

    def expected(self, tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]) -> Tensor:
        """Beam by beam, each turning its own state."""
        q, k, v, g, beta = (None if x is None else x.double() for x in tokens)
        share = self.heads // self.groups
        q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
        self.own_states = self.own_states * g.exp().unsqueeze(-1)
        delta = v if beta is None else beta.unsqueeze(-1) * (v - torch.einsum("bhde,bhd->bhe", self.own_states, k))
        self.own_states = self.own_states + torch.einsum("bhd,bhe->bhde", k, delta)
        return torch.einsum("bhde,bhd->bhe", self.own_states, q)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (3, 1)]), st.sampled_from([(1, 1), (4, 3), (16, 16), (5, 33)]), st.sampled_from(RULES), st.integers(0, 9),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_beams_equal_those_with_states_of_their_own(requests, heads, sizes, rule, seed, widths) -> None:
    case = Case(requests, *heads, *sizes, rule, seed, torch.float64)
    for width in widths:
        case.advance(width)
        tokens = case.tokens(len(case.bases))
        o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
        torch.testing.assert_close(o, case.expected(tokens), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(materialise(case.states, case.bases, case.records, case.rows), case.own_states, rtol=1e-9, atol=1e-11)
