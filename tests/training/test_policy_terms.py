"""The policy's terms equal those of a plain forward over prompt and item, and the softmax over the catalog's children by definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.policy_terms import Items, PolicyTerms, divergence_CL
from semantide.shared.decoding.sampling import Sampling, sample_groups
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.trie import Trie

SIZES = (3, 4, 3)


class World:
    def __init__(self, seed: int, items: int, requests: int, temperature: float = 1.0, seen_bias: bool = True) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        config = GeneratorConfig(SIZES, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16, initializer_range=0.8)
        self.generator = Generator(replace(config, seen_bias=seen_bias)).eval()
        if seen_bias:
            torch.nn.init.normal_(self.generator.seen_bias.weight, std=0.3)
        every = np.stack(np.meshgrid(*map(np.arange, SIZES), indexing="ij"), -1).reshape(-1, 3)
        self.codes = every[rng.permutation(len(every))[:items]]
        self.trie = SearchTrie.build(Trie.build(self.codes))
        self.tokens = self.generator.vocabulary.item_tokens(self.codes)
        self.histories = [rng.integers(0, items, rng.integers(0, 5)) for _ in range(requests)]
        self.prompts = Jagged.from_sequences(self.generator.vocabulary.history_tokens(self.tokens[history]) for history in self.histories)
        self.terms = PolicyTerms(self.trie, torch.from_numpy(self.tokens), temperature)


@torch.no_grad()
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(2, 20), st.integers(1, 3), st.floats(0.5, 2), st.booleans(), st.data())
def test_terms_are_those_of_the_plain_forward(seed: int, items: int, requests: int, temperature: float, seen_bias: bool, data: st.DataObject) -> None:
    world = World(seed, items, requests, temperature, seen_bias)
    excluded = [data.draw(st.lists(st.integers(0, items - 1), max_size=items - 1, unique=True)) for _ in range(requests)]
    rules = ItemFilter.build(world.trie, [world.trie.every_item], [0] * requests, excluded)
    groups = sample_groups(
        GeneratorDecoder(world.generator),
        world.trie,
        world.prompts.values,
        world.prompts.offsets_B1,
        Sampling(4, 1, temperature),
        torch.Generator(),
        node_filter=rules,
    )
    asked = [(request, row) for request in range(requests) for row in groups.rows_RG[request].tolist() if row >= 0]
    chosen = Items(torch.tensor([row for _, row in asked]), torch.tensor([request for request, _ in asked]))
    terms = world.terms.of(world.generator, world.terms.places(world.generator, world.prompts, chosen, rules))
    assert torch.allclose(terms.policy_CL, groups.log_probs_RGL[groups.rows_RG >= 0], atol=1e-4), "the policy that draws is the policy that learns"
    decoder = GeneratorDecoder(world.generator)
    for place, (request, row) in enumerate(asked):
        allowed = [other for other in range(items) if other not in excluded[request]]
        prompt = world.prompts.values[world.prompts.offsets_B1[request] : world.prompts.offsets_B1[request + 1]]
        logits, state = decoder.begin(prompt, torch.tensor([0, len(prompt)]))
        for level in range(3):
            code, whole = int(world.codes[row, level]), logits.flatten().float()

            def after(rows: Any, row: int = row, level: int = level) -> list[int]:
                return sorted({int(world.codes[other, level]) for other in rows if (world.codes[other, :level] == world.codes[row, :level]).all()})

            children = after(allowed)
            table = (whole[children] / temperature).log_softmax(0)
            assert float(terms.policy_CL[place, level]) == pytest.approx(float(table[children.index(code)]), abs=1e-4)
            assert float(terms.row_CL[place, level]) == pytest.approx(float(whole.log_softmax(0)[code]), abs=1e-4)
            assert float(terms.valid_CL[place, level]) == pytest.approx(float(whole.log_softmax(0)[after(range(items))].logsumexp(0)), abs=1e-4)
            assert float(terms.entropy_CL[place, level]) == pytest.approx(float(-(table.exp() * table).sum()), abs=1e-4)
            if level < 2:
                logits = decoder.step(state, level + 1, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[code]]))


def test_divergence_is_that_of_the_policies_items() -> None:
    """Summed over codes and averaged over the policy's own items, it is the divergence of the two distributions of items."""
    world, other = World(1, 20, 1), World(2, 20, 1)
    every = Items(torch.arange(20), torch.zeros(20, dtype=torch.int64))
    places = world.terms.places(world.generator, world.prompts, every)
    with torch.no_grad():
        terms, start = world.terms.of(world.generator, places), world.terms.of(other.generator, places)
        chances = terms.policy_CL.sum(1).exp()
        assert float(chances.sum()) == pytest.approx(1, abs=1e-4)
        wanted = float((chances * (terms.policy_CL.sum(1) - start.policy_CL.sum(1))).sum())
        assert float((chances * divergence_CL(terms, start).sum(1)).sum()) == pytest.approx(wanted, abs=1e-4)
        assert float((chances * terms.entropy_CL.sum(1)).sum()) == pytest.approx(float(-(chances * chances.log()).sum()), abs=1e-4)
        assert float(divergence_CL(terms, terms).abs().max()) == 0


def test_gradients_reach_every_weight_and_a_positive_may_be_one_that_is_not_drawn() -> None:
    world = World(3, 9, 2)
    rules = ItemFilter.build(world.trie, [world.trie.every_item], [0, 0], [[4], []])
    places = world.terms.places(world.generator, world.prompts, Items(torch.tensor([4, 2]), torch.tensor([0, 1])), rules)
    terms = world.terms.of(world.generator, places)
    (terms.policy_CL.sum() + terms.row_CL.sum() + terms.valid_CL.sum() + terms.entropy_CL.sum()).backward()
    assert all(parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()) for parameter in world.generator.parameters())
    assert bool(torch.isfinite(terms.policy_CL).all())
