"""The Triton kernels of jagged fused attention in Triton's interpreter, on the CPU."""

import itertools
import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: install the dev extra to check its kernels in the interpreter")

from semantide.kernels import triton_jagged_fusion
from semantide.kernels.jagged_fusion_attention import bucket_bounds, jagged_bias_attention, jagged_fusion_attention, time_buckets

CASES = [
    ([], (2, 2), (8, 8), 128, 7),
    ([1], (1, 1), (8, 8), 128, 7),
    ([18, 0, 5], (4, 2), (24, 8), 128, 300),
    ([16, 17], (2, 1), (16, 33), 9, 3),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter takes seconds for tiles of 64."""
    monkeypatch.setattr(triton_jagged_fusion, "_BLOCK", 16)


def inputs(lengths, heads, sizes, buckets, distances, dtype=torch.float32):
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths)
    shapes = [(tokens, heads[0], sizes[0]), (tokens, heads[1], sizes[0]), (tokens, heads[1], sizes[1]), (heads[0], buckets), (heads[0], distances)]
    tensors = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    times = (torch.rand(tokens, generator=generator) * 16).exp().long().cumsum(0)
    return tensors, times, torch.tensor([0, *itertools.accumulate(lengths)])


def ours(form, tensors, times, offsets, bias, scale):
    q, k, v, *tables = tensors
    if form == "bias":
        return jagged_bias_attention.implementation("cuda")(v, offsets, times, *tables)
    return jagged_fusion_attention.implementation("cuda")(q, k, v, offsets, *((times, *tables) if bias else ()), activation=form, scale=scale)


def reference(form, tensors, times, offsets, bias, scale):
    q, k, v, *tables = tensors
    if form == "bias":
        return jagged_bias_attention.reference(v, offsets, times, *tables)
    return jagged_fusion_attention.reference(q, k, v, offsets, *((times, *tables) if bias else ()), activation=form, scale=scale)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("form", "scale", "bias"), [("silu", None, True), ("silu", 0.2, False), ("softmax", 0.3, True), ("softmax", 0.3, False), ("bias", 1.0, True)]
)
def test_values_and_gradients_are_those_of_the_reference(case, form, scale, bias):
    tensors, times, offsets = inputs(*case)
    found = []
    for function in (ours, reference):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        output = function(form, leaves, times, offsets, bias, scale)
        (output * torch.arange(output.numel()).view(output.shape).sin()).sum().backward()
        found.append([output.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)])
    for name, a, b in zip(["out", "q", "k", "v", "times", "positions"], *found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_every_bound_of_a_bucket_is_met(monkeypatch):
    monkeypatch.setattr(triton_jagged_fusion, "_BLOCK", 64)
    edges = [edge + shift for edge in (0, *bucket_bounds(), 2**55) for shift in (-1, 0, 1)]
    times, weights, offsets = torch.tensor([0, *edges]), torch.arange(128.0)[None], torch.tensor([0, len(edges) + 1])
    v = (torch.arange(len(times)) == 0).float()[:, None, None]  # so that each row gets its weight of the first key
    found = jagged_bias_attention.implementation("cuda")(v, offsets, times, weights)
    assert found.flatten().tolist() == time_buckets(times, 128).tolist()


def test_half_precision_keeps_its_type_and_sums_in_float32():
    # The interpreter multiplies bfloat16 as if its bits were whole numbers, so float16 stands for both.
    tensors, times, offsets = inputs([40, 3], (2, 1), (16, 16), 128, 20, torch.float16)
    output = ours("silu", tensors, times, offsets, True, None)
    output.float().sum().backward()
    exact = [x.detach().float().requires_grad_() for x in tensors]
    expected = reference("silu", exact, times, offsets, True, None)
    expected.sum().backward()
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=5e-3)
    for a, b in zip(tensors, exact, strict=True):
        assert a.grad.dtype == torch.float16
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=2e-2, atol=2e-2 * float(b.grad.abs().max()))
