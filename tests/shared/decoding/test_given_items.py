"""Given items get what a search that comes by them would give, and what training computes of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.given_items import GivenItems, score_items
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.targets import TargetBlocks, target_log_probs
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.trie import Trie

LEVELS = (7, 5, 6, 4)
MIXES = [
    (),
    ("linear_attention", "full_attention"),
    ("full_attention", "kda"),
    ("gla", "mamba2"),
]


def tiny(types: tuple[str, ...] = (), levels: tuple[int, ...] = LEVELS, **changes: object) -> Generator:
    torch.manual_seed(3)
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24}
    linear = LinearConfig(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=6)
    generator = Generator(GeneratorConfig(levels, **shape, layer_types=types, linear=linear, initializer_range=0.5, **changes))  # type: ignore[arg-type]
    for name, parameter in generator.named_parameters():
        if name.startswith(("seen_bias", "merger")):
            torch.nn.init.normal_(parameter, std=0.3)
    return generator.to(torch.float64).eval()


def catalog(seed: int, levels: tuple[int, ...] = LEVELS) -> tuple[np.ndarray, SearchTrie]:
    codes = np.unique(np.random.default_rng(seed).integers(0, levels, (40, len(levels))), axis=0)
    codes = np.random.default_rng(seed).permutation(codes)
    return codes, SearchTrie.build(Trie.build(codes))


def prompts(generator: Generator, codes: np.ndarray, lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng, vocabulary = np.random.default_rng(seed), generator.vocabulary
    each = [torch.from_numpy(vocabulary.history_tokens(vocabulary.item_tokens(codes[rng.integers(0, len(codes), many)]))) for many in lengths]
    return torch.cat(each), torch.tensor(np.cumsum([0, *map(len, each)]))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 29), max_size=9)), min_size=1, max_size=4),
    st.sampled_from(MIXES),
    st.sampled_from(["plain", "seen", "merged"]),
    st.sampled_from(["row", "children"]),
    st.sampled_from([1, None]),
    st.integers(0, 99),
)
def test_items_get_the_scores_of_a_search_that_finds_them_all(requests, types, kind, normalisation, flush_depth, seed) -> None:
    changes = {"plain": {}, "seen": {"seen_bias": True, "tie_word_embeddings": False}, "merged": {"merger": MergerConfig(True)}}[kind]
    generator = tiny(types, **changes)
    codes, trie = catalog(seed)
    tokens, offsets = prompts(generator, codes, [items for items, _ in requests], seed)
    rows = torch.tensor([row for _, own in requests for row in own], dtype=torch.int64)
    owners = torch.arange(len(requests)).repeat_interleave(torch.tensor([len(own) for _, own in requests]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    rows, owners = rows[order], owners[order]
    decoder = GeneratorDecoder(generator, flush_depth=flush_depth)
    found = score_items(decoder, tokens, offsets, torch.from_numpy(codes)[rows], owners, trie, rows, normalisation)
    hits = beam_search(decoder, trie, tokens, offsets, len(codes), normalisation=normalisation)
    for scores_L, row, owner in zip(found, rows.tolist(), owners.tolist(), strict=True):
        place = hits.rows_RW[owner].tolist().index(row)
        torch.testing.assert_close(scores_L, hits.level_scores_RWL[owner, place], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(scores_L.sum(), hits.scores_RW[owner, place], rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from(MIXES), st.booleans(), st.integers(0, 99))
def test_items_get_what_training_computes_of_them(lengths, types, seen_bias, seed) -> None:
    generator = tiny(types, seen_bias=seen_bias)
    codes, _ = catalog(seed)
    tokens, offsets = prompts(generator, codes, lengths, seed)
    rows = torch.from_numpy(np.random.default_rng(seed).integers(0, len(codes), 4 * len(lengths)))
    owners = torch.arange(len(lengths)).repeat_interleave(4)
    found = score_items(GeneratorDecoder(generator), tokens, offsets, torch.from_numpy(codes)[rows], owners)
    items = torch.from_numpy(generator.vocabulary.item_tokens(codes))[rows]
    with torch.no_grad():
        trained = target_log_probs(generator, tokens, offsets, TargetBlocks.of_items(items, owners, torch.tensor(lengths)[owners]))
    torch.testing.assert_close(found.float(), trained.view(-1, len(LEVELS)), rtol=1e-4, atol=1e-5)


def test_what_items_have_in_common_is_computed_once_and_many_are_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 1], [1, 2, 0, 0], [1, 2, 3, 0]])
    given_items = GivenItems.of(codes, torch.tensor([1, 1, 1, 0]), 3)
    assert [each.counts for each in given_items.extensions] == [(1, 1, 0), (1, 1, 0), (1, 2, 0)]
    generator = tiny(("linear_attention", "full_attention"))
    tokens, offsets = prompts(generator, catalog(0)[0], [2, 3, 0], 0)
    whole = score_items(GeneratorDecoder(generator), tokens, offsets, codes, torch.tensor([1, 1, 1, 0]))
    monkeypatch.setattr("semantide.shared.models.generator_decoder._LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(score_items(GeneratorDecoder(generator), tokens, offsets, codes, torch.tensor([1, 1, 1, 0])), whole, rtol=1e-12, atol=1e-12)
    one = tiny(levels=(9,))
    tokens, offsets = prompts(one, catalog(0, (9,))[0], [2], 0)
    assert score_items(GeneratorDecoder(one), tokens, offsets, torch.tensor([[3], [8]]), torch.tensor([0, 0])).shape == (2, 1)


def test_what_cannot_be_scored_is_refused() -> None:
    generator = tiny()
    codes, _ = catalog(0)
    tokens, offsets = prompts(generator, codes, [2], 0)
    decoder, wanted = GeneratorDecoder(generator), torch.from_numpy(codes[:2])
    with pytest.raises(ValueError, match="whose it is"):
        score_items(decoder, tokens, offsets, wanted, torch.tensor([0, 1]))
    for place, wrong in ((0, 7), (3, 4)):
        with pytest.raises(ValueError, match="the model's own catalog"):
            score_items(decoder, tokens, offsets, wanted.index_fill(1, torch.tensor([place]), wrong), torch.tensor([0, 0]))
    given_items = GivenItems.of(wanted, torch.tensor([0, 0]), 1)
    _, state = decoder.begin(tokens, offsets)
    decoder.step(state, 1, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="prompts that were just read"):
        list(decoder.follow(state, given_items.extensions))
    with torch.no_grad():
        generator.model.norm.weight[0] = torch.inf
    with pytest.raises(PermanentError, match="not finite"):
        score_items(decoder, tokens, offsets, wanted, torch.tensor([0, 0]))
