"""Group-relative policy optimisation with a supervised regulariser: rewards, advantages and the loss, as pure functions.

Legend: B groups, G rollouts of a group, L levels, D known positives of all groups.
Source: GenRec (arXiv 2604.14878), section GRPO-SR.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """What each code of each rollout is worth beside its group; 0 where there is nothing to learn.

    Shapes: ``values_BGL``; ``used_B`` groups whose rewards differ.
    """

    values_BGL: Tensor
    used_B: Tensor


def shaped_rewards(preference_BG: Tensor, gate_BG: Tensor, known_BG: Tensor, positive_reward: float) -> Tensor:
    """Gate times preference, and for known positives the reward that is set for them."""
    return torch.where(known_BG, torch.full_like(preference_BG, positive_reward), torch.where(gate_BG, preference_BG, torch.zeros_like(preference_BG)))


def group_moments(rewards_BG: Tensor, present_BG: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [B, 1] of the rollouts that are there."""
    many_B1 = present_BG.sum(1, keepdim=True).clamp_min(1)
    mean_B1 = (rewards_BG * present_BG).sum(1, keepdim=True) / many_B1
    return mean_B1, (((rewards_BG - mean_B1) ** 2 * present_BG).sum(1, keepdim=True) / many_B1).sqrt()


def group_advantages(rewards_BG: Tensor, present_BG: Tensor, levels: int, *, least_spread: float, divide: bool = True) -> Advantages:
    """Each rollout's reward less its group's mean, over the group's deviation; the same for all its codes."""
    mean_B1, spread_B1 = group_moments(rewards_BG, present_BG)
    used_B = (spread_B1 > least_spread).squeeze(1) & (present_BG.sum(1) > 1)
    values_BG = _scaled(rewards_BG - mean_B1, spread_B1, divide) * present_BG * used_B[:, None]
    return Advantages(values_BG[:, :, None].expand(-1, -1, levels), used_B)


def prefix_advantages(rewards_BG: Tensor, present_BG: Tensor, codes_BGL: Tensor, *, least_spread: float, divide: bool = True) -> Advantages:
    """As ``group_advantages``, but a code is compared with the rollouts that share the codes before it: the mean reward at its trie node.

    A node's mean is drawn towards that of the node above as if one more rollout had that reward, since few rollouts share a long prefix.
    """
    mean_B1, spread_B1 = group_moments(rewards_BG, present_BG)
    used_B = (spread_B1 > least_spread).squeeze(1) & (present_BG.sum(1) > 1)
    above_BG = mean_B1.expand_as(rewards_BG)
    together_BGG = present_BG[:, :, None] & present_BG[:, None, :]
    values = []
    for level in range(codes_BGL.shape[2]):
        if level:
            together_BGG = together_BGG & (codes_BGL[:, :, None, level - 1] == codes_BGL[:, None, :, level - 1])
            sums_BG = (together_BGG * rewards_BG[:, None, :]).sum(2)
            above_BG = (sums_BG + above_BG) / (together_BGG.sum(2) + 1)
        values.append(_scaled(rewards_BG - above_BG, spread_B1, divide) * present_BG * used_B[:, None])
    return Advantages(torch.stack(values, 2), used_B)


def _scaled(differences_BG: Tensor, spread_B1: Tensor, divide: bool) -> Tensor:
    return differences_BG / spread_B1.clamp_min(1e-12) if divide else differences_BG


def policy_loss(
    log_probs_BGL: Tensor, before_BGL: Tensor | None, advantages: Advantages, present_BG: Tensor, clip: float = 0.0, weights_BG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Minus the mean advantage under the ratio of the policy to the one that drew (``before_BGL``; None: the policy as it is, so that the ratio is 1 and only its
    gradient counts), over the used groups; and the share of ratios that ``clip`` holds back. In a group rollouts count alike, or by ``weights_BG``: those of
    ``policy_weights`` make it the gradient of the expected reward, whatever was drawn beside beams.
    """
    ratio_BGL = (log_probs_BGL - (log_probs_BGL.detach() if before_BGL is None else before_BGL)).exp()
    gains_BGL = ratio_BGL * advantages.values_BGL
    held = torch.zeros((), device=log_probs_BGL.device)
    present_BGL = (present_BG & advantages.used_B[:, None])[:, :, None].expand_as(gains_BGL)
    if clip:
        clipped_BGL = ratio_BGL.clamp(1 - clip, 1 + clip) * advantages.values_BGL
        held = ((clipped_BGL < gains_BGL) & present_BGL).sum() / present_BGL.sum().clamp_min(1)
        gains_BGL = torch.minimum(gains_BGL, clipped_BGL)
    share_BG = present_BG / present_BG.sum(1, keepdim=True).clamp_min(1) if weights_BG is None else weights_BG.to(gains_BGL.dtype)
    per_group_B = (gains_BGL.masked_fill(~present_BGL, 0.0).mean(2) * share_BG).sum(1)
    return -per_group_B.sum() / advantages.used_B.sum().clamp_min(1), held


def mean_over_rollouts(values_BGL: Tensor, present_BG: Tensor) -> Tensor:
    """Sum over codes, mean over rollouts that are there."""
    return (values_BGL.sum(2) * present_BG).sum() / present_BG.sum().clamp_min(1)


def policy_weights(log_probs_BGL: Tensor, present_BG: Tensor, beams: int, distinct: bool) -> Tensor:
    """Weights with which the rollouts of a group stand for the policy: what they give a value in sum is right in expectation over the draws, 1 in sum.

    A group is beams, which nobody drew, and draws; drawn without replacement each comes from what was left. So a draw stands for the mass that was left, and what lies before it for
    its own, and the mean of that over all draws is taken; with replacement the draws alone speak. Without any draw the beams stand for themselves, each by its mass.
    Shapes: ``log_probs_BGL`` of the policy that drew, beams first and draws in their order.
    Source: Des Raj, Some estimators in sampling with varying probabilities without replacement, 1956.
    """
    mass_BG = log_probs_BGL.detach().double().sum(2).exp() * present_BG
    drawn_BG = present_BG & (torch.arange(present_BG.shape[1], device=present_BG.device) >= beams)
    many_B1 = drawn_BG.sum(1, keepdim=True).double()
    if distinct:
        before_BG = mass_BG.cumsum(1) - mass_BG
        after_BG = many_B1 - drawn_BG.cumsum(1)
        weights_BG = (mass_BG * after_BG + (1 - before_BG).clamp_min(0) * drawn_BG) / many_B1.clamp_min(1)
    else:
        weights_BG = drawn_BG / many_B1.clamp_min(1)
    return torch.where(many_B1 > 0, weights_BG, mass_BG / mass_BG.sum(1, keepdim=True).clamp_min(1e-12)) * present_BG


def policy_mean(values_BG: Tensor, weights_BG: Tensor) -> Tensor:
    """Mean over groups of what the policy's rollouts are expected to have; groups without any are left out."""
    return (values_BG * weights_BG).sum() / (weights_BG.sum(1) > 0).sum().clamp_min(1)
