"""The whole path with the real generator: beam search against brute force, and brute force against the plain forward pass."""

import numpy as np
import pytest
import torch

from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.brute_force import best_items, score_every_item
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.trie import Trie

from .table_model import random_codes


class World:
    def __init__(self, items: int, level_sizes: tuple[int, ...], seed: int, types: tuple[str, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        config = GeneratorConfig(
            level_sizes,
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=48,
            initializer_range=0.5,
            layer_types=types,
            linear=LinearConfig(1, 2, 16, 16),
        )
        self.generator = Generator(config).eval()
        self.decoder = GeneratorDecoder(self.generator)
        self.codes = random_codes(generator, items, level_sizes).numpy()
        self.trie = SearchTrie.build(Trie.build(self.codes))
        self.tokens_NL = self.generator.vocabulary.item_tokens(self.codes)
        self.rng = np.random.default_rng(seed)

    def prompts(self, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.rng.integers(0, len(self.codes), length) for length in lengths]
        prompts = [self.generator.vocabulary.history_tokens(self.tokens_NL[history]) for history in rows]
        offsets = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
        return torch.as_tensor(np.concatenate(prompts)), torch.as_tensor(offsets)


@pytest.fixture(scope="module", params=[(), ("linear_attention", "full_attention"), ("mamba2", "kda")], ids=["softmax", "hybrid", "linear"])
def thousand(request: pytest.FixtureRequest) -> World:
    return World(1000, (12, 16, 20), 0, request.param)


@torch.inference_mode()
def test_brute_force_equals_the_plain_forward_pass(thousand):
    tokens, offsets = thousand.prompts([0, 5, 17])
    scores = score_every_item(thousand.decoder, thousand.codes, tokens, offsets)
    for request in range(3):
        prompt = tokens[offsets[request] : offsets[request + 1]]
        for item in thousand.rng.integers(0, 1000, 5):
            whole = torch.cat([prompt, torch.as_tensor(thousand.tokens_NL[item])])
            hidden = thousand.generator(whole, torch.tensor([0, len(whole)]))
            levels = [
                torch.log_softmax(thousand.generator.logits(hidden[len(prompt) - 1 + level], level), -1)[thousand.codes[item, level]] for level in range(3)
            ]
            assert scores[request, item] == pytest.approx(float(sum(levels)), abs=1e-5)


def test_wide_beams_equal_brute_force_on_a_thousand_items(thousand):
    tokens, offsets = thousand.prompts([0, 1, 30, 7])
    scores = score_every_item(thousand.decoder, thousand.codes, tokens, offsets)
    masks = [thousand.rng.random(1000) < share for share in (1.1, 0.5)]
    mask_of, excluded = [0, 1, 0, 1], [[], [], list(range(0, 900)), list(range(300))]
    chosen = ItemFilter.build(thousand.trie, [thousand.trie.prefix_counts(mask) for mask in masks], mask_of, excluded)
    hits = beam_search(thousand.decoder, thousand.trie, tokens, offsets, [1001, 1000, 1000, 2000], node_filter=chosen)
    for request in range(4):
        allowed = masks[mask_of[request]].copy()
        allowed[excluded[request]] = False
        count = int(hits.counts_R[request])
        rows = hits.rows_RW[request, :count].numpy()
        assert count == allowed.sum()
        np.testing.assert_allclose(hits.scores_RW[request, :count], np.sort(scores[request, allowed])[::-1], atol=1e-5)
        np.testing.assert_allclose(scores[request, rows], np.sort(scores[request, allowed])[::-1], atol=1e-5)
        top = best_items(scores[request], thousand.codes, allowed, 20)
        if np.diff(-scores[request, top]).min() > 1e-5:
            np.testing.assert_array_equal(rows[:20], top[: len(rows[:20])])


@pytest.mark.parametrize("level_sizes", [(40,), (6, 7), (1, 1, 40), (3, 3, 3, 3)])
@pytest.mark.parametrize("width", [1, 2, 13, 41])
def test_odd_tries_and_all_widths(level_sizes, width):
    world = World(40, level_sizes, 3)
    tokens, offsets = world.prompts([2, 9])
    hits = beam_search(world.decoder, world.trie, tokens, offsets, width)
    scores = score_every_item(world.decoder, world.codes, tokens, offsets)
    for request in range(2):
        count = int(hits.counts_R[request])
        assert count == min(width, len(world.codes))
        np.testing.assert_allclose(hits.scores_RW[request, :count], scores[request, hits.rows_RW[request, :count]], atol=1e-5)
        if len(level_sizes) == 1 or width >= len(world.codes) or hits.complete(request, count):
            np.testing.assert_allclose(hits.scores_RW[request, :count], np.sort(scores[request])[::-1][:count], atol=1e-5)


def test_the_prompt_is_read_once_whatever_the_width(thousand):
    tokens, offsets = thousand.prompts([8])
    read = []
    begin = thousand.decoder.begin

    class Counting:
        def begin(self, tokens_T, offsets_R1):
            read.append(len(tokens_T))
            return begin(tokens_T, offsets_R1)

        step = staticmethod(thousand.decoder.step)

    for width in (1, 64, 1000):
        beam_search(Counting(), thousand.trie, tokens, offsets, width)
    assert read == [25, 25, 25]
