import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.kernels.linear_attention import Rule, linear_attention

RULES = [Rule(delta, per_channel) for delta, per_channel in itertools.product((False, True), repeat=2)]


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def inputs(lengths, rule, heads=(1, 2), sizes=(3, 4), decay=0.3, state=True, seed=0, dtype=torch.float64):
    """Leaves: queries, keys (of length one, as the delta rule wants them), values, decays, shares of writing and states."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(tokens, heads[0], sizes[0]), dim=-1) for _ in range(2))
    g = -decay * draw(*((tokens, heads[1], sizes[0]) if rule.per_channel else (tokens, heads[1]))).exp()
    beta = draw(tokens, heads[1]).sigmoid() if rule.delta else None
    first = draw(len(lengths), heads[1], *sizes) if state else None
    return [None if x is None else x.to(dtype).requires_grad_() for x in (q, k, draw(tokens, heads[1], sizes[1]), g, beta, first)]


def call(tensors, offsets, rule, reference=False):
    q, k, v, g, beta, state = tensors
    return (linear_attention.reference if reference else linear_attention)(q, k, v, g, beta, offsets, state, rule)


def results(tensors, offsets, rule, reference=False):
    """Outputs, states and the gradients of a weighted sum of both."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    found = call(leaves, offsets, rule, reference)
    loss = sum((x * torch.arange(x.numel(), dtype=torch.float64).view(x.shape).add(1).sin().to(x.dtype)).sum() for x in found)
    if loss.requires_grad:
        loss.backward()
    return [*(x.detach() for x in found), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None)]


def compare(found, expected, rtol=1e-4, atol=2e-5):
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        top = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol * top, msg=lambda m, place=place: f"{place}: {m}")


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradcheck_of_the_reference_and_of_chunks(rule: Rule) -> None:
    lengths = [3, 0, 1]
    tensors = inputs(lengths, rule, sizes=(2, 3))
    given = [x for x in tensors if x is not None]
    for reference in (True, False):

        def run(*leaves: torch.Tensor, reference=reference):
            rest = iter(leaves)
            return call([None if x is None else next(rest) for x in tensors], offsets_of(lengths), rule, reference)

        assert torch.autograd.gradcheck(run, given)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 130]), max_size=4),
    st.sampled_from(RULES),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 6)]),
    st.sampled_from([(1, 1), (5, 3), (16, 8), (8, 33)]),
    st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e5]),
    st.booleans(),
)
def test_chunks_give_the_values_and_gradients_of_the_recurrence(lengths, rule, heads, sizes, decay, state):
    tensors, offsets = inputs(lengths, rule, heads, sizes, decay, state), offsets_of(lengths)
    compare(results(tensors, offsets, rule), results(tensors, offsets, rule, reference=True), 1e-8, 1e-9)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0, 1, 5, 13, 32, 33, 64, 65, 130]), max_size=3),
    st.sampled_from(RULES),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    st.sampled_from([(1, 1), (3, 20), (16, 16), (32, 5), (33, 64), (64, 33), (130, 16)]),
    st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e5]),
    st.booleans(),
)
def test_every_instruction_set_gives_the_values_and_gradients_of_the_recurrence(instructions, lengths, rule, heads, sizes, decay, state):
    tensors, offsets = inputs(lengths, rule, heads, sizes, decay, state, dtype=torch.float32), offsets_of(lengths)
    exact = results([None if x is None else x.double() for x in tensors], offsets, rule)
    compare(results(tensors, offsets, rule), exact, 2e-4, 2e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_threads_do_not_change_a_bit(instructions, rule):
    lengths = [130, 3, 0, 70]
    tensors, offsets = inputs(lengths, rule, dtype=torch.float32), offsets_of(lengths)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(tensors, offsets, rule))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_views_are_read_where_they_lie_and_gradients_come_for_what_asks_only(instructions):
    rule, lengths = Rule(True, False), [70, 9]
    q, k, v, g, beta, state = (x.detach() for x in inputs(lengths, rule, (2, 2), (16, 16), dtype=torch.float32))
    packed, offsets = torch.stack([q, k, v], 1).flatten(1), offsets_of(lengths)
    views = list(packed.unflatten(1, (3, 2, 16)).unbind(1))
    expected = results([q, k, v, g, beta, state], offsets, rule)
    for wanted in range(6):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate([*views, g, beta, state])]
        o, end = call(leaves, offsets, rule)
        torch.testing.assert_close((o, end), (expected[0], expected[1]))
        o.sum().backward()
        assert [x.grad is not None for x in leaves] == [i == wanted for i in range(6)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
    call(leaves, offsets, rule)[1].square().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    call(exact, offsets, rule)[1].square().sum().backward()
    compare([x.grad for x in leaves[1:]], [x.grad for x in exact[1:]])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decay_of_nothing_and_of_all_and_no_writing(rule: Rule, dtype: torch.dtype) -> None:
    lengths = [70, 5]
    tensors, offsets = inputs(lengths, rule, dtype=dtype), offsets_of(lengths)
    with torch.no_grad():
        tensors[3][::3] = -math.inf
        tensors[3][1::3] = 0
        if rule.delta:
            tensors[4][::2] = 0
            tensors[4][1::4] = 1
    found, expected = results(tensors, offsets, rule), results([None if x is None else x.double() for x in tensors], offsets, rule, reference=True)
    assert all(bool(x.isfinite().all()) for x in found)
    compare(found, expected, *((2e-4, 2e-5) if dtype == torch.float32 else (1e-8, 1e-9)))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_sequence_goes_on_from_its_state_as_if_it_had_not_been_cut(rule: Rule) -> None:
    lengths = [40, 90]
    tensors, offsets = [None if x is None else x.detach() for x in inputs(lengths, rule)], offsets_of(lengths)
    whole, end = call(tensors, offsets, rule)
    cuts = [17, 70]
    rows = [torch.cat([torch.arange(b, b + c) for b, c in zip(offsets.tolist(), cuts, strict=False)])]
    rows.append(torch.cat([torch.arange(b + c, e) for (b, e), c in zip(itertools.pairwise(offsets.tolist()), cuts, strict=True)]))
    state, parts = tensors[5], []
    for part, sizes in zip(rows, (cuts, [n - c for n, c in zip(lengths, cuts, strict=True)]), strict=True):
        o, state = call([*(None if x is None else x[part] for x in tensors[:5]), state], offsets_of(sizes), rule)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts)[torch.cat(rows).argsort()], whole)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_not_a_number_stays_in_its_sequence(rule: Rule, dtype: torch.dtype) -> None:
    lengths = [70, 20, 70]
    tensors, offsets = inputs(lengths, rule, dtype=dtype), offsets_of(lengths)
    expected = results(tensors, offsets, rule)
    with torch.no_grad():
        tensors[2][75] = math.nan
    found = results(tensors, offsets, rule)
    others = torch.cat([torch.arange(70), torch.arange(90, 160)])
    assert bool(found[0][75:90].isnan().all()) and bool(found[1][1].isnan().any())
    for place in (0, *range(2, 6 + rule.delta)):
        torch.testing.assert_close(found[place][others], expected[place][others])


def test_what_does_not_fit_is_refused() -> None:
    rule, lengths = Rule(True, False), [3]
    offsets = offsets_of(lengths)
    q, k, v, g, beta, state = inputs(lengths, rule)
    for wrong, message in (
        ((q, k[:2], v, g, beta, offsets, state, rule), "queries and keys of equal shape"),
        ((q, k, v, g[:, None], beta, offsets, state, rule), "give decays"),
        ((q, k, v, g, None, offsets, state, rule), "with delta only"),
        ((q, k, v, g, beta, offsets, state, Rule(False, False)), "with delta only"),
        ((q, k, v, g, beta, offsets, state[:, :1], rule), "one for each sequence"),
        ((q, k, v, g, beta, offsets[:1], None, rule), "offsets"),
        ((q, k, v, -g, beta, offsets, state, rule), "none above 0"),
    ):
        for function in (linear_attention, linear_attention.reference):
            with pytest.raises(ValueError, match=message):
                function(*wrong)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_short_types_are_summed_in_float32(rule: Rule) -> None:
    lengths = [33, 4]
    tensors, offsets = [None if x is None else x.detach().bfloat16() for x in inputs(lengths, rule)], offsets_of(lengths)
    o, state = call(tensors, offsets, rule)
    exact, _ = call([None if x is None else x.double() for x in tensors], offsets, rule)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.double(), exact, rtol=1e-2, atol=1e-2)
