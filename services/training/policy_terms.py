"""What the loss of an alignment needs of the generator, with gradients: probabilities of given items under the policy, and what goes beside the catalog.

Legend: R prompts, C items (rollouts and positives of all prompts), L levels, K codes of a level, T prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semantide.shared.decoding.sampling import Policy
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.targets import TargetBlocks, target_counts, target_logits


@dataclass(frozen=True)
class Items:
    """Items to look at, each behind the whole of one prompt.

    Shapes: ``rows_C`` catalog rows, ``prompts_C`` ascending.
    """

    rows_C: Tensor
    prompts_C: Tensor


@dataclass(frozen=True)
class Terms:
    """Of each code of each item, at the prefix before it.

    ``policy_CL`` log-probability under the policy (allowed children, temperature); ``row_CL`` among all codes of its level, as in supervised training;
    ``valid_CL`` log-probability that the next code leads to any item at all; ``entropy_CL`` of the policy; ``tables`` the policy's log-probabilities of all
    codes, [C, K] for each level.
    """

    policy_CL: Tensor
    row_CL: Tensor
    valid_CL: Tensor
    entropy_CL: Tensor
    tables: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Level:
    """What is known of one level before any model is asked.

    Shapes: ``codes_C1``; ``shut_CK`` codes that lead to no item, ``closed_CK`` those that the policy must not take; ``seen_CK`` what the history holds.
    """

    codes_C1: Tensor
    shut_CK: Tensor
    closed_CK: Tensor
    seen_CK: Tensor | None


@dataclass(frozen=True)
class Places:
    """Prompts, the items behind them, and what the catalog has at each of their prefixes: the same for every model of one vocabulary."""

    prompts: Jagged
    blocks: TargetBlocks
    levels: tuple[_Level, ...]


class PolicyTerms:
    """Reads prompts and items through a generator, and compares its probabilities with the trie.

    ``tokens_NL`` are those of the catalog's rows.
    """

    def __init__(self, trie: SearchTrie, tokens_NL: Tensor, temperature: float) -> None:
        self._trie, self.tokens_NL, self._temperature = trie, tokens_NL, temperature

    def places(self, generator: Generator, prompts: Jagged, items: Items, rules: ItemFilter | None = None) -> Places:
        """What does not depend on the weights; ``rules`` as they were when rollouts were drawn."""
        vocabulary = generator.vocabulary
        tokens_CL = self.tokens_NL[items.rows_C]
        whole_C = ((prompts.lengths_B - len(vocabulary.layout.begin)) // generator.prompt_shape.tokens_per_item)[items.prompts_C]
        blocks = TargetBlocks.of_items(tokens_CL, items.prompts_C, whole_C)
        every, allowed = Policy(self._trie), Policy(self._trie, self._temperature, rules)
        leaves_C = self._trie.leaf_of[items.rows_C]
        found = []
        for level, num_codes in enumerate(vocabulary.level_sizes):
            codes_C1 = (tokens_CL[:, level] - vocabulary.first(level)).unsqueeze(1)
            nodes_C = torch.searchsorted(self._trie.leaf_bounds[level], leaves_C, right=True) - 1
            shut_CK = every.children(level, nodes_C, items.prompts_C, num_codes) < 0
            closed_CK = shut_CK if rules is None else allowed.children(level, nodes_C, items.prompts_C, num_codes) < 0
            # A positive may be what the policy must not draw: its probability there is that among the open codes and its own.
            closed_CK = closed_CK.scatter(1, codes_C1, False)
            found.append(_Level(codes_C1, shut_CK, closed_CK, target_counts(generator, prompts.values, prompts.offsets_B1, blocks, level)))
        return Places(prompts, blocks, tuple(found))

    def of(self, generator: Generator, places: Places) -> Terms:
        """The terms of all items."""
        prompts = places.prompts
        found = target_logits(generator, prompts.values, prompts.offsets_B1, places.blocks, [level.seen_CK for level in places.levels])
        policy, row, valid, entropy, tables = [], [], [], [], []
        for level, logits_CK in zip(places.levels, found, strict=True):
            logits_CK = logits_CK.float()
            total_C = logits_CK.logsumexp(1)
            row.append(logits_CK.gather(1, level.codes_C1).squeeze(1) - total_C)
            valid.append(logits_CK.masked_fill(level.shut_CK, -torch.inf).logsumexp(1) - total_C)
            table_CK = (logits_CK / self._temperature).masked_fill(level.closed_CK, -torch.inf).log_softmax(1)
            policy.append(table_CK.gather(1, level.codes_C1).squeeze(1))
            finite_CK = table_CK.masked_fill(level.closed_CK, 0.0)
            entropy.append(-(finite_CK.exp() * finite_CK).sum(1))
            tables.append(table_CK)
        return Terms(torch.stack(policy, 1), torch.stack(row, 1), torch.stack(valid, 1), torch.stack(entropy, 1), tuple(tables))


def divergence_CL(terms: Terms, start: Terms) -> Tensor:
    """Kullback-Leibler divergence of the policy from the start at each prefix, exactly; its sum over codes of rollouts that the policy drew estimates that of items."""
    parts = []
    for own_CK, before_CK in zip(terms.tables, start.tables, strict=True):
        shut_CK = own_CK == -torch.inf
        own_CK, before_CK = own_CK.masked_fill(shut_CK, 0.0), before_CK.masked_fill(shut_CK, 0.0)
        parts.append((own_CK.exp() * (own_CK - before_CK)).masked_fill(shut_CK, 0.0).sum(1))
    return torch.stack(parts, 1)
