import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.kernels.attention import jagged_attention, jagged_attention_by_length
from semantide.kernels.jagged_fusion_attention import (
    BUCKET_LOG,
    LONGEST_SECONDS,
    bucket_bounds,
    jagged_bias_attention,
    jagged_fusion_attention,
    time_buckets,
)

FORMS = ["silu", "softmax", "bias"]


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def inputs(lengths: list[int], heads=(2, 2), size=8, value_size=8, buckets=128, distances=40, ascending=True, seed=0, dtype=torch.float32):
    """Queries, keys, values and both tables as leaves, and times."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    shapes = [(tokens, heads[0], size), (tokens, heads[1], size), (tokens, heads[1], value_size), (heads[0], buckets), (heads[0], distances)]
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    times = (torch.rand(tokens, generator=generator) * 16).exp().long()
    return tensors, times.cumsum(0) if ascending else times


def call(form: str, tensors: list[torch.Tensor], times: torch.Tensor, offsets: torch.Tensor, bias: bool = True, reference: bool = False, scale=None):
    q, k, v, time_weights, position_weights = tensors
    tables = (times, time_weights, position_weights) if bias else ()
    if form == "bias":
        return (jagged_bias_attention.reference if reference else jagged_bias_attention)(v, offsets, times, time_weights, position_weights)
    function = jagged_fusion_attention.reference if reference else jagged_fusion_attention
    return function(q, k, v, offsets, *tables, activation=form, scale=scale)


def results(run: Callable[[list[torch.Tensor]], torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of a weighted sum."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = run(leaves)
    weight = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).sin().to(output.dtype)
    if output.requires_grad:
        (output * weight).sum().backward()
    return [output.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def by_hand(form: str, tensors: list[torch.Tensor], times: torch.Tensor, offsets: torch.Tensor, bias: bool, scale=None) -> torch.Tensor:
    """Every pair by itself, out of the definition."""
    q, k, v, time_weights, position_weights = (x.detach().double() for x in tensors)
    heads, share = q.shape[1], q.shape[1] // v.shape[1]
    out = torch.zeros(len(q), heads, v.shape[2], dtype=torch.float64)
    for begin, end in itertools.pairwise(offsets.tolist()):
        for i, h in itertools.product(range(begin, end), range(heads)):
            scores = []
            for j in range(begin, i + 1):
                bucket = min(math.floor(math.log(max(1, abs(int(times[i] - times[j])))) / BUCKET_LOG), time_weights.shape[1] - 1)
                extra = float(time_weights[h, bucket] + position_weights[h, min(i - j, position_weights.shape[1] - 1)]) if bias else 0.0
                product = float(q[i, h] @ k[j, h // share])
                scores.append(extra if form == "bias" else product + extra if form == "silu" else product * (scale or q.shape[2] ** -0.5) + extra)
            x = torch.tensor(scores, dtype=torch.float64)
            weights = x if form == "bias" else x.softmax(0) if form == "softmax" else torch.nn.functional.silu(x) * (scale or 1 / (end - begin))
            out[i, h] = weights @ v[begin : i + 1, h // share]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_reference_is_the_definition(form: str, bias: bool, scale: float | None) -> None:
    lengths = [3, 0, 7, 1]
    tensors, times = inputs(lengths, (4, 2), 3, 5, distances=4, ascending=False, dtype=torch.float64)
    bias = bias or form == "bias"
    found = call(form, tensors, times, offsets_of(lengths), bias, reference=True, scale=scale)
    torch.testing.assert_close(found, by_hand(form, tensors, times, offsets_of(lengths), bias, scale))


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_the_references(form: str) -> None:
    lengths = [2, 0, 4]
    tensors, times = inputs(lengths, (2, 1), 3, 2, buckets=9, distances=3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: call(form, list(x), times, offsets_of(lengths), reference=True).add(x[0].sum() * 0 + x[1].sum() * 0), tensors)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0, 1, 5, 6, 15, 16, 17, 31, 63, 64, 65, 130]), max_size=4),
    st.sampled_from(FORMS),
    st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    st.sampled_from([(1, 1), (3, 8), (16, 16), (32, 20), (33, 64), (64, 64), (128, 5)]),
    st.booleans(),
    st.booleans(),
)
def test_every_instruction_set_gives_the_values_and_gradients_of_the_reference(instructions, lengths, form, heads, sizes, bias, ascending):
    tensors, times = inputs(lengths, heads, *sizes, ascending=ascending)
    offsets, bias = offsets_of(lengths), bias or form == "bias"
    ours = results(lambda x: call(form, x, times, offsets, bias), tensors)
    exact = results(lambda x: call(form, x, times, offsets, bias, reference=True), [x.double() for x in tensors])
    for name, found, expected in zip(["out", "q", "k", "v", "times", "positions"], ours, exact, strict=True):
        top = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5 * max(top, 1.0), msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("form", FORMS)
def test_threads_do_not_change_a_bit(instructions, form):
    lengths = [1030, 3, 90, 600, 0, 17]
    tensors, times = inputs(lengths, (4, 2), 16, 16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(lambda x: call(form, x, times, offsets_of(lengths)), tensors))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [40, 700])
def test_the_future_does_not_matter(form: str, length: int) -> None:
    tensors, times = inputs([length], size=16, value_size=16)
    cut = length - 9
    scale = 0.01  # the default of SiLU knows the length
    before = call(form, tensors, times, offsets_of([length]), scale=scale)[:cut]
    changed = [x.detach().clone() for x in tensors]
    for x in changed[:3]:
        x[cut:] = 7.0
    torch.testing.assert_close(
        call(form, changed, torch.cat([times[:cut], times[cut:] + 10**6]), offsets_of([length]), scale=scale)[:cut], before, rtol=0, atol=0
    )


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 70), max_size=5), st.sampled_from(FORMS))
def test_a_sequence_attends_as_if_it_were_alone(lengths: list[int], form: str) -> None:
    tensors, times = inputs(lengths)
    offsets = offsets_of(lengths)
    together = call(form, tensors, times, offsets)
    for begin, end in itertools.pairwise(offsets.tolist()):
        alone = [*(x[begin:end] for x in tensors[:3]), *tensors[3:]]
        torch.testing.assert_close(together[begin:end], call(form, alone, times[begin:end], torch.tensor([0, end - begin])), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_one_row_of_a_table_serves_all_heads(form: str) -> None:
    lengths = [5, 70]
    tensors, times = inputs(lengths, (4, 4))
    alike = [*tensors[:3], *(x.detach()[:1].clone().requires_grad_() for x in tensors[3:])]
    ours = results(lambda x: call(form, x, times, offsets_of(lengths)), alike)
    exact = results(lambda x: call(form, x, times, offsets_of(lengths), reference=True), [x.double() for x in alike])
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_views_are_read_where_they_lie(instructions):
    lengths = [70, 9]
    tensors, times = inputs(lengths, size=24, value_size=24)
    packed = torch.stack([x.detach() for x in tensors[:3]], 1).flatten(1).requires_grad_()

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.unflatten(1, (3, 2, 24)).unbind(1), *(y.detach() for y in tensors[3:])]

    expected = results(lambda x: call("silu", x, times, offsets_of(lengths)), tensors)
    found = results(lambda x: call("silu", split(x[0]), times, offsets_of(lengths)), [packed])
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], torch.stack(expected[1:4], 1).flatten(1))


def test_gradients_come_for_what_asks_for_them_only() -> None:
    lengths = [70, 3]
    tensors, times = inputs(lengths)
    for wanted in range(5):
        leaves = [x.detach().clone().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
        call("softmax", leaves, times, offsets_of(lengths)).sum().backward()
        assert [x.grad is not None for x in leaves] == [i == wanted for i in range(5)]


def test_large_scores_neither_overflow_nor_vanish(instructions):
    lengths = [100]
    tensors, times = inputs(lengths, size=16)
    tensors = [*(x.detach() * 30 for x in tensors[:2]), *tensors[2:]]
    for form in ("silu", "softmax"):
        ours = results(lambda x, form=form: call(form, x, times, offsets_of(lengths)), tensors)
        exact = results(lambda x, form=form: call(form, x, times, offsets_of(lengths), reference=True), [x.double() for x in tensors])
        for found, expected in zip(ours, exact, strict=True):
            assert bool(found.isfinite().all())
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_a_number_stays_visible(instructions, form):
    tensors, times = inputs([70], size=16)
    broken = 2 if form == "bias" else 1
    with torch.no_grad():
        tensors[broken][3, 0, 2] = math.nan
    assert bool(call(form, tensors, times, offsets_of([70]))[3:, 0].isnan().any(-1).all())


@settings(deadline=None, max_examples=200)
@given(st.integers(-(2**60), 2**60), st.integers(1, 200))
def test_a_bucket_is_the_logarithm_rounded_down(difference: int, num_buckets: int) -> None:
    apart = min(max(1, abs(difference)), LONGEST_SECONDS)
    exact = math.log(apart) / BUCKET_LOG
    bucket = int(time_buckets(torch.tensor([difference]), num_buckets))
    if abs(exact - round(exact)) > 1e-9:
        assert bucket == min(math.floor(exact), num_buckets - 1)


def test_every_bound_of_a_bucket_is_met_by_the_kernel(instructions):
    edges = [edge + shift for edge in (0, *bucket_bounds(), 2**55) for shift in (-1, 0, 1)]
    times, weights = torch.tensor([0, *edges]), torch.arange(128.0)[None]
    lengths = [2] * len(edges)
    paired = torch.stack([torch.zeros(len(edges), dtype=torch.long), times[1:]], 1).flatten()
    v = torch.tensor([1.0, 0.0]).repeat(len(edges))[:, None, None]
    found = jagged_bias_attention(v, offsets_of(lengths), paired, weights)[1::2, 0, 0]
    assert found.long().tolist() == time_buckets(torch.tensor(edges), 128).tolist()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_causal_softmax_of_models_is_the_same_kernel(instructions, threads):
    lengths = [7, 2, 0, 90, 2, 7]
    tensors, _ = inputs(lengths, (4, 2), 32, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = results(lambda x: jagged_attention(*x, offsets_of(lengths)), tensors[:3])
    finally:
        torch.set_num_threads(before)
    for found, expected in zip(ours, results(lambda x: jagged_attention_by_length(*x, offsets_of(lengths)), tensors[:3]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_scale_of_zero_is_a_scale() -> None:
    tensors, times = inputs([5])
    assert not bool(call("silu", tensors, times, offsets_of([5]), scale=0.0).any())


MISFITS = {
    "another activation": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), activation="gelu"),  # type: ignore[arg-type]
    "fewer keys": lambda t, times: jagged_fusion_attention(t[0], t[1][:2], t[2][:2], offsets_of([3])),
    "keys of another size": lambda t, times: jagged_fusion_attention(t[0], t[1][..., :4], t[2], offsets_of([3])),
    "heads that do not divide": lambda t, times: jagged_fusion_attention(t[0], t[1].repeat(1, 2, 1)[:, :3], t[2].repeat(1, 2, 1)[:, :3], offsets_of([3])),
    "offsets of other tokens": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([4])),
    "offsets that go back": lambda t, times: jagged_fusion_attention(*t[:3], torch.tensor([0, 3, 2, 3])),
    "times without weights": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), times),
    "weights without times": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), None, t[3]),
    "fewer times": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), times[:2], t[3]),
    "times that are not whole": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), times.float(), t[3]),
    "a table of other heads": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), times, t[3].repeat(2, 1)[:3]),
    "an empty table": lambda t, times: jagged_fusion_attention(*t[:3], offsets_of([3]), None, None, t[4][:, :0]),
    "a channel without a table": lambda t, times: jagged_bias_attention(t[2], offsets_of([3])),
    "a channel of other heads": lambda t, times: jagged_bias_attention(t[2], offsets_of([3]), times, t[3].repeat(2, 1)[:3]),
    "a channel of other tokens": lambda t, times: jagged_bias_attention(t[2], offsets_of([2]), times, t[3]),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_does_not_fit_is_refused_before_memory_is_read_by_address(misfit, dtype):
    tensors, times = inputs([3], dtype=dtype)
    with pytest.raises(ValueError, match=r"give|do not cover"):
        MISFITS[misfit](tensors, times)
