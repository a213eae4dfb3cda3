"""Negatives: drawn as often as their probability says, from the sources that were asked for, and never what a user is known to have taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels.sampled_softmax import sampled_softmax
from semantide.shared.negative_sampling import AliasTable, KnownPairs, NegativeMix, NegativeSampler


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30).filter(lambda weights: sum(weights) > 0.1))
def test_an_alias_table_holds_the_probabilities_exactly(weights: list[float]) -> None:
    table = AliasTable(np.array(weights))
    size = len(weights)
    held = np.zeros(size)
    np.add.at(held, np.arange(size), table.cut_N / size)
    np.add.at(held, table.other_N, (1 - table.cut_N) / size)
    np.testing.assert_allclose(held, np.array(weights) / sum(weights), atol=1e-12)


def world(mix: NegativeMix, num_items: int = 24) -> tuple[NegativeSampler, np.ndarray]:
    rng = np.random.default_rng(0)
    codes_NL = np.stack([np.arange(num_items) // 6, np.arange(num_items) % 6], 1)
    return NegativeSampler(mix, rng.integers(0, 50, num_items), codes_NL), codes_NL


@settings(max_examples=25, deadline=None)
@given(
    uniform=st.integers(0, 3), popularity=st.integers(0, 3), prefix=st.integers(0, 3), beams=st.integers(0, 3), exponent=st.sampled_from([0.0, 0.5, 1.0]),
    width=st.integers(1, 4),
)  # fmt: skip
def test_rows_come_as_often_as_their_probability_says(uniform: int, popularity: int, prefix: int, beams: int, exponent: float, width: int) -> None:
    if not uniform + popularity + prefix + beams:
        popularity = 1
    mix = NegativeMix(uniform, popularity, exponent, prefix, 1, beams)
    sampler, _ = world(mix)
    repeats = 6000
    beams_TW = np.tile(np.array([[5, 9, -1, 20]])[:, :width], (repeats, 1))
    rows_TR = torch.from_numpy(sampler.draw(np.full(repeats, 7), np.random.default_rng(1), beams_TW=beams_TW))
    assert rows_TR.shape == (repeats, mix.size)
    # What is drawn with probability q is expected R q times: weighed by one over that, each item that can come counts once per target.
    log_q_TR = sampler.log_q(torch.full((repeats,), 7), rows_TR)
    weights_TR = torch.exp(-log_q_TR) / mix.size * (rows_TR >= 0)
    sums_N = torch.zeros(24).index_add_(0, rows_TR.clamp(min=0).flatten(), weights_TR.flatten()) / repeats
    can = np.zeros(24, dtype=bool)
    can[[row for row in beams_TW[0].tolist() if row >= 0] if beams else []] = True
    can[6:12] |= prefix > 0
    can |= uniform + popularity > 0
    reached = torch.bincount(rows_TR[rows_TR >= 0], minlength=24) > 0
    assert not (reached.numpy() & ~can).any()
    if beams and beams < int((beams_TW[0] >= 0).sum()) and not uniform + popularity:
        return  # of more beams than are taken, each is there for certain only where it was chosen
    np.testing.assert_allclose(sums_N[can], 1.0, atol=6 * np.sqrt(float(weights_TR.max()) / repeats) + 1e-4)


def test_prefix_negatives_begin_like_the_target() -> None:
    sampler, codes_NL = world(NegativeMix(popularity=0, prefix=8))
    targets_T = np.arange(24)
    rows_TR = sampler.draw(targets_T, np.random.default_rng(2))
    assert (codes_NL[rows_TR, 0] == codes_NL[targets_T, 0][:, None]).all()


def test_an_item_without_codes_has_no_prefix_negatives() -> None:
    codes_NL = np.array([[0, 0], [-1, -1], [0, 1], [-1, -1]])
    sampler = NegativeSampler(NegativeMix(popularity=0, prefix=4), np.ones(4), codes_NL)
    rows_TR = sampler.draw(np.array([1, 0]), np.random.default_rng(2))
    assert (rows_TR[0] == -1).all() and set(rows_TR[1].tolist()) <= {0, 2}
    assert torch.isfinite(sampler.log_q(torch.tensor([1, 0]), torch.from_numpy(rows_TR))).all()


def test_beams_give_what_they_hold_and_nothing_else() -> None:
    sampler, _ = world(NegativeMix(popularity=0, beams=4))
    rows_TR = sampler.draw(np.array([0, 1]), np.random.default_rng(3), beams_TW=np.array([[3, 8, -1], [-1, -1, -1]]))
    assert sorted(rows_TR[0].tolist()) == [-1, -1, 3, 8] and (rows_TR[1] == -1).all()
    # What is certain to be among the four is drawn with probability a quarter: expected once.
    log_q_TR = sampler.log_q(torch.tensor([0, 1]), torch.from_numpy(rows_TR))
    torch.testing.assert_close(log_q_TR[0][torch.from_numpy(rows_TR[0]) >= 0], torch.full((2,), 0.25).log())
    with pytest.raises(ValueError, match="give \\[targets, beams\\]"):
        sampler.draw(np.array([0]), np.random.default_rng(3))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_known_items_are_never_negatives_and_one_seed_draws_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler, _ = world(NegativeMix(uniform=4, popularity=4, prefix=4))
    users_K, rows_K = rng.integers(0, 5, 30), rng.integers(0, 24, 30)
    known = KnownPairs(users_K, rows_K, 24)
    users_T, targets_T = rng.integers(0, 6, 40), rng.integers(0, 24, 40)
    drawn = sampler.draw(targets_T, np.random.default_rng(seed), users_T=users_T, known=known)
    again = sampler.draw(targets_T, np.random.default_rng(seed), users_T=users_T, known=known)
    pairs = set(zip(users_K.tolist(), rows_K.tolist(), strict=True))
    assert not any((user, row) in pairs for user, rows in zip(users_T.tolist(), drawn.tolist(), strict=True) for row in rows)
    assert np.array_equal(drawn, again)


@pytest.mark.parametrize(("count", "in_batch"), [(0, True), (9, False), (9, True)])
def test_negatives_that_a_batch_shares_are_unbiased_too(count: int, in_batch: bool) -> None:
    rng = np.random.default_rng(4)
    counts = rng.integers(1, 40, 12)
    sampler = NegativeSampler(NegativeMix(exponent=0.5), counts)
    hidden_D, vectors_UD = torch.randn(4, generator=torch.Generator().manual_seed(1)), torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    logits_U = vectors_UD @ hidden_D
    estimates = []
    for _ in range(2000):
        targets_T = rng.choice(12, 30, p=counts / counts.sum()) if in_batch else None
        rows_S = torch.from_numpy(sampler.draw_shared(count, rng, targets_T))
        log_q_S = sampler.log_q_shared(rows_S, count, None if targets_T is None else torch.from_numpy(targets_T))
        loss_1 = sampled_softmax(hidden_D[None], vectors_UD, torch.tensor([3]), shared_S=rows_S, log_q_S=log_q_S)
        estimates.append((loss_1 + logits_U[3]).exp().item())
    assert np.mean(estimates) == pytest.approx(logits_U.exp().sum().item(), rel=0.05)


def test_wrong_mixtures_are_named() -> None:
    for values, text in (
        ({"popularity": 0}, "no source"),
        ({"uniform": -1}, "uniform is -1"),
        ({"beams": 1.5}, "whole number"),
        ({"random": 3}, "'random' is unknown"),
        ({"exponent": True}, "exponent"),
    ):
        with pytest.raises(ValueError, match=text):
            NegativeMix.of(values)
    assert NegativeMix.of(NegativeMix(prefix=3).values()) == NegativeMix(prefix=3)
    with pytest.raises(ValueError, match="give a catalog"):
        NegativeSampler(NegativeMix(prefix=1), np.ones(3))
    with pytest.raises(ValueError, match="no items"):
        NegativeSampler(NegativeMix(), np.ones(0))
