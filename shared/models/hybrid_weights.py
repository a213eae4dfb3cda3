"""How Hugging Face's Qwen3.5 and Qwen3-Next lay out the weights of their layers, and how this project does.

Two parts that they keep in one matrix are two here: queries and their gate, head by head; in Qwen3-Next queries, keys, values and output gate, key head by key head,
and shares of writing and decays. And where only some features of a head turn with the position, the pairs that turn come first in each half of a head, so that
feature i pairs with feature i + d / 2 as in all other models; products of queries and keys do not know the order of their features.
Legend: d head size, r features that turn, D hidden size, H value heads, G key heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semantide.shared.models.generator import GeneratorConfig

NEXT = "qwen3_next"


def to_ours(tensors: Mapping[str, Tensor], config: GeneratorConfig, kind: str) -> dict[str, Tensor]:
    """The weights of a ``kind`` of Hugging Face's under the names and in the order of ``Generator``; those that are missing stay missing."""
    found = dict(tensors)
    order_d = _order(config)
    for number, layer in enumerate(config.types):
        at = f"model.layers.{number}."
        if layer == "full_attention":
            at += "self_attn."
            for name in ("weight", "bias") if config.attention_gate else ():
                if (joined := found.pop(f"{at}q_proj.{name}", None)) is not None:
                    q, gate = _by_head(joined, 2 * config.head_dim).chunk(2, 1)
                    found |= {f"{at}q_proj.{name}": q.flatten(0, 1), f"{at}gate_proj.{name}": gate.flatten(0, 1)}
            _reorder(found, at, config, order_d)
        elif kind == NEXT:
            at += "linear_attn."
            heads = [size // config.linear.num_key_heads for size in _next_sizes(config)]
            for name, parts, sizes in (("qkvz", ("q", "k", "v", "z"), heads[:4]), ("ba", ("b", "a"), heads[4:])):
                if (joined := found.pop(f"{at}in_proj_{name}.weight", None)) is not None:
                    split = {part: rows.flatten(0, 1) for part, rows in zip(parts, _by_head(joined, sum(sizes)).split(sizes, 1), strict=True)}
                    if name == "qkvz":
                        split["qkv"] = torch.cat([split.pop(part) for part in "qkv"])
                    found |= {f"{at}in_proj_{part}.weight": rows for part, rows in split.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def to_theirs(tensors: Mapping[str, Tensor], config: GeneratorConfig, kind: str) -> dict[str, Tensor]:
    """The inverse of ``to_ours``."""
    found = dict(tensors)
    order_d = _order(config).argsort()
    for number, layer in enumerate(config.types):
        at = f"model.layers.{number}."
        if layer == "full_attention":
            at += "self_attn."
            _reorder(found, at, config, order_d)
            for name in ("weight", "bias"):
                if (gate := found.pop(f"{at}gate_proj.{name}", None)) is not None:
                    parts = [_by_head(rows, config.head_dim) for rows in (found[f"{at}q_proj.{name}"], gate)]
                    found[f"{at}q_proj.{name}"] = torch.cat(parts, 1).flatten(0, 1)
        elif kind == NEXT:
            at += "linear_attn."
            sizes, keys = _next_sizes(config), config.linear.num_key_heads
            rows = [*found.pop(f"{at}in_proj_qkv.weight").split(sizes[:3]), *(found.pop(f"{at}in_proj_{part}.weight") for part in "zba")]
            split = [_by_head(part, size // keys) for part, size in zip(rows, sizes, strict=True)]
            found[f"{at}in_proj_qkvz.weight"] = torch.cat(split[:4], 1).flatten(0, 1)
            found[f"{at}in_proj_ba.weight"] = torch.cat(split[4:], 1).flatten(0, 1)
    return found


def _next_sizes(config: GeneratorConfig) -> list[int]:
    """Rows of queries, keys, values, output gate, shares of writing and decays."""
    linear = config.linear
    keys, values = linear.num_key_heads * linear.key_head_dim, linear.num_value_heads * linear.value_head_dim
    return [keys, keys, values, values, linear.num_value_heads, linear.num_value_heads]


def _by_head(rows: Tensor, size: int) -> Tensor:
    """[heads, size, ...]."""
    return rows.reshape(-1, size, *rows.shape[1:])


def _order(config: GeneratorConfig) -> Tensor:
    """Which of their features of a head stands at each place here."""
    turning, places_d = config.rotary_size, torch.arange(config.head_dim)
    return torch.cat([torch.cat(halves) for halves in zip(places_d[:turning].chunk(2), places_d[turning:].chunk(2) or [places_d[:0]] * 2, strict=True)])


def _reorder(tensors: dict[str, Tensor], at: str, config: GeneratorConfig, order_d: Tensor) -> None:
    """Rows of queries and keys, and their norms' factors, in place."""
    for part in "qk":
        for name in (f"{at}{part}_proj.weight", f"{at}{part}_proj.bias"):
            if name in tensors:
                tensors[name] = _by_head(tensors[name], config.head_dim)[:, order_d].flatten(0, 1)
        if (name := f"{at}{part}_norm.weight") in tensors:
            tensors[name] = tensors[name][order_d]
