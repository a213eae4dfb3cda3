import json
from pathlib import Path

import pytest
import torch

from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.linear_layer import FORMS, LinearConfig

LEVELS = (7, 5, 6)


def tiny(**changes: object) -> Generator:
    torch.manual_seed(3)
    return Generator(GeneratorConfig(LEVELS, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40, **changes)).eval()  # type: ignore[arg-type]


def packed(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1 + sum(LEVELS), (sum(lengths),), generator=generator), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def save_with_transformers(folder: Path, tied: bool) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    theirs = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_hugging_face_weights_equal_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    theirs = save_with_transformers(tmp_path, tied)
    ours = Generator.from_pretrained(tmp_path, LEVELS)
    tokens, offsets = packed(5, 1, 9)
    with torch.no_grad():
        mine = ours.all_logits(ours(tokens, offsets))
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            torch.testing.assert_close(mine[begin:end], theirs(tokens[begin:end].unsqueeze(0)).logits[0], rtol=1e-4, atol=1e-4)
    assert ours.vocabulary.level_sizes == LEVELS
    assert Generator.from_pretrained(tmp_path).vocabulary.level_sizes == (31,)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"embedding_scale": 4.0}, {"level_scales": True}, {"vocab_size": 32}])
def test_transformers_loads_what_we_save_and_gives_our_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    from transformers import Qwen3ForCausalLM

    ours = tiny(**changes)
    if ours.config.level_scales:
        with torch.no_grad():
            ours.level_log_scale.copy_(torch.tensor([0.5, -0.4, 0.1]))
    ours.save_pretrained(tmp_path)
    theirs, report = Qwen3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    again = Generator.from_pretrained(tmp_path)
    tokens, offsets = packed(8)
    with torch.no_grad():
        hidden, expected = ours(tokens, offsets), theirs(tokens.unsqueeze(0)).logits[0]
        for level in range(3):
            torch.testing.assert_close(ours.logits(hidden, level), expected[:, ours.vocabulary.row(level)], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.logits(hidden, level), again.logits(again(tokens, offsets), level))


def test_a_seen_bias_is_saved_and_read(tmp_path: Path) -> None:
    ours = tiny(seen_bias=True)
    torch.nn.init.normal_(ours.seen_bias.weight)
    ours.save_pretrained(tmp_path)
    again = Generator.from_pretrained(tmp_path)
    hidden, counts = torch.zeros(1, ours.config.hidden_size), torch.ones(1, LEVELS[1])
    torch.testing.assert_close(again.logits(hidden, 1, counts), ours.logits(hidden, 1, counts))


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny().save_pretrained(tmp_path / name)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_sequences_of_a_pack_do_not_see_each_other() -> None:
    generator = tiny()
    tokens, offsets = packed(4, 1, 7)
    with torch.no_grad():
        together = generator(tokens, offsets)
        alone = generator(tokens[5:], torch.tensor([0, 7]))
    torch.testing.assert_close(together[5:], alone)
    assert generator(tokens[:0], torch.tensor([0])).shape == (0, 24)


@pytest.mark.parametrize("form", FORMS)
def test_hybrids_compute_in_short_types_nearly_the_same_with_gradients_for_all(form: str) -> None:
    hybrid = {"layer_types": (form, "full_attention"), "linear": LinearConfig(1, 2, 8, 8), "attention_gate": True, "centred_norms": True, "rotary_share": 0.5}
    generator = tiny(**hybrid)
    tokens, offsets = packed(40, 1, 9)
    exact = generator(tokens, offsets)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = generator(tokens, offsets)
    mixed.float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for name, p in generator.named_parameters() if "embed" not in name)
    short = tiny(**hybrid).bfloat16()(tokens, offsets)
    assert short.dtype == torch.bfloat16
    for found in (mixed, short):
        assert float((found.float() - exact).detach().norm() / exact.detach().norm()) < 0.05


def test_dropout_acts_in_training_only() -> None:
    generator = tiny(dropout=0.5, embedding_dropout=0.5)
    tokens, offsets = packed(6)
    assert torch.equal(generator(tokens, offsets), generator(tokens, offsets))
    generator.train()
    assert not torch.equal(generator(tokens, offsets), generator(tokens, offsets))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Corrupt, match=r"model\.safetensors .*truncated or damaged"):
        Generator.from_pretrained(tmp_path)


@pytest.mark.parametrize("index", ["", '{"weight_map": ', "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_an_index_cut_short_or_pointing_elsewhere_is_refused_by_name(tmp_path: Path, index: str) -> None:
    tiny().save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Corrupt, match=r"index\.json"):
        Generator.from_pretrained(tmp_path / "folder")


def test_foreign_and_incomplete_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json does not exist"):
        Generator.from_pretrained(tmp_path)
    tiny().save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def refused(error: type[Exception], match: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in {**good, **changes}.items() if value != "absent"}))
        with pytest.raises(error, match=match):
            Generator.from_pretrained(tmp_path)

    refused(Conflict, "model_type is 'llama'", model_type="llama")
    refused(Corrupt, "missing model.layers.0.self_attn.k_proj.bias", attention_bias=True)
    refused(Conflict, "rope type is 'yarn'", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    refused(Corrupt, "hidden_size", hidden_size="absent")
    refused(Corrupt, "missing model.layers.2", num_hidden_layers=3)
    refused(Corrupt, "instead of", intermediate_size=48)
    refused(Corrupt, "ZeroDivision", num_attention_heads=0, num_key_value_heads=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Corrupt, match="is not JSON"):
        Generator.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors does not exist"):
        Generator.from_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{"num_heads": 3}, {"head_dim": 7}, {"dropout": 1.0}, {"vocab_size": 5}])
def test_impossible_shapes_are_a_value_error(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        GeneratorConfig(LEVELS, **changes)  # type: ignore[arg-type]
