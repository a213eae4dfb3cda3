import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.models.seen_bias import SeenBias, SeenItems, earlier_counts
from semantide.shared.models.vocabulary import Vocabulary

LEVELS = (3, 2, 4)
item = st.tuples(*(st.integers(0, size - 1) for size in LEVELS))


def packed(histories: list[list[tuple[int, ...]]]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.tensor([code for history in histories for code in history], dtype=torch.long).view(-1, len(LEVELS))
    return codes, torch.tensor([0, *torch.tensor([len(history) for history in histories]).cumsum(0).tolist()])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(item, max_size=8), min_size=1, max_size=4))
def test_counts_are_those_of_a_loop_over_the_earlier_items(histories: list[list[tuple[int, ...]]]) -> None:
    codes, offsets = packed(histories)
    for level, size in enumerate(LEVELS):
        expected = [
            [sum(other[:level] == one[:level] and other[level] == code for other in history[:place]) for code in range(size)]
            for history in histories
            for place, one in enumerate(history)
        ]
        assert earlier_counts(codes, offsets, level, size).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(item, max_size=8), min_size=1, max_size=4), st.integers(0, 10**6))
def test_beams_count_the_items_of_their_own_prompt_below_their_prefix(histories: list[list[tuple[int, ...]]], seed: int) -> None:
    random, vocabulary = torch.Generator().manual_seed(seed), Vocabulary(LEVELS)
    prompts = [torch.tensor([0, *(vocabulary.first(level) + code for entry in history for level, code in enumerate(entry)), 2][: -1 + seed % 2 or None])
               for history in histories]  # every other example ends within an item  # fmt: skip
    seen = SeenItems(torch.cat(prompts), torch.tensor([0, *torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()]), vocabulary)
    prefixes: list[list[tuple[int, ...]]] = [[()] for _ in histories]
    for level, size in enumerate(LEVELS):
        counts = seen.counts(level).view(len(histories), -1, size)
        for request, history in enumerate(histories):
            for beam, prefix in enumerate(prefixes[request]):
                assert counts[request, beam].tolist() == [sum(entry[: level + 1] == (*prefix, code) for entry in history) for code in range(size)]
        parents = torch.randint(len(prefixes[0]), (len(histories), 5), generator=random)
        codes = torch.randint(size, (len(histories), 5), generator=random)
        if level + 1 < len(LEVELS):
            first = torch.arange(len(histories))[:, None] * len(prefixes[0])
            seen.extend(level, (parents + first).flatten(), codes.flatten())
        prefixes = [[(*prefixes[r][int(parents[r, w])], int(codes[r, w])) for w in range(5)] for r in range(len(histories))]


def test_a_fresh_bias_changes_nothing_and_a_trained_one_only_what_was_seen() -> None:
    bias = SeenBias(Vocabulary(LEVELS))
    counts = torch.tensor([[0.0, 1.0, 3.0]])
    assert bias(counts, 0).tolist() == [[0, 0, 0]]
    with torch.no_grad():
        bias.weight.fill_(-1)
    assert bias(counts, 0)[0, 0] == 0
    assert bias(counts, 0)[0, 2] < bias(counts, 0)[0, 1] < 0


def test_tokens_that_are_no_items_are_not_counted() -> None:
    seen = SeenItems(torch.tensor([0, 1, 4, 6, 9, 1, 1]), torch.tensor([0, 7]), Vocabulary(LEVELS))
    assert seen.counts(0).tolist() == [[1, 0, 0]]
