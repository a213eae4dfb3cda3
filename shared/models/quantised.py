"""Shorter weights for serving on a CPU: bfloat16, or int8 with a scale per output channel.

Embeddings, head, norms, attention and the residual stream stay in float32; only the layers' matrix products change. With int8 the inputs are rounded too,
each row by a scale of its own, so that a request's answer does not depend on what shares its batch and the product runs on the processor's integer units.
Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.shared.models.generator import Generator

Weights = Literal["float32", "bfloat16", "int8", "auto"]

_ROWS = 128  # of the product by which "auto" decides: a usual number of beams
_ROUNDS = 9
_PAYS = 1.2  # how much faster shorter weights must be before "auto" takes them


class BFloat16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight_NK", layer.weight.detach().bfloat16())
        self.register_buffer("bias_N", None if layer.bias is None else layer.bias.detach().float())
        self.weight_NK: Tensor
        self.bias_N: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        y = F.linear(x.bfloat16(), self.weight_NK).to(x.dtype)
        return y if self.bias_N is None else y + self.bias_N


class Int8Linear(nn.Module):
    """A linear layer that multiplies in int8 and sums in int32."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight_NK = layer.weight.detach().float()
        scale_N = _scale(weight_NK).squeeze(1)
        self.register_buffer("weight_NK", (weight_NK / scale_N[:, None]).round_().to(torch.int8))
        self.register_buffer("scale_N", scale_N)
        self.register_buffer("bias_N", None if layer.bias is None else layer.bias.detach().float())
        self.weight_NK: Tensor
        self.scale_N: Tensor
        self.bias_N: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        x_MK = x.reshape(-1, x.shape[-1])
        if not len(x_MK):
            return x.new_zeros(*x.shape[:-1], len(self.scale_N))
        scale_M1 = _scale(x_MK)
        y_MN = torch._int_mm((x_MK / scale_M1).round_().to(torch.int8), self.weight_NK.T).to(x.dtype).mul_(scale_M1).mul_(self.scale_N)
        if self.bias_N is not None:
            y_MN += self.bias_N
        return y_MN.view(*x.shape[:-1], -1)


def _scale(rows_MK: Tensor) -> Tensor:
    """What a row is divided by to lie within -127 and 127: [M, 1]."""
    return rows_MK.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(rows_MK.dtype).tiny * 128).div_(127)


_LAYERS: dict[str, type[BFloat16Linear | Int8Linear]] = {"bfloat16": BFloat16Linear, "int8": Int8Linear}


def shorten(generator: Generator, weights: Weights, clock: Callable[[], float]) -> Generator:
    """The generator with the layers' weights in a shorter form, changed in place; "float32" brings a checkpoint of another type to it.

    "auto" takes what is fastest here by a measurement of a few milliseconds, and float32 unless another form is clearly faster. Off the CPU the weights
    stay as they are.

    Raises: ValueError for a form that is unknown.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights is {weights!r}: give one of {', '.join(get_args(Weights))}")
    if generator.head_VD.device.type != "cpu":
        return generator
    generator = generator.float()
    form = fastest(generator, clock) if weights == "auto" else weights
    if form != "float32":
        for module in list(generator.model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child.in_features > 1:  # torch's integer product is wrong for a single input
                    setattr(module, name, _LAYERS[form](child))
    return generator


@torch.inference_mode()
def fastest(generator: Generator, clock: Callable[[], float]) -> Weights:
    """The form in which this machine multiplies the generator's largest matrices fastest; float32 unless another is clearly faster."""
    layer = generator.layers[0].mlp.gate_proj
    x_MK = torch.randn(_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    forms: dict[Weights, nn.Module] = {"float32": layer, "bfloat16": BFloat16Linear(layer), "int8": Int8Linear(layer)}
    seconds: dict[Weights, list[float]] = {form: [] for form in forms}
    for _ in range(_ROUNDS):
        for form, module in forms.items():
            begin = clock()
            module(x_MK)
            seconds[form].append(clock() - begin)
    best = {form: min(values) for form, values in seconds.items()}
    winner = min(best, key=lambda form: best[form])
    return winner if best["float32"] > _PAYS * best[winner] else "float32"
