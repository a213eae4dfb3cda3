import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder

LEVELS = (6, 5, 7, 4)


def make() -> Generator:
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24}
    return Generator(GeneratorConfig(LEVELS, **shape, dropout=0.3, level_scales=True)).double()  # type: ignore[arg-type]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(0, 10**6))
def test_steps_equal_full_recomputation_for_any_parents(histories: list[int], widths: list[int], seed: int) -> None:
    generator = make()
    decoder = GeneratorDecoder(generator)
    random = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(LEVELS)
    prompts = []
    for items in histories:
        codes = (torch.rand(items, len(LEVELS), generator=random) * sizes).long()
        prompts.append(torch.from_numpy(generator.vocabulary.history_tokens(generator.vocabulary.item_tokens(codes.numpy()))))
    offsets = torch.tensor([0, *itertools.accumulate(len(p) for p in prompts)])
    logits, state = decoder.begin(torch.cat(prompts), offsets)
    assert logits.shape == (len(prompts), LEVELS[0])

    def recompute(tokens: torch.Tensor, level: int) -> torch.Tensor:
        with torch.no_grad():
            return generator.logits(generator(tokens, torch.tensor([0, len(tokens)]))[-1], level)

    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, recompute(prompt, 0))
    paths = [[prompt] for prompt in prompts]
    for level, width in enumerate(widths, start=1):
        parents = torch.randint(len(paths[0]), (len(prompts), width), generator=random)
        codes = torch.randint(LEVELS[level - 1], (len(prompts), width), generator=random)
        logits = decoder.step(state, level, parents, codes)
        assert logits.shape == (len(prompts), width, LEVELS[level])
        tokens = codes + generator.vocabulary.first(level - 1)
        paths = [[torch.cat([paths[r][parents[r, w]], tokens[r, w : w + 1]]) for w in range(width)] for r in range(len(prompts))]
        for request, beam in itertools.product(range(len(prompts)), range(width)):
            torch.testing.assert_close(logits[request, beam], recompute(paths[request][beam], level))


def test_wrong_order_and_empty_prompts_are_refused() -> None:
    decoder = GeneratorDecoder(make())
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decoder.begin(torch.tensor([0]), torch.tensor([0, 1, 1]))
    _, state = decoder.begin(torch.tensor([0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="level 2 after 0 steps"):
        decoder.step(state, 2, torch.tensor([[0]]), torch.tensor([[0]]))
