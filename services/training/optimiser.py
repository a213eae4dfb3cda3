"""AdamW in groups, Muon for the layers' matrices where a recipe wants it, and the learning rate's course: warm-up, then a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from semantide.services.training.recipes import TrainConfig

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "items.weight", "places.weight", "actions.weight", "gaps.weight")


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal, so that every direction of a matrix is learned at one rate; matrices of one shape step together.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    gradient = parameter.grad
                    assert gradient is not None
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(momentum, group["momentum"]))
                scale = -group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (half-)orthogonal matrix of each, roughly: singular values end between about 0.7 and 1.2.

    Shapes: [..., rows, columns] -> the same.
    """
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * (gram @ gram)) @ x
    return x.mT if tall else x


def build_optimisers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Matrices with weight decay, vectors without, embeddings with a rate of their own; each group knows its ``base_rate``."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    hidden: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if config.muon_rate and parameter.ndim == 2 and not name.endswith(_EMBEDDINGS):
            hidden.append(parameter)
        else:
            groups.setdefault((parameter.ndim >= 2, name.endswith(_EMBEDDINGS)), []).append(parameter)
    adam = torch.optim.AdamW(
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
    if not hidden:
        return [adam]
    return [adam, Muon([{"params": hidden, "weight_decay": config.weight_decay, "base_rate": config.muon_rate}])]


def rate_share(config: TrainConfig, step: int, progress: float) -> float:
    """The learning rate at a step as a share of its peak; ``progress`` goes from 0 to 1 over the whole run."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warm * (config.final_rate_share + (1 - config.final_rate_share) * cosine)


def set_rate(optimiser: torch.optim.Optimizer, share: float) -> None:
    """Set every group's rate to a share of its peak."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_rate"] * share
