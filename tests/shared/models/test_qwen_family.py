"""Checkpoints of the Qwen family as transformers writes them, with semantic-id tokens behind the text's: the same logits, the same beams."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.vocabulary import Layout
from semantide.shared.trie import Trie

LEVELS = (12, 6, 5)
TEXT = 40  # tokens of the language, before those of the ids
SHAPE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_sliding_window": False}


def checkpoint(folder: Path, kind: str, layout: dict[str, Any] | None, tied: bool = True, **changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    torch.manual_seed(5)
    shape = SHAPE | ({"head_dim": 8} if kind == "qwen3" else {}) | changes
    theirs = model_class(config_class(vocab_size=TEXT + sum(LEVELS) + 3, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=None, **shape)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "embed" in name or "head" in name else 0.2))
    theirs.save_pretrained(folder)
    if layout is not None:
        (folder / "semantide.json").write_text(json.dumps({"level_sizes": list(LEVELS), "layout": layout}))
    return theirs


def firsts() -> list[int]:
    """The last level's tokens come before the others'."""
    return [TEXT + LEVELS[2], TEXT + LEVELS[2] + LEVELS[0], TEXT]


@pytest.mark.parametrize(("kind", "changes"), [("qwen2", {}), ("qwen3", {}), ("qwen3", {"attention_bias": True}), ("qwen2", {"rope_theta": 1e6})])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_saved_files_are_those_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any], tied: bool) -> None:
    theirs = checkpoint(tmp_path / "theirs", kind, {"begin": [1], "firsts": firsts()}, tied, **changes)
    ours = Generator.from_pretrained(tmp_path / "theirs")
    assert (ours.vocabulary.level_sizes, ours.vocabulary.first(2), ours.vocabulary.begin) == (LEVELS, TEXT, 1)
    tokens = torch.arange(15) * 4 % (TEXT + sum(LEVELS))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(ours.all_logits(ours(tokens, torch.tensor([0, 15]))), expected, rtol=1e-4, atol=1e-4)
        ours.save_pretrained(tmp_path / "ours")
        again = type(theirs).from_pretrained(tmp_path / "ours")
        torch.testing.assert_close(again(tokens[None]).logits[0], expected, rtol=1e-4, atol=1e-4)
    read = Generator.from_pretrained(tmp_path / "ours")
    assert read.config == ours.config


def levelled(theirs: Any, allowed: Any, width: int, by_row: bool) -> Any:
    """Hugging Face's constraint; by_row takes log-probabilities over the level's code row before it, as ``beam_search`` does."""
    from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

    class Row(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begin, size = rows[input_ids.shape[1] - prompt_length]
            return scores - scores[:, begin : begin + size].logsumexp(1, keepdim=True)

    rows = list(zip(firsts(), LEVELS, strict=True))
    prompt_length = 0

    def generate(prompt: torch.Tensor) -> Any:
        nonlocal prompt_length
        prompt_length = len(prompt)
        processors = [*([Row()] if by_row else []), PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(ids[prompt_length:].tolist()), width)]
        return theirs.generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=3,
            min_new_tokens=3, length_penalty=0.0, renormalize_logits=not by_row, logits_processor=LogitsProcessorList(processors), output_scores=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip

    return generate


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_beams_are_those_of_generate_with_a_prefix_constraint(tmp_path: Path, kind: str, by_row: bool) -> None:
    theirs = checkpoint(tmp_path, kind, {"begin": [1, 3], "between": [2], "end": [4], "firsts": firsts()})
    ours = Generator.from_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    codes = np.stack(np.unravel_index(rng.permutation(int(np.prod(LEVELS)))[:150], LEVELS), 1).astype(np.int64)
    tokens_NL = ours.vocabulary.item_tokens(codes)
    children: dict[tuple[int, ...], set[int]] = {}
    for item in tokens_NL.tolist():
        for level in range(3):
            children.setdefault(tuple(item[:level]), set()).add(item[level])
    prompt = torch.as_tensor(ours.vocabulary.history_tokens(tokens_NL[:4]))
    assert prompt.tolist() == [1, 3, *tokens_NL[0], 2, *tokens_NL[1], 2, *tokens_NL[2], 2, *tokens_NL[3], 4]
    found = levelled(theirs, lambda prefix: sorted(children[tuple(prefix)]), 8, by_row)(prompt)
    hits = beam_search(
        GeneratorDecoder(ours),
        SearchTrie.build(Trie.build(codes)),
        prompt,
        torch.tensor([0, len(prompt)]),
        8,
        normalisation="row" if by_row else "children",
    )
    assert [tuple(row) for row in found.sequences[:, len(prompt) :].tolist()] == [tuple(tokens_NL[row]) for row in hits.rows_RW[0].tolist()]
    torch.testing.assert_close(found.sequences_scores.double(), hits.scores_RW[0], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_scattered_tokens_are_brought_into_order(tmp_path: Path) -> None:
    scattered = np.random.default_rng(1).permutation(np.arange(3, TEXT + sum(LEVELS)))[: sum(LEVELS)].tolist()
    lists = [scattered[:12], scattered[12:18], scattered[18:]]
    begin = min(set(range(TEXT)) - set(scattered) - {0, 1, 2})
    theirs = checkpoint(tmp_path, "qwen2", {"begin": [begin], "tokens": lists}, tied=False)
    ours = Generator.from_pretrained(tmp_path)
    codes = np.array([[3, 5, 0], [11, 0, 4]])
    prompt = torch.as_tensor(ours.vocabulary.history_tokens(ours.vocabulary.item_tokens(codes)))
    hidden = ours(prompt, torch.tensor([0, len(prompt)]))
    logits = theirs(torch.tensor([[begin, *(lists[level][code] for item in codes.tolist() for level, code in enumerate(item))]])).logits[0]
    for level in range(3):
        torch.testing.assert_close(ours.logits(hidden, level), logits[:, lists[level]], rtol=1e-4, atol=1e-4)


def test_layouts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for layout in ({"firsts": [0]}, {"tokens": [[1, 1], [2]]}, {"begin": []}, {"begins": [1]}, {"firsts": [900, 1, 20]}, {"firsts": [41, 42, 43]}):
        checkpoint(tmp_path, "qwen3", layout)
        with pytest.raises(Corrupt, match=r"layout|token|overlap|vocab"):
            Generator.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention", "sliding_attention"]}))
    with pytest.raises(Conflict, match="sliding_window"):
        Generator.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="seen_bias"):
        GeneratorConfig(LEVELS, seen_bias=True, layout=Layout(between=(40,)))
    with pytest.raises(ValueError, match="only one begin token"):
        _ = Generator(GeneratorConfig(LEVELS, layout=Layout(begin=(0, 40)))).vocabulary.begin
    with pytest.raises(ValueError, match="qk_norm"):
        Generator(GeneratorConfig(LEVELS, qk_norm=False)).save_pretrained(tmp_path)


def test_a_short_type_keeps_its_positions(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3", {"firsts": firsts()})
    wide, short = Generator.from_pretrained(tmp_path), Generator.from_pretrained(tmp_path).to(torch.bfloat16)
    places = torch.tensor([0, 1, 1999, 30000])
    for exact, rounded in zip(wide.rotation(places), short.rotation(places), strict=True):
        torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=1 / 256)
