import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels.attention import jagged_attention
from semantide.kernels.target_attention import TargetSpans, target_attention

Prompt = tuple[int, list[tuple[int, int]]]  # its length, and of each block how much it sees and how many places it has


def spans_of(prompts: list[Prompt]) -> TargetSpans:
    starts = [0, *itertools.accumulate(length for length, _ in prompts)]
    blocks = [(start, start + min(seen, length), many) for start, (length, own) in zip(starts, prompts, strict=False) for seen, many in own]
    offsets = torch.tensor([0, *itertools.accumulate(many for _, _, many in blocks)])
    return TargetSpans(offsets, *(torch.tensor([block[side] for block in blocks], dtype=torch.int64) for side in (0, 1)))


def tensors(prompts: list[Prompt], heads: tuple[int, int], size: int, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places, own = sum(length for length, _ in prompts), sum(many for _, blocks in prompts for _, many in blocks)
    shapes = ((own, heads[0]), (own, heads[1]), (own, heads[1]), (places, heads[1]), (places, heads[1]))
    return [torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


PROMPTS = st.lists(st.tuples(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=4)), max_size=5)


@settings(deadline=None, max_examples=40)
@given(PROMPTS, st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(0, 99))
def test_each_block_attends_as_if_it_alone_followed_what_it_sees(prompts: list[Prompt], heads: tuple[int, int], seed: int) -> None:
    spans, (q, k, v, prompt_k, prompt_v) = spans_of(prompts), tensors(prompts, heads, 8, seed)
    expected = [q[:0]]
    for block, (first, last) in enumerate(itertools.pairwise(spans.offsets_C1.tolist())):
        seen = slice(int(spans.begins_C[block]), int(spans.ends_C[block]))
        keys, values = torch.cat([prompt_k[seen], k[first:last]]), torch.cat([prompt_v[seen], v[first:last]])
        queries = torch.cat([torch.zeros(seen.stop - seen.start, heads[0], 8, dtype=q.dtype), q[first:last]])
        expected.append(jagged_attention.reference(queries, keys, values, torch.tensor([0, len(queries)]))[seen.stop - seen.start :])
    for function in (target_attention.reference, *target_attention.registry.values()):
        torch.testing.assert_close(function(q, k, v, prompt_k, prompt_v, spans), torch.cat(expected))


MANY: list[Prompt] = [(1, [(1, 2)]), (40, [(n, 2) for n in range(1, 40)]), (130, [(130, 9), (4, 1), (64, 0), (65, 33)]), (3, []), (41, [(41, 2)] * 30)]


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("size", [4, 32])
def test_gradients_equal_the_reference(heads: tuple[int, int], size: int) -> None:
    spans = spans_of(MANY)
    ours, theirs = tensors(MANY, heads, size, 0, torch.float32), tensors(MANY, heads, size, 0)
    weights = torch.randn(len(ours[0]), heads[0], size, generator=torch.Generator().manual_seed(1))
    found, expected = target_attention(*ours, spans), target_attention.reference(*theirs, spans)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad.float(), rtol=1e-4, atol=1e-5)


def test_gradcheck_of_the_reference() -> None:
    prompts: list[Prompt] = [(3, [(2, 2), (3, 1)]), (1, [(1, 2)])]
    spans = spans_of(prompts)
    assert torch.autograd.gradcheck(lambda *x: target_attention.reference(*x, spans), tensors(prompts, (4, 2), 3, 0))


def test_spans_outside_the_prompts_and_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, prompt_k, prompt_v = tensors([(3, [(2, 2)])], (2, 1), 4, 0)
    offsets, zero = torch.tensor([0, 2]), torch.tensor([0])
    with pytest.raises(ValueError, match="rows 0 to 4 of 3"):
        target_attention(q, k, v, prompt_k, prompt_v, TargetSpans(offsets, zero, torch.tensor([4])))
    with pytest.raises(ValueError, match="2 offsets"):
        TargetSpans(offsets, zero, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="equal shape"):
        target_attention(q, k, v[:1], prompt_k, prompt_v, TargetSpans(offsets, zero, zero))
    with pytest.raises(ValueError, match="offsets"):
        target_attention(q, k, v, prompt_k, prompt_v, TargetSpans(torch.tensor([0, 1]), zero, zero))
