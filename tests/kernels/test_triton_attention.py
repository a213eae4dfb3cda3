"""The Triton kernels in Triton's interpreter, on the CPU."""

import itertools
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: install the dev extra to check its kernels in the interpreter")

from semantide.kernels.attention import beam_attention
from semantide.kernels.triton_attention import beam_attention_triton


def arguments(lengths, width, steps, heads, groups, size, dtype=torch.float32):
    generator, requests = torch.Generator().manual_seed(1), len(lengths)
    q = torch.randn(requests, width, heads, size, generator=generator)
    prompt_k, prompt_v = torch.randn(2, sum(lengths), groups, size, generator=generator)
    own_k, own_v = torch.randn(2, requests * width * steps, groups, size, generator=generator)
    ancestors = torch.randint(max(1, requests * width * steps), (requests, width, steps), generator=generator)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in (q, prompt_k, prompt_v, offsets, own_k, own_v, ancestors))


@pytest.mark.parametrize(
    ("lengths", "width", "steps", "heads", "groups", "size"),
    [([], 3, 1, 2, 2, 8), ([1], 1, 0, 1, 1, 8), ([70, 0, 5], 7, 1, 4, 2, 24), ([64, 129], 70, 3, 3, 1, 64), ([0, 0], 2, 0, 2, 1, 16)],
)
def test_it_attends_like_the_reference(lengths, width, steps, heads, groups, size):
    tensors = arguments(lengths, width, steps, heads, groups, size)
    torch.testing.assert_close(beam_attention_triton(*tensors), beam_attention.reference(*tensors), rtol=1e-5, atol=1e-5)


def test_half_precision_keeps_its_type_and_sums_in_float32():
    # The interpreter multiplies bfloat16 as if its bits were whole numbers, so float16 stands for both.
    tensors = arguments([90, 3], 5, 2, 4, 2, 16, torch.float16)
    expected = beam_attention.reference(*(x.float() if x.is_floating_point() else x for x in tensors))
    ours = beam_attention_triton(*tensors)
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.float(), expected, rtol=1e-2, atol=5e-3)
