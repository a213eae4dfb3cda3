"""Which negatives a batch of the retriever gets, and with what arguments they go into the loss.

Nothing but rows travels from the draw to the loss: -1 becomes the target's own row there, which the loss leaves out as it does every accidental hit.
Legend: T items of a batch, N items of the data set, R negatives of each target, S negatives that the batch shares, M partners, U fetched rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.recipes import TrainConfig
from semantide.shared.negative_sampling import NegativeMix, Negatives, NegativeSampler, Rows


class Drawer(Protocol):
    """Draws the negatives of training events: those of one epoch are always the same."""

    def draw(self, epoch: int, events_T: Rows) -> Negatives:
        """Rows [T, R], -1 where there is none."""
        ...


def mix_of(config: TrainConfig) -> NegativeMix | None:
    """The mixture that each target gets of its own; None where it shares the batch's alone."""
    own, hard = config.num_negatives if config.negative_scope == "target" else 0, config.negatives
    if not own + hard.prefix + hard.beams:
        return None
    uniform = own if not config.negative_power else 0
    return NegativeMix(uniform, own - uniform, config.negative_power, hard.prefix, hard.prefix_levels, hard.beams)


@dataclass(frozen=True)
class Layout:
    """How many of the drawn rows are each target's own, and how many the batch shares beside its own targets."""

    own: int
    shared: int


class BatchNegatives:
    """Draws for a batch, and hands the loss what it needs."""

    def __init__(self, config: TrainConfig, sampler: NegativeSampler | None, shared: NegativeSampler, drawer: Drawer | None = None) -> None:
        """``sampler`` draws each target's own, unless a ``drawer`` has them by event; ``shared`` draws the batch's."""
        self._config, self._sampler, self._shared, self._drawer = config, sampler, shared, drawer
        self._layout = Layout(sampler.mix.size if sampler else 0, config.num_negatives if config.negative_scope == "batch" else 0)

    @classmethod
    def of(cls, config: TrainConfig, counts_N: Rows, codes_NL: Rows | None = None, drawer: Drawer | None = None) -> BatchNegatives:
        """From the items' training counts and, for ``prefix``, their semantic ids.

        Raises: ValueError where the mixture needs what is not given.
        """
        mix = mix_of(config)
        if mix is not None and mix.beams and drawer is None:
            raise ValueError(f"negatives.beams is {mix.beams}: give the input `beams`, which a negatives job makes, or set it to 0")
        shared = NegativeSampler(NegativeMix(popularity=1, exponent=config.negative_power), counts_N)
        return cls(config, None if mix is None else NegativeSampler(mix, counts_N, codes_NL), shared, drawer)

    def draw(self, batch: HistoryBatch, generator: torch.Generator) -> Tensor:
        """Rows of all negatives: [T * R + S], every target's own before what all share."""
        targets_T = batch.items.values.cpu().numpy()
        rng = np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))
        parts = []
        if self._sampler is not None:
            if self._drawer is not None and batch.events_T is not None:
                rows_TR = self._drawer.draw(batch.epoch, batch.events_T.cpu().numpy())
            else:
                rows_TR = self._sampler.draw(targets_T, rng)
            parts.append(np.where(rows_TR < 0, targets_T[:, None], rows_TR).ravel())
        if self._layout.shared or self._config.negatives.in_batch:
            parts.append(self._shared.draw_shared(self._layout.shared, rng, targets_T if self._config.negatives.in_batch else None))
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.int64)

    def arguments(self, targets_T: Tensor, ids: Tensor, at: Tensor) -> dict[str, Any]:
        """What the loss takes: ``targets_T`` and ``ids`` are rows of the data set, ``at`` the drawn ones' places among the fetched vectors."""
        hard, size = self._config.negatives, len(targets_T) * self._layout.own
        found: dict[str, Any] = {"precision": hard.precision, "sharing": hard.sharing}
        if self._sampler is not None:
            found["negatives_TR"] = at[:size].view(len(targets_T), self._layout.own)
            found["log_q_TR"] = self._sampler.log_q(targets_T, ids[:size].view(len(targets_T), self._layout.own))
            if hard.expansion > 1:
                found["partners_MT"] = self._partners(len(targets_T), ids[:size])
        if len(ids) > size:
            found["shared_S"] = at[size:]
            found["log_q_S"] = self._shared.log_q_shared(ids[size:], self._layout.shared, targets_T if hard.in_batch else None)
        return found

    def _partners(self, num_targets: int, ids: Tensor) -> Tensor:
        # A batch's own draw is the seed: another one every time, and the same after a restart.
        generator = torch.Generator().manual_seed(int(ids.sum()) % (1 << 62))
        return torch.stack([torch.randperm(num_targets, generator=generator) for _ in range(self._config.negatives.expansion - 1)]).to(ids.device)
