"""Groups hold items of the catalog alone, with their exact probabilities, and come as often as the policy says."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.sampling import Sampling, free_beams, sample_groups, spelled_rows
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.errors import PermanentError
from semantide.shared.trie import Trie

from .table_model import TableModel, prompts, random_codes


def world(seed: int, items: int, sizes: tuple[int, ...], requests: int) -> tuple[TableModel, SearchTrie, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(generator, items, sizes)
    tokens, offsets = prompts(generator, requests)
    return TableModel(sizes, seed, spread=1.0), SearchTrie.build(Trie.build(codes.numpy())), codes, tokens, offsets


def item_log_probs(model: TableModel, codes: torch.Tensor, allowed: list[int], prompt: torch.Tensor, temperature: float) -> dict[int, float]:
    """The policy by definition: at every prefix a softmax over the codes that an allowed item goes on with."""
    out = {}
    for row in allowed:
        total = 0.0
        for level in range(codes.shape[1]):
            logits, state = model.begin(prompt, torch.tensor([0, len(prompt)]))
            for before in range(level):
                logits = model.step(state, before + 1, torch.zeros(1, 1, dtype=torch.int64), codes[row, before].view(1, 1))
            peers = sorted({int(codes[other, level]) for other in allowed if torch.equal(codes[other, :level], codes[row, :level])})
            own = (logits.flatten()[peers] / temperature).log_softmax(0)
            total += float(own[peers.index(int(codes[row, level]))])
        out[row] = total
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 24), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.data())
def test_a_group_holds_allowed_items_with_their_exact_log_probabilities(
    seed: int, items: int, requests: int, group: int, distinct: bool, data: st.DataObject
) -> None:
    model, trie, codes, tokens, offsets = world(seed, items, (3, 4, 5), requests)
    beams = data.draw(st.integers(0, group))
    excluded = [data.draw(st.lists(st.integers(0, items - 1), max_size=items - 1, unique=True)) for _ in range(requests)]
    allowed = [[row for row in range(items) if row not in rows] for rows in excluded]
    rules = ItemFilter.build(trie, [trie.every_item], [0] * requests, excluded)
    drawn = Sampling(group, beams, 1.7, distinct)
    groups = sample_groups(model, trie, tokens, offsets, drawn, torch.Generator().manual_seed(seed), node_filter=rules)
    again = sample_groups(model, trie, tokens, offsets, drawn, torch.Generator().manual_seed(seed), node_filter=rules)
    assert torch.equal(groups.rows_RG, again.rows_RG) and groups.rows_RG.shape == (requests, group)
    for request in range(requests):
        rows = [row for row in groups.rows_RG[request].tolist() if row >= 0]
        exact = item_log_probs(model, codes, allowed[request], tokens[offsets[request] : offsets[request + 1]], 1.7)
        assert set(rows) <= set(allowed[request])
        assert groups.log_probs_RGL[request].sum(-1).tolist()[: len(rows)] == pytest.approx([exact[row] for row in rows], abs=1e-4)
        if distinct:
            assert len(set(rows)) == len(rows) and len(rows) == min(group, len(allowed[request]))
        else:
            assert len(rows) == group - beams + min(beams, len(allowed[request]))
        if beams:
            best = sorted(exact, key=lambda row: -exact[row])
            if beams >= len(allowed[request]):
                assert rows[: len(best)] == best


@pytest.mark.parametrize("distinct", [False, True])
def test_items_come_as_often_as_the_policy_says(distinct: bool) -> None:
    model, trie, codes, tokens, _ = world(5, 12, (3, 3, 3), 1)
    exact = item_log_probs(model, codes, list(range(12)), tokens, 1.0)
    draws = 4000
    many, bounds = tokens.repeat(draws), torch.arange(draws + 1) * len(tokens)
    groups = sample_groups(model, trie, many, bounds, Sampling(2, distinct=distinct), torch.Generator().manual_seed(3))
    first, second = groups.rows_RG.T
    for row in range(12):
        share = torch.tensor(exact[row]).exp()
        error = 4.5 * float((share * (1 - share) / draws).sqrt()) + 1e-3
        assert abs(float((first == row).float().mean() - share)) < error
        # The second of an ordered sample without replacement: p_j / (1 - p_i) after every other first one.
        wanted = (
            sum(float(torch.tensor(exact[i] + exact[row]).exp() / (1 - torch.tensor(exact[i]).exp())) for i in range(12) if i != row) if distinct else share
        )
        assert abs(float((second == row).float().mean() - wanted)) < error


def test_free_decoding_finds_the_best_codes_and_says_which_spell_no_item() -> None:
    model, trie, codes, tokens, offsets = world(2, 9, (3, 4, 2), 3)
    found = free_beams(model, (3, 4, 2), tokens, offsets, 24)
    every = torch.tensor(list(itertools.product(range(3), range(4), range(2))))
    for request in range(3):
        assert {tuple(row) for row in found[request].tolist()} == {tuple(row) for row in every.tolist()}
    rows = spelled_rows(trie, found)
    by_codes = {tuple(row): number for number, row in enumerate(codes.tolist())}
    assert rows.tolist() == [[by_codes.get(tuple(row), -1) for row in request] for request in found.tolist()]
    assert free_beams(model, (3, 4, 2), tokens, offsets, 5)[:, 0].tolist() == found[:, 0].tolist()


def test_wrong_numbers_are_refused() -> None:
    model, trie, _, tokens, offsets = world(1, 5, (3, 3), 1)
    with pytest.raises(ValueError, match="no more beams"):
        Sampling(4, 5)
    with pytest.raises(ValueError, match=r"from 0\.001"):
        Sampling(temperature=0)
    model.tables[1][:] = torch.nan
    with pytest.raises(PermanentError, match="go back to an earlier model"):
        sample_groups(model, trie, tokens, offsets, Sampling(2), torch.Generator())
