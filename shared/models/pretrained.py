"""Reading and writing model folders: ``config.json`` beside ``model.safetensors``, in Hugging Face's layout.

Everything that is read is checked: names, shapes and lengths, so that a truncated or foreign file is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.models.generator import Generator, GeneratorConfig

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``.

    Raises: NotFound, Corrupt.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(f"{path} does not exist: give a folder with config.json and {_WEIGHTS}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Corrupt(f"{path} is not JSON ({error}): copy the model folder again") from error
    if not isinstance(config, dict):
        raise Corrupt(f"{path} holds a {type(config).__name__} instead of an object: copy the model folder again")
    return config


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or from the files that an index names.

    Raises: NotFound, Corrupt.
    """
    names = [_WEIGHTS]
    if not (folder / _WEIGHTS).is_file() and (folder / _INDEX).is_file():
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise NotFound(f"{path} does not exist: give a folder with config.json and {_WEIGHTS}")
        try:
            tensors.update(load_file(str(path)))
        except (SafetensorError, OSError) as error:
            raise Corrupt(f"{path} ({path.stat().st_size} bytes) is truncated or damaged ({error}): copy the model folder again") from error
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, str(folder / _WEIGHTS), metadata={"format": "pt"})


def fill(module: torch.nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load tensors into a module after comparing names and shapes.

    Raises: Corrupt.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name} is {given[name]} instead of {shape}" for name, shape in expected.items() if given.get(name, shape) != shape]
    if missing or unknown or wrong:
        parts = [f"missing {', '.join(missing[:3])}"] * bool(missing) + [f"unknown {', '.join(unknown[:3])}"] * bool(unknown) + wrong[:3]
        raise Corrupt(f"{source}: the tensors do not fit config.json ({'; '.join(parts)}): take config and weights from the same model")
    module.load_state_dict(dict(tensors))


def save_generator(generator: Generator, folder: Path) -> None:
    """Write a generator as Hugging Face's Qwen3ForCausalLM; scales of training are folded into the weights."""
    config = generator.config
    tensors = {name: tensor.detach().clone() for name, tensor in generator.state_dict().items() if name != "level_log_scale"}
    tied = config.tie_word_embeddings and config.embedding_scale == 1 and not config.level_scales
    if not tied:
        head_VD = generator.head_VD.detach().clone()
        if config.level_scales:
            for level in range(generator.vocabulary.levels):
                head_VD[generator.vocabulary.row(level)] *= generator.level_log_scale[level].detach().exp()
        tensors[_EMBEDDING] = tensors[_EMBEDDING] * config.embedding_scale
        tensors[_HEAD] = head_VD
    write_weights(folder, tensors)
    write_config(
        folder,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "initializer_range": config.initializer_range,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": tied,
            "bos_token_id": 0,
            "eos_token_id": None,
            "dtype": str(generator.model.embed_tokens.weight.dtype).removeprefix("torch."),
            "semantide_level_sizes": list(config.level_sizes),
            "semantide_seen_bias": config.seen_bias,
        },
    )


def load_generator(folder: Path, level_sizes: tuple[int, ...] | None = None) -> Generator:
    """Read a Qwen3ForCausalLM folder as a generator; see ``Generator.from_pretrained``."""
    header = read_config(folder)
    config = generator_config(header, folder, level_sizes)
    tensors = read_weights(folder)
    if config.tie_word_embeddings:
        tensors.pop(_HEAD, None)
    generator = Generator(config)
    embedding = tensors.get(_EMBEDDING)
    if embedding is not None and embedding.is_floating_point():
        generator = generator.to(embedding.dtype)
    fill(generator, tensors, folder)
    return generator.eval()


def generator_config(header: Mapping[str, Any], source: Path, level_sizes: tuple[int, ...] | None = None) -> GeneratorConfig:
    """Our configuration from a ``config.json``.

    Raises: Conflict for a model of another shape, Corrupt for a field that is missing.
    """
    if header.get("model_type") != "qwen3":
        raise Conflict(f"{source}: model_type is {header.get('model_type')!r}, a generator needs 'qwen3'")
    rope = header.get("rope_parameters") or header.get("rope_scaling") or {}
    for name, value, wanted in (
        ("hidden_act", header.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(header.get("attention_bias", False)), False),
        ("use_sliding_window", bool(header.get("use_sliding_window", False)), False),
        ("rope type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if value != wanted:
            raise Conflict(f"{source}: {name} is {value!r}, only {wanted!r} is supported: use a Qwen3 checkpoint without it")
    try:
        heads = int(header["num_attention_heads"])
        vocab_size = int(header["vocab_size"])
        sizes = level_sizes or tuple(header.get("semantide_level_sizes") or (vocab_size - 1,))
        theta = float(rope.get("rope_theta", header.get("rope_theta", 10000.0)))
        if not math.isfinite(theta):
            raise ValueError(f"rope_theta is {theta}")
        return GeneratorConfig(
            level_sizes=tuple(int(size) for size in sizes),
            num_layers=int(header["num_hidden_layers"]),
            hidden_size=int(header["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(header.get("num_key_value_heads") or heads),
            head_dim=int(header.get("head_dim") or int(header["hidden_size"]) // heads),
            intermediate_size=int(header["intermediate_size"]),
            rope_theta=theta,
            rms_norm_eps=float(header.get("rms_norm_eps", 1e-6)),
            vocab_size=vocab_size,
            tie_word_embeddings=bool(header.get("tie_word_embeddings", False)),
            initializer_range=float(header.get("initializer_range", 0.02)),
            seen_bias=bool(header.get("semantide_seen_bias", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{source}/config.json: {type(error).__name__} {error}: the field is missing or out of range; copy the model folder again") from error
