"""The baseline has to be right before its speed says anything."""

import numpy as np
import pytest
import torch

from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.trie import Trie

from .classic_engine import ClassicDecoder, classic_search

LEVELS = (30, 20, 25)


@pytest.mark.parametrize("normalisation", ["row", "children"])
@pytest.mark.parametrize("lengths", [[4, 4], [0, 7, 3]])
@pytest.mark.parametrize("filtered", [False, True])
def test_the_classic_engine_gives_the_answers_of_beam_search(normalisation, lengths, filtered):
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.5}
    generator = Generator(GeneratorConfig(LEVELS, **shape)).eval()
    rng = np.random.default_rng(0)
    codes = np.stack(np.unravel_index(rng.permutation(int(np.prod(LEVELS)))[:2000], LEVELS), 1).astype(np.int64)
    trie = SearchTrie.build(Trie.build(codes))
    tokens_NL = generator.vocabulary.item_tokens(codes)
    prompts = [generator.vocabulary.history_tokens(tokens_NL[:length]) for length in lengths]
    tokens, offsets = torch.as_tensor(np.concatenate(prompts)), torch.as_tensor(np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]))
    widths = [5, 40, 300][: len(lengths)]
    node_filter = None
    if filtered:
        node_filter = ItemFilter.build(trie, [trie.prefix_counts(rng.random(2000) < 0.3)], [0] * len(lengths), [[1, 2, 3]] * len(lengths))
    options = {"node_filter": node_filter, "normalisation": normalisation}
    ours = beam_search(GeneratorDecoder(generator), trie, tokens, offsets, widths, **options)
    theirs = classic_search(ClassicDecoder(generator), trie, tokens, offsets, widths, **options)
    assert torch.equal(ours.counts_R, theirs.counts_R)
    for request, count in enumerate(ours.counts_R.tolist()):
        torch.testing.assert_close(theirs.scores_RW[request, :count], ours.scores_RW[request, :count], rtol=0, atol=1e-4)
        torch.testing.assert_close(theirs.level_scores_RWL[request, :count].sum(1), ours.scores_RW[request, :count], rtol=0, atol=1e-4)
        assert torch.equal(theirs.rows_RW[request, :count], ours.rows_RW[request, :count])
