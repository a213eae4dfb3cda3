import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import semantide.kernels.attention as kernel_module
from semantide.kernels.attention import beam_attention, jagged_attention, merge_attention, packed_bounds, packed_offsets

EDGES = [[], [0], [1], [0, 0], [3, 0, 5, 3, 1], [1, 1, 2, 2, 7], [7, 2, 1, 2, 7, 0, 33], [129]]


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def pack(lengths: list[int], heads: int = 4, groups: int = 2, size: int = 8, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    return tuple(torch.randn(sum(lengths), h, size, generator=generator, dtype=dtype).requires_grad_() for h in (heads, groups, groups))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", EDGES)
def test_every_device_function_equals_the_reference_in_values_and_gradients(lengths: list[int], causal: bool) -> None:
    for function in jagged_attention.registry.values():
        results = []
        for attention in (jagged_attention.reference, function):
            inputs = pack(lengths)
            output = attention(*inputs, offsets_of(lengths), causal)
            weight = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).sin()
            (output * weight).sum().backward()
            results.append([output, *(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 9), max_size=8), st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 2)]))
def test_a_sequence_attends_as_if_it_were_alone(lengths: list[int], heads: tuple[int, int]) -> None:
    q, k, v = pack(lengths, *heads)
    offsets = offsets_of(lengths)
    together = jagged_attention(q, k, v, offsets)
    for begin, end in itertools.pairwise(offsets.tolist()):
        alone = jagged_attention.reference(q[begin:end], k[begin:end], v[begin:end], torch.tensor([0, end - begin]))
        torch.testing.assert_close(together[begin:end], alone)


def test_gradcheck_of_the_references() -> None:
    lengths = [2, 0, 3, 1]
    assert torch.autograd.gradcheck(lambda *x: jagged_attention.reference(*x, offsets_of(lengths)), pack(lengths, 4, 2, 3))
    prompts, own = pack([2, 3], 2, 1, 3)[1:], pack([6], 2, 1, 3)[1:]
    q = torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    ancestors = torch.tensor([[[0, 2], [1, 3]], [[4, 4], [5, 0]]])
    assert torch.autograd.gradcheck(lambda q, *x: beam_attention.reference(q, x[0], x[1], offsets_of([2, 3]), x[2], x[3], ancestors), (q, *prompts, *own))


def test_the_future_does_not_matter() -> None:
    q, k, v = pack([6])
    before = jagged_attention(q, k, v, offsets_of([6]))[:4]
    changed_k, changed_v = k.detach().clone(), v.detach().clone()
    changed_k[4:], changed_v[4:] = 9.0, -9.0
    torch.testing.assert_close(jagged_attention(q, changed_k, changed_v, offsets_of([6]))[:4], before)


def test_planning_while_decoding_does_not_spoil_training() -> None:
    lengths = [5, 2, 5, 11]
    with torch.inference_mode():
        jagged_attention(*(x.detach() for x in pack(lengths)), offsets_of(lengths))
    inputs = pack(lengths)
    jagged_attention(*inputs, offsets_of(lengths)).sum().backward()
    assert inputs[0].grad is not None


@pytest.mark.parametrize("lengths", [[], [4], [4, 4], [1, 9, 4], [0, 3, 0, 3], [5, 2, 5]])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 5])
def test_beams_attend_to_their_prompt_and_their_own_ancestors_only(lengths: list[int], steps: int, width: int) -> None:
    heads, groups, size, requests = 4, 2, 8, len(lengths)
    generator = torch.Generator().manual_seed(7)
    _, prompt_k, prompt_v = (x.detach() for x in pack(lengths, heads, groups, size))
    own_k, own_v = (torch.randn(requests * width * steps, groups, size, generator=generator, dtype=torch.float64) for _ in range(2))
    q = torch.randn(requests, width, heads, size, generator=generator, dtype=torch.float64)
    ancestors = torch.randint(max(1, requests * width * steps), (requests, width, steps), generator=generator)
    bounds = offsets_of(lengths).tolist()
    expected = torch.zeros_like(q)
    for request, width_index in itertools.product(range(requests), range(width)):
        rows = ancestors[request, width_index]
        keys = torch.cat([prompt_k[bounds[request] : bounds[request + 1]], own_k[rows]])
        values = torch.cat([prompt_v[bounds[request] : bounds[request + 1]], own_v[rows]])
        if len(keys):
            query = q[request, width_index].unsqueeze(0)
            expected[request, width_index] = jagged_attention.reference(
                torch.cat([query.new_zeros(len(keys) - 1, heads, size), query]), keys, values, torch.tensor([0, len(keys)]), causal=False
            )[-1]
    for function in (beam_attention.reference, *beam_attention.registry.values()):
        torch.testing.assert_close(function(q, prompt_k, prompt_v, offsets_of(lengths), own_k, own_v, ancestors), expected)


def beams(lengths: list[int], width: int, steps: int, heads: int, groups: int, size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random float32 arguments of beam attention."""
    generator, requests = torch.Generator().manual_seed(seed), len(lengths)
    q = torch.randn(requests, width, heads, size, generator=generator)
    prompt_k, prompt_v = torch.randn(2, sum(lengths), groups, size, generator=generator)
    own_k, own_v = torch.randn(2, requests * width * steps, groups, size, generator=generator)
    ancestors = torch.randint(max(1, requests * width * steps), (requests, width, steps), generator=generator)
    return q, prompt_k, prompt_v, offsets_of(lengths), own_k, own_v, ancestors


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 130]), max_size=3),
    st.sampled_from([1, 2, 4, 5, 12, 13, 29]),
    st.integers(0, 3),
    st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    st.sampled_from([1, 3, 8, 16, 32, 33, 64, 128]),
)
def test_every_instruction_set_attends_like_the_reference(instructions, lengths, width, steps, heads, size):
    arguments = beams(lengths, width, steps, *heads, size)
    torch.testing.assert_close(beam_attention(*arguments), beam_attention.reference(*(x.double() if x.is_floating_point() else x for x in arguments)).float())


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, -0x3FFFFF])
def test_what_is_not_a_number_stays_visible(instructions, bits):
    q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors = beams([70], 5, 1, 2, 1, 16)
    prompt_k.view(torch.int32)[66, 0, 3] = bits
    assert bool(beam_attention(q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors).isnan().all())


def test_views_are_read_where_they_lie(instructions):
    q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors = beams([70, 9], 6, 2, 4, 2, 24)
    expected = beam_attention.reference(q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors)
    wide = torch.cat([q.transpose(0, 1), torch.full_like(q.transpose(0, 1), torch.nan)], -1)[..., :24].transpose(0, 1)
    both = torch.stack([prompt_k, prompt_v], 1)
    own = torch.stack([own_k, own_v], -1)  # no stride of one
    torch.testing.assert_close(beam_attention(wide, both[:, 0], both[:, 1], offsets, own[..., 0], own[..., 1], ancestors), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_the_answer(instructions, threads):
    arguments = beams([200, 3, 90], 50, 2, 4, 2, 16)
    before, alone = torch.get_num_threads(), beam_attention(*arguments)
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(beam_attention(*arguments), alone, rtol=1e-6, atol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_large_scores_neither_overflow_nor_vanish(instructions):
    q, prompt_k, *rest = beams([100], 3, 2, 2, 1, 8)
    arguments = (q * 60, prompt_k * 60, *rest)
    torch.testing.assert_close(beam_attention(*arguments), beam_attention.reference(*arguments), rtol=1e-4, atol=1e-4)


def test_ancestors_and_own_rows_that_do_not_fit_are_refused(instructions):
    q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors = beams([4], 3, 1, 2, 1, 8)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="but there are 3 own rows"):
            beam_attention(q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors * 0 + wrong)
    with pytest.raises(ValueError, match="give own rows"):
        beam_attention(q, prompt_k, prompt_v, offsets, own_k[..., :4], own_v[..., :4], ancestors)
    with pytest.raises(ValueError, match="do not cover"):
        beam_attention(q, prompt_k, prompt_v, offsets + 1, own_k, own_v, ancestors)


def test_beam_attention_has_gradients_where_they_are_asked_for():
    q, *rest = beams([4, 9], 3, 1, 2, 1, 8)
    q.requires_grad_()
    beam_attention(q, *rest).sum().backward()
    assert q.grad is not None and bool(q.grad.any())


def test_merging_gives_no_weight_to_a_part_without_keys() -> None:
    one, nothing = torch.tensor([2.0, 3.0]), torch.zeros(2)
    torch.testing.assert_close(merge_attention(one, torch.tensor(-800.0), nothing, torch.tensor(-torch.inf)), one)
    torch.testing.assert_close(merge_attention(nothing, torch.tensor(-torch.inf), nothing, torch.tensor(-torch.inf)), nothing)


def test_offsets_are_read_and_checked_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check = kernel_module._ascending
    monkeypatch.setattr(kernel_module, "_ascending", lambda bounds: (checks.append(1), check(bounds))[1])
    offsets = torch.tensor([0, 3, 5])
    assert [packed_bounds(offsets, 5) for _ in range(4)] == [(0, 3, 5)] * 4 and len(checks) == 1
    with pytest.raises(ValueError, match="do not cover 6 tokens"):
        packed_bounds(offsets, 6)
    offsets[1] = 9
    with pytest.raises(ValueError, match="do not cover 5 tokens"):
        packed_bounds(offsets, 5)
    checks.clear()
    with torch.inference_mode():
        made, changing = packed_offsets([3, 0, 2], "cpu"), torch.tensor([0, 5])
        assert packed_bounds(made, 5) == (0, 3, 3, 5) and not checks  # known from the beginning
        packed_bounds(changing, 5)
        changing[1] = 4
        with pytest.raises(ValueError, match="do not cover 5 tokens"):  # a tensor of this mode does not tell, so it is read each time
            packed_bounds(changing, 5)


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 3], [0, 5], [0, 3, 2, 3]])
def test_offsets_that_do_not_cover_the_pack_are_refused(offsets: list[int]) -> None:
    q, k, v = pack([3])
    for function in (jagged_attention.reference, jagged_attention):
        with pytest.raises(ValueError, match="do not cover"):
            function(q, k, v, torch.tensor(offsets))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of key heads"):
        jagged_attention(torch.ones(2, 3, 4), torch.ones(2, 2, 4), torch.ones(2, 2, 4), offsets_of([2]))
