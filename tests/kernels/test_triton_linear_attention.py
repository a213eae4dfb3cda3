"""The Triton kernels of linear attention in Triton's interpreter, on the CPU."""

import itertools
import math
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: install the dev extra to check its kernels in the interpreter")

from semantide.kernels.branch_linear_attention import Branches, branch_linear_attention
from semantide.kernels.linear_attention import Rule, linear_attention, linear_attention_by_chunks

RULES = [Rule(delta, per_channel) for delta, per_channel in itertools.product((False, True), repeat=2)]
# Per channel a chunk has 16 tokens, else 32; a program has 32 channels of values.
CASES = [([], (1, 1), (4, 4), False), ([0, 3], (1, 2), (5, 4), True), ([34], (1, 1), (8, 33), True)]
CASES_EACH = [*CASES[:2], ([18], (1, 1), (8, 4), True)]


def inputs(lengths, rule, heads, sizes, state, dtype=torch.float32):
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(tokens, heads[0], sizes[0]), dim=-1) for _ in range(2))
    g = -draw(*((tokens, heads[1], sizes[0]) if rule.per_channel else (tokens, heads[1]))).exp()
    g[::5], g[1::5] = -math.inf, 0
    beta = draw(tokens, heads[1]).sigmoid() if rule.delta else None
    first = draw(len(lengths), heads[1], *sizes) if state else None
    tensors = (q, k, draw(tokens, heads[1], sizes[1]), g, beta, first)
    return [None if x is None else x.to(dtype).requires_grad_() for x in tensors], torch.tensor([0, *itertools.accumulate(lengths)])


def results(function, tensors, offsets, rule):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    found = function(*leaves[:5], offsets, leaves[5], rule)
    sum((x.float() * torch.arange(x.numel()).view(x.shape).add(1).sin()).sum() for x in found).backward()
    return [*(x.detach() for x in found), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None)]


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule in RULES for case in (CASES_EACH if rule.per_channel else CASES)], ids=str)
def test_values_and_gradients_are_those_of_the_chunks(rule, case):
    tensors, offsets = inputs(case[0], rule, *case[1:])
    found, expected = (results(function, tensors, offsets, rule) for function in (linear_attention.implementation("cuda"), linear_attention_by_chunks))
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, place=place: f"{place}: {m}")


def test_half_precision_keeps_its_type_and_its_states_are_float32():
    # The interpreter multiplies bfloat16 as if its bits were whole numbers, so float16 stands for both.
    rule = Rule(True, False)
    tensors, offsets = inputs([20], rule, (1, 1), (16, 16), False, torch.float16)
    found, expected = (results(function, tensors, offsets, rule) for function in (linear_attention.implementation("cuda"), linear_attention_by_chunks))
    assert [x.dtype for x in found] == [torch.float16, torch.float32, *[torch.float16] * 5]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_branches_off_a_walk_are_those_off_the_chunks(rule):
    lengths = [18 if rule.per_channel else 34, 3]
    branches = Branches(torch.tensor([0, lengths[0], sum(lengths)]), torch.tensor([5, lengths[0], sum(lengths)]), torch.tensor([0, 2, 3, 5]))
    tensors, _ = inputs([sum(lengths) + 5], rule, (1, 2), (8, 33), False)
    found = []
    for dtype in (torch.float32, torch.float64):  # the latter takes the torch way
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors[:5]]
        out = branch_linear_attention.implementation("cuda")(*leaves, branches, rule)
        (out * torch.arange(out.numel(), dtype=dtype).view(out.shape).add(1).sin()).sum().backward()
        found.append([out.detach(), *(x.grad for x in leaves if x is not None)])
    for place, (a, b) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=lambda m, place=place: f"{place}: {m}")
