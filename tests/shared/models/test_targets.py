import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels.attention import jagged_attention
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.targets import TargetBlocks, target_counts, target_hidden, target_log_probs
from semantide.shared.models.token_merger import MergerConfig

LEVELS = (7, 5, 6)
HISTORIES = st.lists(st.tuples(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=4)), min_size=1, max_size=4)


def tiny(**changes: object) -> Generator:
    torch.manual_seed(3)
    generator = Generator(
        GeneratorConfig(LEVELS, num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40, **changes)  # type: ignore[arg-type]
    )
    if generator.config.seen_bias:
        torch.nn.init.normal_(generator.seen_bias.weight, std=0.3)
    return generator.eval()


def item_tokens(many: int, generator: torch.Generator) -> torch.Tensor:
    firsts = [1, 1 + LEVELS[0], 1 + LEVELS[0] + LEVELS[1]]
    # Few codes, so that items of a history share some.
    return torch.stack([first + torch.randint(min(3, size), (many,), generator=generator) for first, size in zip(firsts, LEVELS, strict=True)], 1)


def made(histories: list[tuple[int, list[tuple[int, int]]]], seed: int) -> tuple[torch.Tensor, torch.Tensor, TargetBlocks]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.cat([torch.zeros(1, dtype=torch.int64), item_tokens(items, generator).flatten()]) for items, _ in histories]
    blocks = [(prompt, min(seen, items), many) for prompt, (items, own) in enumerate(histories) for seen, many in own]
    tokens = item_tokens(sum(many for _, _, many in blocks), generator).flatten()
    offsets = torch.tensor([0, *itertools.accumulate(3 * many for _, _, many in blocks)])
    columns = (torch.tensor([block[column] for block in blocks], dtype=torch.int64) for column in (0, 1))
    return torch.cat(prompts), torch.tensor([0, *itertools.accumulate(map(len, prompts))]), TargetBlocks(tokens, offsets, *columns)


@settings(deadline=None, max_examples=25)
@given(HISTORIES, st.integers(0, 99), st.sampled_from([(), ("linear_attention", "full_attention"), ("full_attention", "kda"), ("gla", "mamba2")]))
def test_a_block_is_predicted_as_by_a_forward_of_what_it_sees_and_itself(
    histories: list[tuple[int, list[tuple[int, int]]]], seed: int, types: tuple[str, ...]
) -> None:
    generator = tiny(layer_types=types, attention_gate=bool(types), linear=LinearConfig(1, 2, 8, 8))
    tokens, offsets, blocks = made(histories, seed)
    trained = target_hidden(generator, tokens, offsets, blocks)
    with torch.no_grad():
        hidden = target_hidden(generator, tokens, offsets, blocks)
        torch.testing.assert_close(hidden, trained, rtol=1e-4, atol=1e-5)
        for block, (begin, end) in enumerate(itertools.pairwise(blocks.offsets_C1.tolist())):
            start, seen = int(offsets[blocks.prompts_C[block]]), 1 + 3 * int(blocks.items_C[block])
            alone = torch.cat([tokens[start : start + seen], blocks.tokens_S[begin:end]])
            torch.testing.assert_close(hidden[begin:end], generator(alone, torch.tensor([0, len(alone)]))[seen - 1 : -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seen_bias", [False, True])
def test_log_probabilities_equal_those_of_decoding(seen_bias: bool) -> None:
    """Training of parallel targets is point-wise inference: the same numbers come out of the decoder that serves."""
    generator = tiny(seen_bias=seen_bias, tie_word_embeddings=False)
    tokens, offsets, blocks = made([(4, [(4, 1), (4, 1)]), (0, [(0, 1), (0, 1)]), (6, [(6, 1), (6, 1)])], 1)
    decoder = GeneratorDecoder(generator)
    codes_RWL = (blocks.tokens_S.view(3, 2, 3) - torch.tensor([generator.vocabulary.first(level) for level in range(3)])).contiguous()
    with torch.no_grad():
        found = target_log_probs(generator, tokens, offsets, blocks).view(3, 2, 3)
    logits, state = decoder.begin(tokens, offsets)
    expected = [logits.log_softmax(-1).gather(1, codes_RWL[:, :, 0])]
    for level in (1, 2):
        parents = torch.zeros(3, 2, dtype=torch.int64) if level == 1 else torch.arange(2).expand(3, 2)
        logits = decoder.step(state, level, parents, codes_RWL[:, :, level - 1])
        expected.append(logits.log_softmax(-1).gather(2, codes_RWL[:, :, level, None]).squeeze(2))
    torch.testing.assert_close(found, torch.stack(expected, 2), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(HISTORIES, st.integers(0, 99))
def test_counts_are_of_the_items_that_a_block_sees(histories: list[tuple[int, list[tuple[int, int]]]], seed: int) -> None:
    generator = tiny(seen_bias=True)
    tokens, offsets, blocks = made(histories, seed)
    targets = blocks.tokens_S.view(-1, 3)
    block_of = torch.arange(len(blocks.prompts_C)).repeat_interleave(blocks.offsets_C1.diff() // 3)
    for level in range(3):
        counts = target_counts(generator, tokens, offsets, blocks, level)
        assert counts is not None
        for target, block in enumerate(block_of.tolist()):
            start = int(offsets[blocks.prompts_C[block]]) + 1
            seen = tokens[start : start + 3 * int(blocks.items_C[block])].view(-1, 3)
            alike = seen[(seen[:, :level] == targets[target, :level]).all(1), level] - generator.vocabulary.first(level)
            torch.testing.assert_close(counts[target], torch.bincount(alike, minlength=LEVELS[level]).float())


@pytest.mark.parametrize("merger", [MergerConfig(True), MergerConfig(True, "kept"), MergerConfig(True, "merged", ("gaps",))])
def test_a_block_after_a_merged_prompt_is_what_a_forward_over_its_vectors_gives(merger: MergerConfig) -> None:
    generator = tiny(merger=merger)
    torch.nn.init.normal_(generator.merger.proj.weight, std=0.1)
    tokens, offsets, blocks = made([(4, [(4, 1), (2, 2)]), (0, [(0, 1)]), (6, [(1, 1), (6, 1), (6, 3)])], 1)
    wide = len(merger.features)
    with_gaps = [torch.cat([part[:1], torch.cat([part[1:].view(-1, 3), torch.ones((len(part) - 1) // 3, wide, dtype=torch.int64)], 1).flatten()])
                 for part in (tokens[begin:end] for begin, end in itertools.pairwise(offsets.tolist()))]  # fmt: skip
    prompt_offsets = torch.tensor([0, *itertools.accumulate(map(len, with_gaps))])
    with torch.no_grad():
        hidden = target_hidden(generator, torch.cat(with_gaps), prompt_offsets, blocks)
        for block, (begin, end) in enumerate(itertools.pairwise(blocks.offsets_C1.tolist())):
            prompt = with_gaps[int(blocks.prompts_C[block])][: 1 + (3 + wide) * int(blocks.items_C[block])]
            vectors, _ = generator.prompt_vectors(prompt, torch.tensor([0, len(prompt)]))
            x = torch.cat([vectors, generator.embed(blocks.tokens_S[begin : end - 1])])
            cos, sin = generator.rotation(torch.arange(len(x)))
            for layer in generator.layers:
                x = layer.finish(x, jagged_attention.reference(*layer.project(x, cos, sin), torch.tensor([0, len(x)])))
            torch.testing.assert_close(hidden[begin:end], generator.model.norm(x)[len(vectors) - 1 :], rtol=1e-4, atol=1e-5)


def test_other_blocks_of_a_prompt_change_nothing_and_get_no_gradient() -> None:
    generator = tiny()
    tokens, offsets, blocks = made([(5, [(5, 1), (3, 2), (5, 1)])], 0)
    other = TargetBlocks(blocks.tokens_S.clone(), blocks.offsets_C1, blocks.prompts_C, blocks.items_C)
    other.tokens_S[3:9] = item_tokens(2, torch.Generator().manual_seed(9)).flatten()
    before, after = (target_hidden(generator, tokens, offsets, each) for each in (blocks, other))
    assert torch.equal(before[:3], after[:3]) and torch.equal(before[9:], after[9:]) and not torch.equal(before[4:9], after[4:9])


def test_blocks_that_do_not_fit_are_refused() -> None:
    generator = tiny()
    tokens, offsets, blocks = made([(2, [(2, 1)]), (1, [(1, 1)])], 0)
    for prompts, items in (([0, 1], [3, 1]), ([1, 0], [1, 1]), ([0, 1], [-1, 0])):
        with pytest.raises(ValueError, match="prompts do not ascend"):
            target_hidden(generator, tokens, offsets, TargetBlocks(blocks.tokens_S, blocks.offsets_C1, torch.tensor(prompts), torch.tensor(items)))
    with pytest.raises(ValueError, match="2 of 2 blocks"):
        target_hidden(generator, tokens, offsets, TargetBlocks(blocks.tokens_S, torch.tensor([0, 2, 6]), blocks.prompts_C, blocks.items_C))
