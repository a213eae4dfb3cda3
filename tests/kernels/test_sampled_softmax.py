"""The sampled softmax: what it estimates, what it leaves out, and that every path agrees with the reference."""

from __future__ import annotations

import torch

from semantide.kernels.sampled_softmax import known_keys, sampled_softmax


def test_all_items_as_shared_negatives_give_the_full_softmax() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_TD, vectors_UD = torch.randn(5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    positives_T = torch.tensor([0, 3, 3, 10, 7])
    losses_T = sampled_softmax.reference(hidden_TD, vectors_UD, positives_T, shared_S=torch.arange(11))
    torch.testing.assert_close(losses_T, torch.nn.functional.cross_entropy(hidden_TD @ vectors_UD.T, positives_T, reduction="none"))


def test_known_positives_and_accidental_hits_count_for_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden_TD, vectors_UD = torch.randn(2, 4, generator=generator), torch.randn(6, 4, generator=generator)
    negatives_TR = torch.tensor([[0, 1, 4, -1], [2, 5, 3, 3]])
    positives_T, sequences_T = torch.tensor([0, 2]), torch.tensor([0, 1])
    known_K = known_keys(torch.tensor([0, 1, 1]), torch.tensor([1, 3, 2]), 6)
    losses_T = sampled_softmax.reference(hidden_TD, vectors_UD, positives_T, negatives_TR, sequences_T=sequences_T, known_K=known_K)
    left_T1 = torch.tensor([[4], [5]])
    torch.testing.assert_close(losses_T, sampled_softmax.reference(hidden_TD, vectors_UD, positives_T, left_T1))
