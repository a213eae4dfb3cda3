"""The mapping to torch_npu, against a stand-in of the same interface on the CPU."""

import itertools
import math
import sys
from types import ModuleType

import pytest
import torch

from semantide.kernels.attention import jagged_attention
from semantide.kernels.jagged_fusion_attention import jagged_fusion_attention
from semantide.kernels.npu import causal_attention_npu


class FusionAttention:
    """torch_npu.npu_fusion_attention as documented, as far as it is used: layout TND, ends of sequences, a compressed causal mask."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        pse: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        atten_mask: torch.Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = 2147483647,
        next_tockens: int = 2147483647,
        inner_precise: int = 0,
        prefix: list[int] | None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        self.calls += 1
        assert input_layout == "TND" and head_num == query.shape[1] and sparse_mode == 2 and keep_prob == 1
        assert atten_mask is not None and atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.bool
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        assert all(x.is_contiguous() for x in (query, key, value))
        assert actual_seq_qlen == actual_seq_kvlen and actual_seq_qlen and actual_seq_qlen[-1] == len(query)
        assert all(a < b for a, b in itertools.pairwise([0, *actual_seq_qlen]))
        query = query * (scale * math.sqrt(query.shape[-1]))  # the reference divides by the root
        out = jagged_attention.reference(query, key, value, torch.tensor([0, *actual_seq_qlen]))
        nothing = query.new_zeros(0)
        return out, nothing, nothing, nothing, 0, 0, 0


@pytest.fixture
def operator(monkeypatch):
    module = ModuleType("torch_npu")
    module.npu_fusion_attention = FusionAttention()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module.npu_fusion_attention


@pytest.mark.parametrize("lengths", [[3, 0, 5], [0, 7], [1], [2, 2, 0]])
def test_causal_attention_is_the_fused_operator(operator, lengths):
    generator, offsets = torch.Generator().manual_seed(0), torch.tensor([0, *itertools.accumulate(lengths)])
    q, k, v = (torch.randn(sum(lengths), h, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    found = jagged_attention.implementation("npu")(q, k, v, offsets)
    torch.testing.assert_close(found, jagged_attention.reference(q, k, v, offsets))
    found.sum().backward()
    assert operator.calls == 1 and all(x.grad is not None for x in (q, k, v))


def test_the_fused_operator_serves_a_softmax_without_bias_only(operator):
    generator, offsets = torch.Generator().manual_seed(0), torch.tensor([0, 3, 8])
    q, k, v = (torch.randn(8, h, 8, generator=generator) for h in (4, 2, 2))
    on_npu = jagged_fusion_attention.implementation("npu")
    torch.testing.assert_close(
        on_npu(q, k, v, offsets, activation="softmax", scale=0.7), jagged_fusion_attention.reference(q, k, v, offsets, activation="softmax", scale=0.7)
    )
    assert operator.calls == 1
    tables = (torch.arange(8), torch.ones(4, 8).double(), None)
    on_npu(q.double(), k.double(), v.double(), offsets, *tables, activation="softmax")
    on_npu(q.double(), k.double(), v.double(), offsets)
    assert operator.calls == 1


def test_nothing_to_attend_to_asks_no_operator(operator):
    nothing = torch.zeros(0, 2, 8, requires_grad=True)
    out = causal_attention_npu(nothing, nothing, nothing, [0, 0], 1.0)
    assert out.shape == (0, 2, 8) and out.requires_grad and operator.calls == 0


def test_every_pair_and_float64_take_the_torch_way(operator):
    q = torch.randn(5, 2, 8)
    jagged_attention.implementation("npu")(q, q, q, torch.tensor([0, 5]), causal=False)
    jagged_attention.implementation("npu")(q.double(), q.double(), q.double(), torch.tensor([0, 5]))
    assert operator.calls == 0
