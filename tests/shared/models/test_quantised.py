import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.quantised import BFloat16Linear, Int8Linear, fastest, shorten
from semantide.shared.models.token_merger import MergerConfig

LEVELS = (7, 5, 6)
HYBRID = {"layer_types": ("linear_attention", "full_attention"), "linear": LinearConfig(1, 2, 8, 8), "attention_gate": True}


def make(**changes: object) -> Generator:
    torch.manual_seed(3)
    shape = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 40, "initializer_range": 0.3}
    return Generator(GeneratorConfig(LEVELS, **{**shape, **changes})).eval().requires_grad_(False)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(2, 70), st.integers(1, 70), st.booleans(), st.floats(1e-3, 1e3))
def test_products_are_close_and_rows_do_not_touch_each_other(rows: int, inputs: int, outputs: int, bias: bool, size: float) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(rows, 2, inputs) * size
    with torch.no_grad():
        expected = layer(x)
        tolerance = float(layer.weight.norm(dim=1).max() * x.norm(dim=-1).max()) if rows else 1.0
        for short in (Int8Linear(layer), BFloat16Linear(layer)):
            y = short(x)
            assert y.shape == expected.shape and y.dtype == torch.float32
            torch.testing.assert_close(y, expected, rtol=0, atol=0.02 * tolerance + 1e-6)
        exact = Int8Linear(layer)
        for row in range(rows):
            assert torch.equal(exact(x)[row], exact(x[row]))


def test_zeros_stay_zeros_and_what_is_no_number_shows() -> None:
    layer = Int8Linear(nn.Linear(8, 4, bias=False))
    x = torch.zeros(3, 8)
    x[1, 2] = torch.nan
    y = layer(x)
    assert torch.equal(y[::2], torch.zeros(2, 4)) and bool(y[1].isnan().all())


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "qkv_bias": True}, {"merger": MergerConfig(True)}, HYBRID], ids=str)
def test_a_shortened_generator_decodes_nearly_the_same(weights: str, changes: dict[str, Any]) -> None:
    exact, short = make(**changes), shorten(make(**changes), weights, time.perf_counter)  # type: ignore[arg-type]
    assert {type(layer.mlp.down_proj).__name__ for layer in short.layers} == {"Int8Linear" if weights == "int8" else "BFloat16Linear"}
    tokens = torch.tensor([0, 3, 9, 15, 1, 8, 13])
    offsets = torch.tensor([0, 7])
    logits, (first, state) = GeneratorDecoder(exact).begin(tokens, offsets)[0], GeneratorDecoder(short).begin(tokens, offsets)
    torch.testing.assert_close(first, logits, rtol=0, atol=0.15)
    assert GeneratorDecoder(short).step(state, 1, torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None]).shape == (1, 3, 5)


def test_float32_widens_and_unknown_forms_are_refused() -> None:
    assert shorten(make().bfloat16(), "float32", time.perf_counter).head_VD.dtype == torch.float32
    with pytest.raises(ValueError, match="'int4'"):
        shorten(make(), "int4", time.perf_counter)  # type: ignore[arg-type]


@pytest.mark.parametrize(("took", "form"), [((3, 1, 2), "bfloat16"), ((3, 2, 1), "int8"), ((1, 2, 3), "float32"), ((1.1, 1, 2), "float32")])
def test_auto_takes_what_is_clearly_fastest(took: tuple[float, ...], form: str) -> None:
    ticks = itertools.accumulate(itertools.chain.from_iterable((0.0, seconds) for seconds in itertools.cycle(took)))
    assert fastest(make(), lambda: next(ticks)) == form
