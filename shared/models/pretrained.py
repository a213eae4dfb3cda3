"""Reading and writing model folders: ``config.json`` beside ``model.safetensors``, in Hugging Face's layout.

Everything that is read is checked: names, shapes and lengths, so that a truncated or foreign file is refused by name.

A checkpoint of the Qwen family whose vocabulary was extended by the codes of semantic ids serves as it is. Where its codes lie is said by
``semantide_level_sizes`` and ``semantide_layout`` in ``config.json``, or, for files that stay untouched, by ``semantide.json`` beside them:

    {"level_sizes": [256, 256], "layout": {"begin": [151643], "between": [], "end": [], "firsts": [151665, 151921]}}

``firsts`` is the token of each level's code 0. Where a level's tokens do not follow one another, ``tokens`` lists them all, level by level and code by
code; the embedding's rows are then brought into that order in memory. A folder that says nothing has token 0 and then the codes.
Legend: V tokens, L levels, K codes of a level, D hidden size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from semantide.shared.errors import Conflict, Corrupt, NotFound, TransientError
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.hybrid_weights import to_ours, to_theirs
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.models.vocabulary import Layout

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_CARD = "semantide.json"
_OURS = "semantide_generator"  # of layers, or traits together, that Hugging Face has in no model
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    _OURS: "SemantideGenerator",
}


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
        names = _indexed(folder / _INDEX)
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


def _indexed(path: Path) -> list[str]:
    """The files that an index names, all of which lie beside it."""
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path} is no index of weights ({type(error).__name__} {error}): copy the model folder again") from error
    foreign = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if foreign:
        raise Corrupt(f"{path} names {foreign[0]!r}: an index names files in its own folder only")
    return names


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``model.safetensors``.

    Raises: OSError, TransientError where the disk did not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, str(folder / _WEIGHTS), metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of an OSError
        raise TransientError(f"{folder / _WEIGHTS} could not be written ({error}): make room there, then resume the job") from error


def fill(module: torch.nn.Module, tensors: Mapping[str, Tensor], source: Path, assign: bool = False) -> None:
    """Load tensors into a module after comparing names and shapes; with ``assign`` they become the module's own, whatever type they have.

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
    module.load_state_dict(dict(tensors), assign=assign)


def save_generator(generator: Generator, folder: Path, kind: str | None = None) -> None:
    """Write a generator as one of Hugging Face's causal models; scales of training are folded into the weights.

    ``kind`` is ``qwen3_next`` for a model that would be written as Qwen3.5; None chooses by the layers.
    Raises: ValueError for a ``kind`` that has not these layers.
    """
    config = generator.config
    chosen = _kind(config)
    if kind is not None and kind != chosen:
        if (kind, chosen) != ("qwen3_next", "qwen3_5_text"):
            raise ValueError(f"kind is {kind!r}: these layers are saved as {chosen!r}, and those of Qwen3.5 also as 'qwen3_next'")
        chosen = kind
    tensors = {name: tensor.detach().clone() for name, tensor in generator.state_dict().items() if name != "level_log_scale"}
    tied = config.tie_word_embeddings and config.embedding_scale == 1 and not config.level_scales
    if not tied:
        head_VD = generator.head_VD.detach().clone()
        if config.level_scales:
            for level in range(generator.vocabulary.levels):
                head_VD[generator.vocabulary.row(level)] *= generator.level_log_scale[level].detach().exp()
        tensors[_EMBEDDING] = tensors[_EMBEDDING] * config.embedding_scale
        tensors[_HEAD] = head_VD
    plain = chosen in ("qwen2", "qwen3")
    write_weights(folder, tensors if plain else to_theirs(tensors, config, chosen))
    write_config(
        folder,
        {
            "architectures": [_ARCHITECTURES.get(chosen, chosen)],
            "model_type": chosen,
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
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **({} if plain else {"partial_rotary_factor": config.rotary_share})},
            "attention_bias": config.qkv_bias,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": tied,
            "bos_token_id": config.layout.begin[0],
            "eos_token_id": None,
            "dtype": str(generator.model.embed_tokens.weight.dtype).removeprefix("torch."),
            **({} if plain else _hybrid_header(config, chosen)),
            "semantide_level_sizes": list(config.level_sizes),
            "semantide_layout": config.layout.to_json(),
            "semantide_seen_bias": config.seen_bias,
            **({"semantide_merger": config.merger.to_json()} if config.merger.enabled else {}),
        },
    )


def _hybrid_header(config: GeneratorConfig, kind: str) -> dict[str, Any]:
    """What ``config.json`` says of layers that are not those of Qwen2.5 and Qwen3."""
    linear = config.linear
    header: dict[str, Any] = {
        "layer_types": list(config.types),
        "linear_conv_kernel_dim": linear.conv_kernel,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "partial_rotary_factor": config.rotary_share,
    }
    if kind == "qwen3_next":
        header |= {"num_experts": 0, "mlp_only_layers": list(range(config.num_layers))}
    if kind == _OURS:
        names = ("qk_norm", "output_bias", "attention_gate", "centred_norms")
        header |= {f"semantide_{name}": getattr(config, name) for name in names}
    return header


def _kind(config: GeneratorConfig) -> str:
    """Hugging Face's name for these layers, or our own where it has none."""
    traits = (config.qk_norm, config.qkv_bias, config.output_bias)
    plain = not config.layer_types or set(config.layer_types) == {"full_attention"}
    if config.attention_gate or config.centred_norms or config.rotary_share < 1 or not plain:
        theirs = config.attention_gate and config.centred_norms and traits in ((True, False, False), (True, True, True))
        return "qwen3_5_text" if theirs and set(config.types) <= {"full_attention", "linear_attention"} else _OURS
    kinds = {(True, False, False): "qwen3", (True, True, True): "qwen3", (False, True, False): "qwen2"}
    if traits not in kinds:
        raise ValueError(f"qk_norm, qkv_bias, output_bias are {traits}: saved models are Qwen3 {list(kinds)[:2]} or Qwen2 {list(kinds)[2]}")
    return kinds[traits]


class _Unfilled(TorchFunctionMode):
    """Leaves out random numbers for weights that are read afterwards: on the meta device they would cost the import of torch's compiler, which is seconds."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function is torch.Tensor.normal_ or getattr(function, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))


def load_generator(folder: Path, level_sizes: tuple[int, ...] | None = None) -> Generator:
    """Read a folder of the Qwen family as a generator; see ``Generator.from_pretrained``."""
    header = read_config(folder)
    if header.get("model_type") == "qwen3_5":  # with eyes, which are left out
        header = {**header, **(header.get("text_config") or {})}
    said, token_lists = _said(folder, header)
    config = generator_config({**header, **said}, folder, level_sizes)
    tensors = read_weights(folder)
    if header["model_type"] not in ("qwen2", "qwen3"):
        seen = {name.replace("model.language_model.", "model.", 1): tensor for name, tensor in tensors.items()}
        kept = {name: x for name, x in seen.items() if not name.startswith(("mtp.", "model.visual."))}
        try:
            tensors = to_ours(kept, config, header["model_type"])
        except (RuntimeError, IndexError) as error:
            raise Corrupt(f"{folder}: the tensors do not fit config.json ({error}): take config and weights from the same model") from error
    if config.tie_word_embeddings:
        tensors.pop(_HEAD, None)
    if token_lists is not None:
        _arrange(tensors, token_lists, config, folder)
    with torch.device("meta"), _Unfilled():
        generator = Generator(config)
    fill(generator, tensors, folder, assign=True)
    embedding = generator.model.embed_tokens.weight
    dtype = embedding.dtype if embedding.is_floating_point() else torch.float32
    for name, parameter in generator.named_parameters():
        # Published hybrids have these in float32 beside a short type: a rounded rate of decay would be another one.
        if not (parameter.dtype == torch.float32 and name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))):
            parameter.data = parameter.data.to(dtype)
    return generator.eval()


def _layer_types(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Of each layer; a hybrid's that lists none repeat after some number of layers, softmax last."""
    if listed := header.get("layer_types"):
        return tuple(str(layer) for layer in listed)
    if header["model_type"] not in ("qwen3_next", "qwen3_5_text"):
        return ()
    every = int(header.get("full_attention_interval", 4))
    return tuple("linear_attention" if (number + 1) % every else "full_attention" for number in range(int(header["num_hidden_layers"])))


def _experts(header: Mapping[str, Any], layers: int) -> int:
    """Of the layers whose feed-forward block is a mixture of them; 0 where none is."""
    if header["model_type"] != "qwen3_next":
        return 0
    step, dense = int(header.get("decoder_sparse_step", 1)), header.get("mlp_only_layers") or ()
    mixed = [number for number in range(layers) if number not in dense and (number + 1) % step == 0]
    return int(header.get("num_experts", 512)) if mixed else 0


def _linear_config(header: Mapping[str, Any]) -> LinearConfig:
    return LinearConfig(
        num_key_heads=int(header["linear_num_key_heads"]),
        num_value_heads=int(header["linear_num_value_heads"]),
        key_head_dim=int(header["linear_key_head_dim"]),
        value_head_dim=int(header["linear_value_head_dim"]),
        conv_kernel=int(header["linear_conv_kernel_dim"]),
    )


def _said(folder: Path, header: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[int]] | None]:
    """What the card beside ``config.json`` says of the codes' tokens, as fields of ``config.json``, and the tokens themselves where they are listed."""
    path = folder / _CARD
    if "semantide_level_sizes" in header or not path.is_file():
        return {}, None
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        said = {"semantide_level_sizes": card["level_sizes"]} if "level_sizes" in card else {}
        layout = dict(card.get("layout") or {})
        listed = layout.pop("tokens", None)
        if listed is None:
            return said | {"semantide_layout": layout}, None
        lists = [[int(token) for token in level] for level in listed]
        size, flat = int(header["vocab_size"]), [token for level in lists for token in level]
        if len(set(flat)) != len(flat) or not all(0 <= token < size for token in flat):
            raise ValueError(f"tokens are listed twice or beyond the vocabulary of {size}")
        # The codes come last, in order; what is left keeps its order before them.
        place = {token: number for number, token in enumerate(_others(flat, size))}
        for name in ("begin", "between", "end"):
            if name in layout:
                layout[name] = [place[token] for token in layout[name]]
        layout["firsts"] = [size - len(flat) + sum(map(len, lists[:level])) for level in range(len(lists))]
        return said | {"semantide_level_sizes": [len(level) for level in lists], "semantide_layout": layout}, lists
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{path}: {type(error).__name__} {error}: say level_sizes and layout as docs/serving.md shows them") from error


def _others(tokens: Sequence[int], size: int) -> list[int]:
    taken = set(tokens)
    return [token for token in range(size) if token not in taken]


def _arrange(tensors: dict[str, Tensor], token_lists: list[list[int]], config: GeneratorConfig, source: Path) -> None:
    """Bring the rows of embedding and head into the order of the layout."""
    flat = [token for level in token_lists for token in level]
    order_V = torch.tensor(_others(flat, config.vocab_size) + flat)
    for name in (_EMBEDDING, _HEAD):
        if name in tensors:
            if len(tensors[name]) != config.vocab_size:
                raise Corrupt(f"{source}: {name} has {len(tensors[name])} rows and config.json says {config.vocab_size}: take both from the same model")
            tensors[name] = tensors[name][order_V]


def generator_config(header: Mapping[str, Any], source: Path, level_sizes: tuple[int, ...] | None = None) -> GeneratorConfig:
    """Our configuration from a ``config.json``.

    Raises: Conflict for a model of another shape, Corrupt for a field that is missing.
    """
    kind = header.get("model_type")
    if kind not in _ARCHITECTURES:
        raise Conflict(
            f"{source}: model_type is {kind!r}, a generator needs one of {', '.join(_ARCHITECTURES)} (qwen2 is Qwen2.5 too, qwen3_5_text is Qwen3.5)"
        )
    plain, gated = kind in ("qwen2", "qwen3"), kind in ("qwen3_next", "qwen3_5_text")
    try:
        rope = header.get("rope_parameters") or header.get("rope_scaling") or {}
        types = _layer_types(header)
        windowed = [layer for layer in types if layer == "sliding_attention" or (plain and layer != "full_attention")]
        for name, value, wanted in (
            ("hidden_act", header.get("hidden_act", "silu"), "silu"),
            ("use_sliding_window", bool(header.get("use_sliding_window", False) or windowed), False),
            ("rope type", rope.get("rope_type", rope.get("type", "default")), "default"),
            ("num_experts", _experts(header, len(types)), 0),
        ):
            if value != wanted:
                raise Conflict(f"{source}: {name} is {value!r}, only {wanted!r} is supported: use a checkpoint without it")
        biased = bool(header.get("attention_bias", False))
        heads = int(header["num_attention_heads"])
        vocab_size = int(header["vocab_size"])
        sizes = level_sizes or tuple(header.get("semantide_level_sizes") or (vocab_size - 1,))
        theta = float(rope.get("rope_theta", header.get("rope_theta", 10000.0)))
        if not math.isfinite(theta):
            raise ValueError(f"rope_theta is {theta}")
        said = {name: bool(header.get(f"semantide_{name}", False)) for name in ("qk_norm", "output_bias", "attention_gate", "centred_norms")}
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
            qk_norm=kind == "qwen3" or gated or said["qk_norm"],
            qkv_bias=biased or kind == "qwen2",
            output_bias=(biased and (kind == "qwen3" or gated)) or said["output_bias"],
            layer_types=() if plain else types,
            linear=LinearConfig() if plain else _linear_config(header),
            attention_gate=gated or said["attention_gate"],
            rotary_share=1.0 if plain else float(rope.get("partial_rotary_factor", header.get("partial_rotary_factor", 0.25))),
            centred_norms=gated or said["centred_norms"],
            vocab_size=vocab_size,
            tie_word_embeddings=bool(header.get("tie_word_embeddings", False)),
            initializer_range=float(header.get("initializer_range", 0.02)),
            seen_bias=bool(header.get("semantide_seen_bias", False)),
            merger=MergerConfig.of(header.get("semantide_merger") or {}),
            layout=Layout.of(header.get("semantide_layout") or {}),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Corrupt(f"{source}/config.json: {type(error).__name__} {error}: the field is missing or out of range; copy the model folder again") from error
