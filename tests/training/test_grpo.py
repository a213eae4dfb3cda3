"""The loss of GRPO-SR against its formulas, and the guard against the cases that it is for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.alignment_guard import Guard, Standing
from semantide.services.training.alignment_recipes import ALIGN_RECIPES, align_recipe
from semantide.services.training.grpo import group_advantages, policy_loss, policy_mean, policy_weights, prefix_advantages, shaped_rewards
from semantide.shared.paired import difference


def rewards(seed: int, groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(groups, size, generator=generator) < 0.8
    return torch.rand(groups, size, generator=generator), present


def test_the_base_reward_is_gate_times_preference_and_known_positives_have_theirs() -> None:
    preference = torch.tensor([[0.2, 0.4, 0.9]])
    gate, known = torch.tensor([[True, False, False]]), torch.tensor([[False, False, True]])
    assert shaped_rewards(preference, gate, known, 1.5).tolist() == [[pytest.approx(0.2), 0, 1.5]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.integers(1, 5), st.integers(2, 7), st.floats(0.1, 5), st.floats(-3, 3))
def test_advantages_are_relative_to_the_group(seed: int, groups: int, size: int, scale: float, shift: float) -> None:
    given_BG, present = rewards(seed, groups, size)
    found = group_advantages(given_BG, present, 3, least_spread=1e-3)
    for group in range(groups):
        own = given_BG[group][present[group]]
        if len(own) < 2 or float(own.std(correction=0)) <= 1e-3:
            assert not found.used_B[group] and float(found.values_BGL[group].abs().max()) == 0
        else:
            wanted = (own - own.mean()) / own.std(correction=0)
            assert torch.allclose(found.values_BGL[group][present[group]], wanted[:, None].expand(-1, 3), atol=1e-4)
    other = group_advantages(given_BG * scale + shift, present, 3, least_spread=1e-3 * scale)
    assert torch.allclose(found.values_BGL, other.values_BGL, atol=1e-2)
    # Without anything in common beyond the root, or everything, prefixes change only what later codes are compared with.
    codes = torch.arange(size)[None, :, None].expand(groups, -1, 3)
    shared = prefix_advantages(given_BG, present, codes, least_spread=1e-3)
    assert torch.allclose(shared.values_BGL[:, :, 0], found.values_BGL[:, :, 0], atol=1e-4)
    same = prefix_advantages(given_BG, present, torch.zeros_like(codes), least_spread=1e-3)
    assert torch.allclose(same.values_BGL, found.values_BGL, atol=1e-4)


def test_a_prefix_is_compared_with_those_that_share_it() -> None:
    rewards_BG, present = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool)
    codes = torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]])
    values = prefix_advantages(rewards_BG, present, codes, least_spread=0, divide=False).values_BGL
    assert values[0, :, 0].tolist() == [0.75, -0.25, -0.25, -0.25]
    # (1 + 0 + 1/4) / 3 and (0 + 0 + 1/4) / 3
    assert values[0, :, 1].tolist() == pytest.approx([1 - 1.25 / 3, -1.25 / 3, -0.25 / 3, -0.25 / 3])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.integers(0, 2), st.integers(0, 3), st.booleans())
def test_weighted_rollouts_stand_for_the_policy_whatever_was_drawn_beside_beams(seed: int, beams: int, draws: int, distinct: bool) -> None:
    """The mean over everything that may be drawn is the policy's own, exactly."""
    generator = torch.Generator().manual_seed(seed)
    policy, values = torch.rand(5, generator=generator).double().softmax(0), torch.rand(5, generator=generator).double()
    best = policy.argsort(descending=True)[:beams].tolist()
    left = [item for item in range(5) if item not in best]
    expected, total = 0.0, 0.0
    for drawn in itertools.permutations(left, draws) if distinct else itertools.product(range(5), repeat=draws):
        chance, mass = 1.0, 1.0 - float(policy[best].sum()) if distinct else 1.0
        for item in drawn:
            chance *= float(policy[item]) / mass
            mass -= float(policy[item]) if distinct else 0
        rows = torch.tensor([[*best, *drawn, 0]])
        present = torch.ones_like(rows, dtype=torch.bool)
        present[0, -1] = False  # fewer were there than asked for
        weights = policy_weights(policy[rows].log().float()[..., None].expand(-1, -1, 2) / 2, present, beams, distinct)
        expected += chance * float(policy_mean(values[rows], weights))
        total += chance * float(weights.sum())
    wanted = float((policy * values).sum()) if draws else float((policy * values)[best].sum() / policy[best].sum()) if best else 0.0
    assert expected == pytest.approx(wanted, abs=1e-5) and total == pytest.approx(1.0 if draws or best else 0.0, abs=1e-5)


def test_the_loss_is_the_papers_and_its_gradient_that_of_weighted_log_probabilities() -> None:
    given_BG, present = rewards(3, 4, 5)
    given_BG[2] = 0.5  # a group without spread
    advantages = group_advantages(given_BG, present, 3, least_spread=1e-3)
    log_probs = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss, held = policy_loss(log_probs, None, advantages, present)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    used = [group for group in range(4) if advantages.used_B[group]]
    assert 2 not in used and float(held) == 0 and float(gradient[2].abs().max()) == 0
    for group in used:
        many = int(present[group].sum())
        wanted = -advantages.values_BGL[group] / 3 / many / len(used) * present[group][:, None]
        assert torch.allclose(gradient[group], wanted, atol=1e-6)


@pytest.mark.parametrize(("beams", "distinct"), [(4, True), (0, True), (0, False)])
def test_weighed_by_what_rollouts_stand_for_the_loss_has_the_gradient_of_the_expected_reward(beams: int, distinct: bool) -> None:
    """And counted alike it has so only where all are drawn with replacement, as in the paper."""
    groups, size, items = 4000, 16, 60
    generator = torch.Generator().manual_seed(7)
    scores_N, rewards_N = (2 * torch.randn(items, generator=generator)).double(), torch.rand(items, generator=generator).double()
    policy_N = scores_N.softmax(0)
    best = policy_N.argsort(descending=True)[:beams]
    if distinct:
        keys = policy_N.log() - (-torch.rand(groups, items, generator=generator).double().log()).log()
        keys[:, best] = -torch.inf
        drawn = keys.topk(size - beams, 1).indices
    else:
        drawn = torch.multinomial(policy_N, groups * size, True, generator=generator).view(groups, size)
    rows_BG = torch.cat([best.expand(groups, -1), drawn], 1)
    present = torch.ones_like(rows_BG, dtype=torch.bool)
    weights = policy_weights(policy_N.log()[rows_BG][..., None], present, beams, distinct)
    advantages = group_advantages(rewards_N[rows_BG], present, 1, least_spread=1e-3, divide=False)
    wanted = policy_N * (rewards_N - (policy_N * rewards_N).sum())
    alike = {}
    for weights_BG in (None, weights):
        variable = scores_N.clone().requires_grad_()
        loss, _ = policy_loss(variable.log_softmax(0)[rows_BG][..., None], None, advantages, present, weights_BG=weights_BG)
        (gradient,) = torch.autograd.grad(-loss, variable)
        alike[weights_BG is not None] = float(torch.cosine_similarity(gradient, wanted, 0))
    assert alike[True] > 0.99 and (alike[False] > 0.99) == (not distinct), alike


def test_clipping_holds_back_what_has_gone_far_enough_and_nothing_else() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool), 1, least_spread=0)
    before = torch.zeros(1, 2, 1)
    for moved, held_back in (((0.5, 0.0), 0.5), ((0.0, -0.5), 0.5), ((-0.5, 0.5), 0.0)):
        log_probs = torch.tensor(moved).view(1, 2, 1).requires_grad_()
        loss, held = policy_loss(log_probs, before, advantages, torch.ones(1, 2, dtype=torch.bool), clip=0.2)
        assert float(held) == held_back
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert int((gradient == 0).sum()) == round(2 * held_back)


def standing(hits: float, reward: float, judge: float | None, spread: float = 0.0) -> Standing:
    rng = np.random.default_rng(0)
    noise = spread * rng.normal(size=200)
    return Standing((np.arange(400) < hits * 400).astype(float), reward + noise, None if judge is None else judge + noise)


@pytest.mark.parametrize(
    ("now", "loss", "stops"),
    [
        (standing(0.5, 0.9, 0.6), 0.0, ""),
        (standing(0.4, 0.9, 0.6), 0.0, "HR@50 fell from 0.5000 to 0.4000"),
        (standing(0.4, 0.9, 0.6), 0.3, ""),
        (standing(0.4975, 0.9, None), 0.0, ""),
        (standing(0.5, 0.9, 0.4), 0.0, "while the independent judge fell by 0.1000"),
        (standing(0.5, 0.4, 0.4), 0.0, ""),
        (standing(0.5, 0.9, None), 0.0, ""),
    ],
)
def test_the_guard_stops_what_falls_beyond_noise_and_rewards_that_a_judge_does_not_see(now: Standing, loss: float, stops: str) -> None:
    verdict = Guard(2.0, loss).verdict(standing(0.5, 0.5, 0.5), now)
    assert verdict.stops == bool(stops) and stops in verdict.reason


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_noise_alone_seldom_stops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stops = 0
    for _ in range(40):
        before, after = ((rng.random(300) < 0.3).astype(float) for _ in range(2))
        stops += Guard(2.0).falls(difference(after, before))
    assert stops <= 8  # 1 of 44 on average


def test_changes_are_of_the_same_users_and_have_their_standard_error() -> None:
    before, after = (np.random.default_rng(seed).random(50) for seed in range(2))
    change = difference(after, before, 0.8)
    assert change.error == pytest.approx((after - before).std(ddof=1) / 50**0.5)
    with pytest.raises(ValueError, match="the same cases"):
        Guard(2.0).verdict(Standing(np.zeros(3), np.zeros(3)), Standing(np.zeros(4), np.zeros(3)))
    assert not Guard(2.0).falls(difference(np.zeros(1), np.ones(1))), "of one user nothing is known"


def test_recipes_and_their_numbers() -> None:
    assert {name: align_recipe(name).recipe for name in ALIGN_RECIPES} == {"grpo": "grpo", "grpo-sr": "grpo-sr"}
    assert align_recipe("grpo").supervised_weight == 0 < align_recipe("grpo-sr").supervised_weight
    for changes, said in (
        ({"group": 1}, "at least 2"),
        ({"beams": 17}, "no more beams"),
        ({"clip": -1}, "clip is"),
        ({"baseline": "x"}, "baseline"),
        ({"weighing": "x"}, "weighing is 'x': give one of equal, policy"),
        ({"probes": 1}, "probes is 1: give a number from 2"),
        ({"held_out_users": 1}, "held_out_users is 1: of one user"),
        ({"nosuch": 1}, "unknown"),
    ):
        with pytest.raises(ValueError, match=said):
            align_recipe("grpo", changes)
    with pytest.raises(ValueError, match="recipe 'ppo'"):
        align_recipe("ppo")
