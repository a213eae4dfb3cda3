"""The reward network: what a user would do with an item, one logit for each feedback signal.

    history --search--> the K events most like the item   \\
            ---------->  the R latest events                > target attention -> interest --\\
    item: id, content, how it has fared so far                                                > shared layers -> one logit a signal
    user: how often he has done what, so far                                               --/
    + effects of place and tab, which are added to the logits and taken away again when items are compared

Effects of place and tab see neither user nor item, so the rest learns what users would do wherever the item is shown.
Legend: X judged pairs, K found and R recent events, N items, C content width, U user features, I item features, D hidden size, S signals.
Source: Pi et al., Search-based User Interest Modeling, CIKM 2020; Zhou et al., Deep Interest Network, KDD 2018; Guo et al., PAL: position-bias aware learning, RecSys 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semantide.kernels.dropout import dropout
from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.pretrained import fill, read_config, read_weights, write_config, write_weights


@dataclass(frozen=True)
class RewardConfig:
    """Shape of the network."""

    num_items: int = 0
    signals: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    """What may have been done in an event of a history; anything else counts as one more."""
    tabs: tuple[str, ...] = ()
    content_size: int = 0
    """Width of items' content vectors; 0: none."""
    backbone_size: int = 0
    """Width of the item vectors of a retriever; 0: none."""
    hidden_size: int = 32
    num_heads: int = 2
    layer_sizes: tuple[int, ...] = (128, 64)
    num_found: int = 20
    """Events that the search finds in a history."""
    num_recent: int = 10
    """Latest events that are looked at besides."""
    max_history: int = 1000
    """Events that are searched, the most recent ones."""
    positions: int = 32
    """Places of a page that have an effect of their own; further ones share the last."""
    dropout: float = 0.1
    id_dropout: float = 0.2
    """How often an item is judged in training as if its id were unknown, so that new items can be judged by the rest."""

    def __post_init__(self) -> None:
        if not self.signals:
            raise ValueError("signals is empty: name at least one kind of feedback")
        for name, low in (("num_items", 1), ("hidden_size", 1), ("num_heads", 1), ("num_found", 1), ("num_recent", 0), ("max_history", 1), ("positions", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {low}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        for name in ("dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share from 0 to below 1")

    @property
    def user_features(self) -> int:
        """Width of what is known of a user: exposures, and for each signal and action how far from usual."""
        return 2 + len(self.signals) + len(self.actions)

    @property
    def item_features(self) -> int:
        """Width of how an item has fared."""
        return 1 + len(self.signals)

    @property
    def known_features(self) -> int:
        """Width of all that is known of a pair without its ids: user, item and its content, and how alike the history is to the item."""
        return self.user_features + self.item_features + self.content_size + 4


@dataclass(frozen=True)
class RewardBatch:
    """Pairs of a user and an item.

    Shapes: ``items_X`` item rows, -1 for one that nothing is known of; ``events_XM``, ``actions_XM``, ``ages_XM`` [X, K + R] found events first: item row (-1 where there is none or the
    item is unknown), number among the config's actions + 1 (0 another one), log2 bucket of how many events ago; ``there_XM`` whether there is an event;
    ``alike_XM`` likeness to the item; ``user_XU``, ``item_XI``; ``positions_X``, ``tabs_X``, -1 unknown; None: effects of place and tab are left out.
    """

    items_X: Tensor
    events_XM: Tensor
    actions_XM: Tensor
    ages_XM: Tensor
    there_XM: Tensor
    alike_XM: Tensor
    user_XU: Tensor
    item_XI: Tensor
    positions_X: Tensor | None = None
    tabs_X: Tensor | None = None

    def to(self, device: torch.device) -> RewardBatch:
        """On another device."""
        return self.changed(lambda tensor: tensor.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> RewardBatch:
        """With every tensor changed in the same way."""
        values: dict[str, Any] = {field.name: None if (value := getattr(self, field.name)) is None else change(value) for field in fields(self)}
        return RewardBatch(**values)

    def __len__(self) -> int:
        return len(self.items_X)


AGE_BUCKETS = 16


class RewardNetwork(nn.Module):
    """See the top of this file."""

    content_NC: Tensor
    backbone_NB: Tensor
    usual_effect: Tensor

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # Row 0 stands for an unknown item.
        self.ids = nn.Embedding(config.num_items + 1, size)
        self.content = nn.Linear(config.content_size, size, bias=False) if config.content_size else None
        self.backbone = nn.Linear(config.backbone_size, size, bias=False) if config.backbone_size else None
        self.actions = nn.Embedding(len(config.actions) + 1, size)
        self.ages = nn.Embedding(AGE_BUCKETS, size)
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.likeness = nn.Parameter(torch.ones(2, config.num_heads))
        widths = (7 * size + config.known_features, *config.layer_sizes)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:])
        self.heads = nn.Linear(widths[-1], len(config.signals))
        self.straight = nn.Linear(config.known_features, len(config.signals), bias=False)
        # The last row is that of a place or tab that is not known.
        self.place_effects = nn.Parameter(torch.zeros(config.positions + 1, len(config.signals)))
        self.tab_effects = nn.Parameter(torch.zeros(len(config.tabs) + 1, len(config.signals)))
        # What is added where nobody says where the item is shown: the mean over the exposures of training.
        self.register_buffer("usual_effect", torch.zeros(len(config.signals)))
        self.register_buffer("content_NC", torch.zeros(config.num_items, config.content_size))
        self.register_buffer("backbone_NB", torch.zeros(config.num_items, config.backbone_size))
        nn.init.normal_(self.ids.weight, std=0.02)
        nn.init.zeros_(self.ids.weight[0])
        for embedding in (self.actions, self.ages):
            nn.init.normal_(embedding.weight, std=0.02)
        # What the layers say is added to what is plain from the start.
        nn.init.zeros_(self.straight.weight)
        nn.init.zeros_(self.heads.weight)

    def widen(self, content_MC: Tensor) -> None:
        """Take in items that came after training, by what they are: they get the rows after those of training."""
        self.content_NC = torch.cat([self.content_NC, content_MC.to(self.content_NC)])
        self.backbone_NB = torch.cat([self.backbone_NB, self.backbone_NB.new_zeros(len(content_MC), self.config.backbone_size)])

    def items(self, rows: Tensor) -> Tensor:
        """Vectors of some items by their rows (-1 unknown) [..., D]; in training some lose their ids."""
        ids = torch.where(rows < self.config.num_items, rows + 1, 0)
        if self.training and self.config.id_dropout:
            ids = ids * (torch.rand(ids.shape, device=ids.device) >= self.config.id_dropout)
        known = (rows >= 0).unsqueeze(-1)
        vectors: Tensor = self.ids(ids)
        for table, layer in ((self.content_NC, self.content), (self.backbone_NB, self.backbone)):
            if layer is not None:
                vectors = vectors + torch.where(known, layer(table[rows.clamp(min=0)]), 0)
        return vectors

    def forward(self, batch: RewardBatch) -> Tensor:
        """Logits [X, S]."""
        config = self.config
        item_XD = self.items(batch.items_X)
        events_XMD = self.items(batch.events_XM) + self.actions(batch.actions_XM) + self.ages(batch.ages_XM)
        found = config.num_found
        q_XHd = self.query(item_XD).unflatten(-1, (config.num_heads, -1))
        k_XMHd, v_XMHd = (layer(events_XMD).unflatten(-1, (config.num_heads, -1)) for layer in (self.key, self.value))
        scores_XMH = torch.einsum("xhd,xmhd->xmh", q_XHd, k_XMHd) * q_XHd.shape[-1] ** -0.5
        pooled = []
        for number, part in enumerate((slice(None, found), slice(found, None))):
            there_XM1 = batch.there_XM[:, part, None]
            if not there_XM1.shape[1]:
                pooled.append(torch.zeros_like(item_XD))
                continue
            scores = scores_XMH[:, part] + self.likeness[number] * batch.alike_XM[:, part, None]
            # One more event that says nothing: a history without anything like the item need not be attended to.
            weights = F.softmax(F.pad(scores.masked_fill(~there_XM1, -torch.inf), (0, 0, 1, 0)), dim=1)[:, 1:]
            pooled.append(torch.einsum("xmh,xmhd->xhd", weights, v_XMHd[:, part]).flatten(1))
        there_XM = batch.there_XM.to(item_XD.dtype)
        mean_XD = (events_XMD * there_XM.unsqueeze(-1)).sum(1) / there_XM.sum(1, keepdim=True).clamp(min=1)
        known = self.known(batch)
        x = torch.cat([item_XD, *pooled, mean_XD, *(item_XD * each for each in (*pooled, mean_XD)), known], 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = dropout(F.silu(norm(layer(x))), config.dropout, self.training)
        logits_XS: Tensor = self.heads(x) + self.straight(known)
        if batch.positions_X is None or batch.tabs_X is None:
            return logits_XS + self.usual_effect
        return logits_XS + self.effects(batch.positions_X, batch.tabs_X)

    def known(self, batch: RewardBatch) -> Tensor:
        """All that is known of pairs without their ids [X, F]."""
        found = self.config.num_found
        alike, there = batch.alike_XM[:, :found], batch.there_XM[:, :found]
        num_X, num_found_X = batch.there_XM.sum(1).to(alike), there.sum(1).to(alike)
        likeness = torch.stack([alike.amax(1), alike.sum(1) / num_found_X.clamp(min=1), num_X.log1p(), (num_X > 0).to(alike)], 1)
        content_XC = torch.where((batch.items_X >= 0)[:, None], self.content_NC[batch.items_X.clamp(min=0)], 0)
        return torch.cat([batch.user_XU, batch.item_XI, content_XC, likeness], 1)

    def effects(self, positions_X: Tensor, tabs_X: Tensor) -> Tensor:
        """What place and tab add [X, S]."""
        places_X, tabs_X = self.conditions(positions_X, tabs_X)
        return self.place_effects[places_X] + self.tab_effects[tabs_X]

    def conditions(self, positions_X: Tensor, tabs_X: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the effects of place and tab."""
        places_X = torch.where(positions_X >= 0, positions_X.clamp(max=self.config.positions - 1), self.config.positions)
        return places_X, torch.where(tabs_X >= 0, tabs_X, len(self.config.tabs))

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        write_config(folder, {"model_type": "reward", **asdict(self.config)})
        write_weights(folder, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: Path) -> RewardNetwork:
        """Read what ``save_pretrained`` wrote.

        Raises: NotFound, Corrupt, Conflict for a folder that holds another kind of model.
        """
        header = read_config(folder)
        if header.get("model_type") != "reward":
            raise Conflict(f"{folder.name} holds a {header.get('model_type')!r}: name a reward model (rewards/...)")
        network = cls(reward_config(header, folder))
        fill(network, read_weights(folder), folder)
        return network.eval()


def reward_config(values: dict[str, Any], source: Path) -> RewardConfig:
    """The configuration of a ``config.json``.

    Raises: Corrupt.
    """
    lists = ("signals", "actions", "tabs", "layer_sizes")
    try:
        found: dict[str, Any] = {field.name: tuple(values[field.name]) if field.name in lists else values[field.name] for field in fields(RewardConfig)}
        return RewardConfig(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{source}/config.json: {type(error).__name__} {error}: copy the reward model again") from error
