import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from semantide.services.training.initialisation import begin_at_checkpoint, begin_at_codebooks, centroids, read_codebooks
from semantide.shared.errors import Conflict
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.token_merger import MergerConfig


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))


@pytest.mark.parametrize("tied", [True, False])
def test_codes_with_like_vectors_begin_alike_and_the_scale_stays(tied: bool) -> None:
    torch.manual_seed(0)
    generator = Generator(GeneratorConfig((40, 3), hidden_size=64, tie_word_embeddings=tied))
    book = np.random.default_rng(0).normal(size=(40, 20))
    book[1] = book[0] + 0.01
    before = generator.model.embed_tokens.weight.detach().clone()
    begin_at_codebooks(generator, [book, None], 0.9, seed=1)
    after = generator.model.embed_tokens.weight.detach()
    assert cosine(after[1], after[2]) > 0.6 > cosine(after[1], after[5])
    assert abs(after[1:41].std() / before[1:41].std() - 1) < 0.15
    assert torch.equal(after[41:], before[41:]) and torch.equal(after[0], before[0])
    assert torch.equal(generator.head_VD[1:], after[1:])


def test_codebooks_come_from_the_catalogs_tokenizer(tmp_path: Path) -> None:
    assert read_codebooks(tmp_path) == []
    save_file({"codebook.0": np.ones((4, 2)), "codebook.1": np.zeros((3, 2)), "text.idf": np.ones(2)}, tmp_path / "tokenizer.safetensors")
    assert [book.shape for book in read_codebooks(tmp_path) if book is not None] == [(4, 2), (3, 2)]


def test_centroids_explain_what_is_left_level_by_level() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    vectors = np.array([[5.0, 1], [5, -1], [-5, 1], [-5, -1]])
    first, second = centroids(vectors, codes, (2, 2))
    assert first is not None and second is not None
    np.testing.assert_allclose(first, [[5, 0], [-5, 0]])
    np.testing.assert_allclose(second, [[0, 1], [0, -1]])


def test_a_constant_codebook_changes_nothing() -> None:
    generator = Generator(GeneratorConfig((4, 3), hidden_size=16))
    before = generator.model.embed_tokens.weight.detach().clone()
    begin_at_codebooks(generator, [np.ones((4, 5)), np.ones((9, 5))], 0.5, seed=0)
    assert torch.equal(generator.model.embed_tokens.weight.detach()[5:], before[5:])
    assert torch.allclose(generator.model.embed_tokens.weight.detach()[1:5], before[1:5])


@pytest.mark.parametrize("tied", [True, False])
def test_codes_are_added_behind_a_checkpoints_own_tokens(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    source = Generator(GeneratorConfig((29,), hidden_size=32, tie_word_embeddings=tied))
    with torch.no_grad():
        source.model.embed_tokens.weight.add_(0.3)
    source.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    foreign = {name: value for name, value in config.items() if not name.startswith("semantide")} | {"bos_token_id": None, "eos_token_id": [5, 6]}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    shape = GeneratorConfig(dropout=0.25, seen_bias=True)
    kept, fresh = begin_at_checkpoint(tmp_path, shape, (6, 4), True, seed=1)
    assert (fresh, kept.config.vocab_size, kept.vocabulary.begin, kept.vocabulary.row(1), kept.config.dropout) == (True, 40, 5, slice(36, 40), 0.25)
    tokens = torch.tensor([3, 29, 0, 7])
    with torch.no_grad():
        torch.testing.assert_close(
            kept.eval().all_logits(kept(tokens, torch.tensor([0, 4])))[:, :30], source.eval().all_logits(source(tokens, torch.tensor([0, 4])))
        )
    assert abs(float(kept.model.embed_tokens.weight.detach()[30:].mean()) - 0.3) < 0.05
    alone, _ = begin_at_checkpoint(tmp_path, shape, (6, 4), False, seed=1)
    assert alone.config.vocab_size == 11 and torch.equal(alone.model.embed_tokens.weight[0], source.model.embed_tokens.weight[5])
    assert torch.equal(alone.head_VD[1:], kept.head_VD[30:])
    alone.save_pretrained(tmp_path / "extended")
    again, fresh = begin_at_checkpoint(tmp_path / "extended", shape, (6, 4), False, seed=1)
    assert not fresh and torch.equal(again.head_VD, alone.head_VD)
    with pytest.raises(Conflict, match=r"levels \(6, 4\) and the catalog \(4, 6\)"):
        begin_at_checkpoint(tmp_path / "extended", shape, (4, 6), False, seed=1)


def test_a_merger_begins_as_the_mean_on_a_checkpoint_and_is_kept_from_then_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Generator(GeneratorConfig((6, 4), hidden_size=32)).save_pretrained(tmp_path / "plain")
    wanted = GeneratorConfig(dropout=0.25, merger=MergerConfig(True, "kept"))
    merged, fresh = begin_at_checkpoint(tmp_path / "plain", wanted, (6, 4), False, seed=1)
    assert not fresh and merged.config.merger == wanted.merger and not bool(merged.merger.proj.weight.any())
    with torch.no_grad():
        merged.merger.proj.weight.normal_()
    merged.save_pretrained(tmp_path / "merged")
    for shape in (wanted, GeneratorConfig()):
        again, _ = begin_at_checkpoint(tmp_path / "merged", shape, (6, 4), False, seed=1)
        assert again.config.merger == wanted.merger and torch.equal(again.merger.proj.weight, merged.merger.proj.weight)
    with pytest.raises(Conflict, match=r"leave generator\.merger out"):
        begin_at_checkpoint(tmp_path / "merged", GeneratorConfig(merger=MergerConfig(True)), (6, 4), False, seed=1)
