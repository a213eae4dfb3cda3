"""The Triton kernel of linear attention of beams in Triton's interpreter, on the CPU."""

import itertools
import math
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: install the dev extra to check its kernels in the interpreter")

from semantide.kernels.beam_linear_attention import BeamRecords, beam_linear_attention
from semantide.kernels.triton_beam_linear_attention import beam_linear_attention_triton

RULES = list(itertools.product((False, True), repeat=2))


def inputs(beams, rule, groups, heads, size, value_size, requests, seed=0):
    random = torch.Generator().manual_seed(seed)
    delta, per_channel = rule
    q, k = (torch.nn.functional.normalize(torch.randn(beams, groups, size, generator=random), dim=-1) for _ in range(2))
    g = -torch.rand(beams, heads, size if per_channel else 1, generator=random)
    g[::4], g[1::4] = -math.inf, 0
    beta = torch.rand(beams, heads, generator=random) if delta else None
    states = torch.randn(requests, heads, size, value_size, generator=random)
    return (q, k, torch.randn(beams, heads, value_size, generator=random), g, beta, states), random


def both(tensors, bases, rows, records):
    outputs = []
    for function in (beam_linear_attention.registry["cuda"], beam_linear_attention.reference):
        kept = records.grown(len(records), len(records))
        outputs.append((function(*tensors, bases, kept, rows), kept.k_NGd, kept.delta_NHe, kept.decay_NH1))
    return outputs


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 2, 5, 3), (2, 2, 16, 70)])
def test_beams_equal_the_reference(rule, shape):
    (tensors, random), requests = inputs(40, rule, *shape, 2), torch.arange(2).repeat_interleave(torch.tensor([37, 3]))
    records = BeamRecords.empty(120, tensors[-1], shape[0], rule[1])
    for kept in (records.k_NGd, records.delta_NHe):
        kept.normal_(generator=random)
    records.decay_NH1.uniform_(-1, 0, generator=random)
    rows = torch.cat([torch.randint(80, (40, 2), generator=random), torch.arange(80, 120)[:, None]], 1)
    for ours, theirs in zip(*both(tensors, requests, rows, records), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES[1::2])
def test_what_nobody_follows_is_not_recorded(rule):
    tensors, _ = inputs(4, rule, 1, 2, 4, 4, 2)
    rows = torch.tensor([[-1, 0], [-1, 1], [0, -1], [-1, -1]])
    records = BeamRecords.empty(3, tensors[-1], 1, rule[1])
    for kept in (records.k_NGd, records.delta_NHe, records.decay_NH1):
        kept.fill_(7.0)
    for ours, theirs in zip(*both(tensors, torch.tensor([0, 1, 0, 0]), rows, records), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES[1::2])
def test_a_tree_in_one_call_equals_the_reference(rule):
    tensors, _ = inputs(6, rule, 1, 2, 4, 4, 2)
    rows = torch.tensor([[-1, -1, 0], [-1, -1, 1], [-1, 0, 2], [-1, 1, 3], [0, 2, 4], [-1, 0, 5]])
    records = BeamRecords.empty(6, tensors[-1], 1, rule[1])
    for kept in (records.k_NGd, records.delta_NHe, records.decay_NH1):
        kept.zero_()
    for ours, theirs in zip(*both(tensors, torch.tensor([0, 1, 0, 1, 0, 0]), rows, records), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_shorter_records_and_values_keep_their_types():
    tensors, random = inputs(5, (True, False), 1, 1, 8, 8, 1)
    records = BeamRecords.empty(10, tensors[-1], 1, False, torch.float16)
    for kept in (records.k_NGd, records.delta_NHe):
        kept.copy_(torch.randn(kept.shape, generator=random))
    records.decay_NH1.zero_()
    rows = torch.stack([torch.arange(5), torch.arange(5, 10)], 1)
    ours, theirs = both(tensors, torch.zeros(5, dtype=torch.long), rows, records)
    assert ours[1].dtype == ours[2].dtype == torch.float16
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=2e-3, atol=1e-3)
    assert len(beam_linear_attention_triton(*(x[:0] for x in tensors[:5]), tensors[5], rows[:0, 0], records, rows[:0])) == 0
