"""AdamW in groups, and the learning rate's course: linear warm-up, then a cosine."""

from __future__ import annotations

import math

import torch
from torch import nn

from semantide.services.training.recipes import TrainConfig

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "items.weight")


def build_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Matrices with weight decay, vectors without, embeddings with a rate of their own; each group knows its ``base_rate``."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((parameter.ndim >= 2, name.endswith(_EMBEDDINGS)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decayed else 0.0,
                "base_rate": config.learning_rate * (config.embedding_rate_scale if embedding else 1.0),
            }
            for (decayed, embedding), parameters in sorted(groups.items())
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def rate_share(config: TrainConfig, step: int, progress: float) -> float:
    """The learning rate at a step as a share of its peak; ``progress`` goes from 0 to 1 over the whole run."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warm * (config.final_rate_share + (1 - config.final_rate_share) * cosine)


def set_rate(optimiser: torch.optim.Optimizer, share: float) -> None:
    """Set every group's rate to a share of its peak."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_rate"] * share
