"""Checkpoints of Qwen3.5 and Qwen3-Next as transformers writes them, and ours read by transformers: the same logits."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.linear_layer import FORMS, LinearConfig
from semantide.shared.models.pretrained import read_weights, write_config, write_weights

LEVELS = (12, 6, 5)
LENGTHS = (70, 1, 9)
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


def classes(kind: str) -> tuple[Any, Any]:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

    return {"qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM), "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM)}[kind]


def checkpoint(folder: Path, kind: str, **changes: Any) -> Any:
    config_class, model_class = classes(kind)
    torch.manual_seed(5)
    extra = {"num_experts": 0} if kind == "qwen3_next" else {}
    theirs = model_class(config_class(**(SHAPE | extra | changes))).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "embed" in name or "head" in name else 0.1))
    theirs.save_pretrained(folder)
    return theirs


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(24, (sum(LENGTHS),), generator=generator), torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])


def logits_of(theirs: Any, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.cat([theirs(tokens[None, begin:end]).logits[0] for begin, end in itertools.pairwise(offsets.tolist())])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
        {"attention_bias": True, "layer_types": ["full_attention", "linear_attention"] * 2, "linear_conv_kernel_dim": 3},
    ],
)
def test_logits_equal_and_weights_load_both_ways(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = checkpoint(tmp_path / "theirs", kind, **changes)
    ours = Generator.from_pretrained(tmp_path / "theirs", LEVELS)
    tokens, offsets = packed()
    with torch.no_grad():
        expected = logits_of(theirs, tokens, offsets)
        torch.testing.assert_close(ours.all_logits(ours(tokens, offsets)), expected, rtol=1e-4, atol=1e-4)
        ours.save_pretrained(tmp_path / "ours", kind)
        again, report = classes(kind)[1].from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        torch.testing.assert_close(logits_of(again, tokens, offsets), expected, rtol=1e-4, atol=1e-4)
    assert Generator.from_pretrained(tmp_path / "ours").config == ours.config
    before, after = (read_weights(tmp_path / name) for name in ("theirs", "ours"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore")
def test_rates_of_decay_stay_as_exact_as_a_short_checkpoint_has_them(tmp_path: Path) -> None:
    checkpoint(tmp_path / "whole", "qwen3_5_text")
    exact = ("linear_attn.A_log", "linear_attn.norm.weight")
    short = {name: x if name.endswith(exact) else x.bfloat16() for name, x in read_weights(tmp_path / "whole").items()}
    write_config(tmp_path / "short", json.loads((tmp_path / "whole" / "config.json").read_text()))
    write_weights(tmp_path / "short", short)
    ours = Generator.from_pretrained(tmp_path / "short", LEVELS)
    with torch.no_grad():
        hidden = ours(*packed())
    assert hidden.dtype == torch.bfloat16 and hidden.isfinite().all()
    ours.save_pretrained(tmp_path / "again")
    again = read_weights(tmp_path / "again")
    assert all(again[name].dtype == x.dtype and torch.equal(again[name], x) for name, x in short.items())
    assert any(x.dtype == torch.float32 for x in again.values())


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_with_eyes_is_read_without_them(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path, "qwen3_5_text")
    header, tensors = json.loads((tmp_path / "config.json").read_text()), read_weights(tmp_path)
    whole = tmp_path / "whole"
    write_config(whole, {"model_type": "qwen3_5", "text_config": header, "vision_config": {"depth": 1}})
    named = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x for name, x in tensors.items()}
    write_weights(whole, named | {"model.visual.patch.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)})
    ours = Generator.from_pretrained(whole, LEVELS)
    tokens, offsets = packed()
    with torch.no_grad():
        torch.testing.assert_close(ours.all_logits(ours(tokens, offsets)), logits_of(theirs, tokens, offsets), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "traits", [{}, {"attention_gate": True, "centred_norms": True, "rotary_share": 0.5}, {"attention_gate": True, "qk_norm": False}], ids=str
)
def test_every_form_is_saved_and_read(tmp_path: Path, form: str, traits: dict[str, Any]) -> None:
    torch.manual_seed(2)
    config = GeneratorConfig(LEVELS, 2, 24, 4, 2, 8, 40, layer_types=("full_attention", form), linear=LinearConfig(2, 4, 8, 12), **traits)
    ours = Generator(config).eval()
    ours.save_pretrained(tmp_path)
    again = Generator.from_pretrained(tmp_path)
    tokens, offsets = packed()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens, offsets), ours(tokens, offsets), atol=1e-5, rtol=1e-5)
        alone = ours(tokens[LENGTHS[0] :], offsets[1:] - LENGTHS[0])
        torch.testing.assert_close(ours(tokens, offsets)[LENGTHS[0] :], alone, atol=1e-4, rtol=1e-4)
    assert again.config == ours.config
    saved = again.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in ours.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_ours_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_next")
    header = json.loads((tmp_path / "config.json").read_text())

    def refused(kind: type[Exception], message: str, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in (header | changes).items() if v is not None}))
        with pytest.raises(kind, match=message):
            Generator.from_pretrained(tmp_path)

    refused(Conflict, "num_experts is 8", num_experts=8)
    refused(Conflict, "num_experts is 512", num_experts=None)
    refused(Conflict, "use_sliding_window is True", layer_types=["sliding_attention"] * 4)
    refused(Conflict, "model_type is 'mamba'", model_type="mamba")
    refused(Corrupt, "full_attention_interval|ZeroDivision", layer_types=None, full_attention_interval=0)
    refused(Corrupt, "layer_types", layer_types=["linear_attention"])
    refused(Corrupt, "linear_num_key_heads", linear_num_key_heads=None)
    refused(Corrupt, "num_value_heads 4 must be a multiple", linear_num_key_heads=3)
    refused(Corrupt, "in_proj_qkv", model_type="qwen3_5_text")
    with pytest.raises(ValueError, match="saved as 'qwen3'"):
        Generator(GeneratorConfig(LEVELS)).save_pretrained(tmp_path, "qwen3_next")
