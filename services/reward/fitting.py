"""Training of the reward network: passes over the exposures until the held-out ones gain nothing.

Each pass is a function of its seed and number and ends in a checkpoint, so a killed run goes on from its last pass and comes out the same.
Legend: X exposures, S signals.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from semantide.services.reward.examples import HELD_OUT, TRAIN, Batches
from semantide.services.reward.linear_start import begin
from semantide.services.reward.recipes import RewardTraining
from semantide.shared.errors import PermanentError
from semantide.shared.models.interest_search import IntArray
from semantide.shared.models.reward import RewardBatch, RewardNetwork

Report = Callable[[float, dict[str, float]], None]  # passes done so far, figures
_SCORED = 8192


@dataclass
class Progress:
    """How far training is, and what the held-out exposures said after each pass."""

    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    curve: list[dict[str, float]] = field(default_factory=list)


def fit(network: RewardNetwork, batches: Batches, config: RewardTraining, seed: int, folder: Path, report: Report) -> Progress:
    """Train until it does not help; the network ends with the weights of the best pass.

    ``report`` hears of every few batches and may raise to end it. Raises: PermanentError when the loss is not a number.
    """
    device = next(network.parameters()).device
    optimiser = torch.optim.AdamW(
        [
            {"params": [network.ids.weight], "weight_decay": 0.0},
            {"params": [parameter for name, parameter in network.named_parameters() if name != "ids.weight"], "weight_decay": 1e-4},
        ],
        lr=config.learning_rate,
    )
    rows = batches.examples.rows(TRAIN)
    held_out = batches.examples.rows(HELD_OUT)
    progress = _restore(network, optimiser, folder)
    if not progress.epoch:
        begin(network.cpu(), batches, rows, seed)
        network.to(device)
        if len(held_out):
            progress.best_loss = float(np.mean(_held_out_loss(network, batches, held_out)))
            _keep(network, optimiser, progress, folder, True)
    while progress.epoch < config.epochs and progress.epoch - progress.best_epoch < config.patience:
        epoch = progress.epoch
        torch.manual_seed(seed * 1_000_003 + epoch)
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        network.train()
        total, count = 0.0, 0
        for part, batch in batches.parts(order, config.batch_exposures):
            loss = _loss(network, batch.to(device), part, batches, device)
            # Decay by the gradient of the ids that were met alone: those of rare items must not fade while nobody looks.
            met = network.ids.weight[batch.items_X.to(device) + 1]
            optimiser.zero_grad(set_to_none=True)
            (loss + config.id_decay * met.square().sum()).backward()
            optimiser.step()
            value = loss.item()
            if not math.isfinite(value):
                raise PermanentError(f"the loss is {value} in pass {epoch + 1}: train with a smaller learning_rate than {config.learning_rate}")
            total, count = total + value * len(part), count + len(part)
            report(epoch + count / max(len(order), 1), {})
        progress.epoch += 1
        held = float(np.mean(_held_out_loss(network, batches, held_out))) if len(held_out) else total / max(count, 1)
        figures = {"loss": total / max(count, 1), "held_out_loss": held}
        progress.curve.append(figures)
        report(progress.epoch, figures)
        better = held < progress.best_loss
        if better:
            progress.best_loss, progress.best_epoch = held, progress.epoch
        _keep(network, optimiser, progress, folder, better)
    best = folder / "best.safetensors"
    if best.exists():
        network.load_state_dict(load_file(best))
    network.eval()
    _settle(network, batches, rows)
    return progress


def _loss(network: RewardNetwork, batch: RewardBatch, rows: IntArray, batches: Batches, device: torch.device) -> Tensor:
    labels_XS = torch.from_numpy(batches.examples.labels_XS[rows]).to(device, torch.float32)
    weights_X = torch.from_numpy(batches.examples.weights_X[rows]).to(device)
    losses_XS = F.binary_cross_entropy_with_logits(network(batch), labels_XS, reduction="none")
    return (losses_XS.mean(1) * weights_X).mean()


def logits_of(network: RewardNetwork, batches: Batches, rows: IntArray) -> np.ndarray:
    """Logits of some examples where they were shown [X, S]."""
    device = next(network.parameters()).device
    network.eval()
    found = [np.zeros((0, len(network.config.signals)), np.float32)]
    with torch.no_grad():
        for _, batch in batches.parts(rows, _SCORED):
            found.append(network(batch.to(device)).float().cpu().numpy())
    return np.concatenate(found)


def _held_out_loss(network: RewardNetwork, batches: Batches, rows: IntArray) -> np.ndarray:
    logits, labels = torch.from_numpy(logits_of(network, batches, rows)), torch.from_numpy(batches.examples.labels_XS[rows]).float()
    weights = torch.from_numpy(batches.examples.weights_X[rows])[:, None]
    losses: np.ndarray = (F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weights).mean(1).numpy()
    return losses


def _settle(network: RewardNetwork, batches: Batches, rows: IntArray) -> None:
    """Note what place and tab add on average, for items that nobody has shown yet."""
    feedback = batches.examples.feedback
    device = network.usual_effect.device
    with torch.no_grad():
        if batches.debias_position and len(rows):
            positions, tabs = (torch.from_numpy(column[rows].astype(np.int64)).to(device) for column in (feedback.positions, feedback.tabs))
            network.usual_effect.copy_(network.effects(positions, tabs).mean(0))
        else:
            network.usual_effect.zero_()


def _keep(network: RewardNetwork, optimiser: torch.optim.Optimizer, progress: Progress, folder: Path, best: bool) -> None:
    """Write the checkpoint of a pass aside, and put it in the place of the one before by one rename."""
    aside, place = folder / "incoming", folder / "checkpoint"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside / "state.safetensors")
    (aside / "progress.json").write_text(json.dumps(asdict(progress)))
    if best:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}, folder / "best.incoming")
        (folder / "best.incoming").replace(folder / "best.safetensors")
    old = folder / "old"
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _restore(network: RewardNetwork, optimiser: torch.optim.Optimizer, folder: Path) -> Progress:
    place = folder / "checkpoint"
    if not place.exists() and (folder / "old").exists():
        (folder / "old").rename(place)
    if not place.exists():
        return Progress()
    tensors = load_file(place / "state.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")})
    state = optimiser.state_dict()
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, number, key = name.split(".", 2)
            states.setdefault(int(number), {})[key] = tensor
    optimiser.load_state_dict({**state, "state": states})
    return Progress(**json.loads((place / "progress.json").read_text()))
