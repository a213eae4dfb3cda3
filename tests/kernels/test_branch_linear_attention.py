import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from semantide.kernels import branch_linear_attention as module
from semantide.kernels.branch_linear_attention import Branches, branch_linear_attention
from semantide.kernels.linear_attention import Rule

RULES = [Rule(delta, per_channel) for delta, per_channel in itertools.product((False, True), repeat=2)]
TRUNKS = st.lists(
    st.tuples(st.sampled_from([1, 2, 16, 17, 64, 65, 130]), st.lists(st.tuples(st.integers(0, 129), st.sampled_from([0, 1, 2, 3, 9])), max_size=5)), max_size=3
)


def branches_of(trunks):
    """``trunks``: tokens of each sequence, with the place and the tokens of each branch."""
    offsets = [0, *itertools.accumulate(length for length, _ in trunks)]
    ends = [begin + 1 + place % length for begin, (length, own) in zip(offsets, trunks, strict=False) for place, _ in own]
    own = [0, *itertools.accumulate(tokens for _, own in trunks for _, tokens in own)]
    return Branches(torch.tensor(offsets), torch.tensor(ends, dtype=torch.long), torch.tensor(own))


def inputs(branches, rule, heads=(1, 2), sizes=(3, 4), decay=0.3, dtype=torch.float64):
    generator, tokens = torch.Generator().manual_seed(0), branches.trunk + int(branches.offsets_J1[-1])

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(tokens, heads[0], sizes[0]), dim=-1) for _ in range(2))
    g = -decay * draw(*((tokens, heads[1], sizes[0]) if rule.per_channel else (tokens, heads[1]))).exp()
    beta = draw(tokens, heads[1]).sigmoid() if rule.delta else None
    return [None if x is None else x.to(dtype).requires_grad_() for x in (q, k, draw(tokens, heads[1], sizes[1]), g, beta)]


def results(function, tensors, branches, rule):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    found = function(*leaves, branches, rule)
    if found.requires_grad:
        (found * torch.arange(found.numel(), dtype=torch.float64).view(found.shape).add(1).sin().to(found.dtype)).sum().backward()
    return [found.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None)]


def compare(found, expected, rtol, atol):
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        top = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol * top, msg=lambda m, place=place: f"{place}: {m}")


@settings(deadline=None, max_examples=15)
@given(TRUNKS, st.sampled_from(RULES), st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e5]), st.sampled_from([1, 2, 10**6]))
def test_a_branch_reads_what_a_sequence_of_what_it_sees_and_itself_does(trunks, rule, heads, decay, tiles):
    branches = branches_of(trunks)
    tensors = inputs(branches, rule, heads, decay=decay)
    before = module._GROUP_BYTES
    try:
        module._GROUP_BYTES = tiles * 4 * heads[1] * 64 * 128 * 2
        found = results(branch_linear_attention, tensors, branches, rule)
    finally:
        module._GROUP_BYTES = before
    compare(found, results(branch_linear_attention.reference, tensors, branches, rule), 1e-8, 1e-9)
    with torch.no_grad():
        assert torch.equal(branch_linear_attention(*tensors, branches, rule), found[0])


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TRUNKS, st.sampled_from(RULES), st.sampled_from([(3, 20), (33, 16), (130, 5)]), st.sampled_from([0.0, 0.3, 30.0]))
def test_every_instruction_set_gives_the_values_and_gradients_of_float64(instructions, trunks, rule, sizes, decay):
    branches = branches_of(trunks)
    tensors = inputs(branches, rule, (1, 2), sizes, decay, torch.float32)
    exact = results(branch_linear_attention, [None if x is None else x.double() for x in tensors], branches, rule)
    compare(results(branch_linear_attention, tensors, branches, rule), exact, 2e-4, 2e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradcheck(rule):
    branches = branches_of([(3, [(0, 2), (2, 1)]), (18, [(17, 2), (5, 1)])])
    tensors = inputs(branches, rule, (1, 1), (2, 2))
    leaves = [x for x in tensors if x is not None]
    for function in (branch_linear_attention, branch_linear_attention.reference):

        def run(*given, function=function):
            rest = iter(given)
            return function(*(None if x is None else next(rest) for x in tensors), branches, rule)

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decay_of_nothing_and_of_all_and_no_writing(rule):
    branches = branches_of([(70, [(3, 3), (3, 2), (69, 4)]), (5, [(4, 3)])])
    tensors = inputs(branches, rule, dtype=torch.float32)
    with torch.no_grad():
        tensors[3][::3], tensors[3][1::3] = -math.inf, 0
        if rule.delta:
            tensors[4][::2], tensors[4][1::4] = 0, 1
    found = results(branch_linear_attention, tensors, branches, rule)
    assert all(bool(x.isfinite().all()) for x in found)
    compare(found, results(branch_linear_attention.reference, [None if x is None else x.double() for x in tensors], branches, rule), 2e-4, 2e-5)


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that is made, and the states among them: tensors that end with a key's and a value's size."""

    def __init__(self, state):
        super().__init__()
        self.state, self.largest, self.states = state, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                if x.shape[-2:] == self.state:
                    self.states = max(self.states, x.numel() // (self.state[0] * self.state[1]))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_branch_has_a_state_of_its_own_forward_or_backward(rule, dtype, monkeypatch):
    size, found = (72, 68), []
    monkeypatch.setattr(module, "_GROUP_BYTES", 2**18)
    for many in (40, 160):
        branches = branches_of([(130, [(place % 130, 2) for place in range(0, 3 * many, 3)])])
        tensors = inputs(branches, rule, (1, 1), size, dtype=dtype)
        with Sizes(size) as sizes:
            results(branch_linear_attention, tensors, branches, rule)
        found.append(sizes)
    assert {each.states for each in found} == {found[0].states} and found[0].states <= 9  # chunks have 16 tokens or more
    assert found[1].largest <= 4 * found[0].largest


def test_branches_that_follow_nothing_are_refused():
    for ends in ([0], [4]):
        with pytest.raises(ValueError, match="1 of 1 branches go on from no token of 3"):
            Branches(torch.tensor([0, 3]), torch.tensor(ends), torch.tensor([0, 1]))
    branches = branches_of([(3, [(1, 2)])])
    with pytest.raises(ValueError, match="3 tokens behind a trunk of 3, but 2 in branches"):
        branch_linear_attention(*inputs(branches_of([(3, [(1, 3)])]), RULES[0]), branches, RULES[0])
