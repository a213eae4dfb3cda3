"""The baseline behind the scheduler answers as ours does, also when requests leave it on the way."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from semantide.shared.decoding.beam_search import Search
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.trie import Trie

sys.path.insert(0, str(Path(__file__).resolve().parent))

from classic_app import ServedDecoder, ServedSearch

LEVELS = (30, 20, 25)


@pytest.mark.parametrize("leave_at", [1, 2])
@pytest.mark.parametrize("filtered", [False, True])
@torch.inference_mode()
def test_requests_leave_and_the_others_go_on(leave_at, filtered):
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.5}
    generator = Generator(GeneratorConfig(LEVELS, **shape)).eval()
    rng = np.random.default_rng(0)
    codes = np.stack(np.unravel_index(rng.permutation(int(np.prod(LEVELS)))[:2000], LEVELS), 1).astype(np.int64)
    trie = SearchTrie.build(Trie.build(codes))
    tokens_NL = generator.vocabulary.item_tokens(codes)
    prompts = [generator.vocabulary.history_tokens(tokens_NL[:length]) for length in (3, 9, 0, 5)]
    tokens, offsets = torch.as_tensor(np.concatenate(prompts)), torch.as_tensor(np.cumsum([0, *map(len, prompts)]))
    widths = [5, 60, 30, 12]
    node_filter = None
    if filtered:
        masks = [trie.prefix_counts(rng.random(2000) < share) for share in (0.3, 0.9, 0.1, 0.5)]
        node_filter = ItemFilter.build(trie, masks, [0, 1, 2, 3], [[number, number + 1] for number in range(4)])
    kept = [0, 2, 3]
    found = []
    for decoder, searches in ((GeneratorDecoder(generator), Search), (ServedDecoder(generator), ServedSearch)):
        search = searches(trie, widths, node_filter)
        logits, state = decoder.begin(tokens, offsets)
        while (extension := search.select(logits)) is not None:
            if search.level == leave_at:
                decoder.keep(state, kept)
                search.keep(kept)
                extension = tuple(table[kept, : max(search.counts)] for table in extension)
            logits = decoder.step(state, search.level, *extension, search.counts)
        found.append(search.hits())
    ours, theirs = found
    assert torch.equal(ours.counts_R, theirs.counts_R)
    for request, count in enumerate(ours.counts_R.tolist()):
        torch.testing.assert_close(theirs.scores_RW[request, :count], ours.scores_RW[request, :count], rtol=0, atol=1e-4)
