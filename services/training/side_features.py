"""What the prompts of a batch say beside codes, where a generator's merger looks at it: what was done with each item, and how long after the one before.

A request may come with items alone. So that a model knows such prompts, some histories are read without their side features while it is trained.
Legend: T items of a batch, B histories, F side features, E training events.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from semantide.services.training.batches import HistoryBatch
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.event_actions import EventActions, of_training
from semantide.shared.models.prompt_spelling import gap_buckets
from semantide.shared.models.token_merger import MergerConfig

_BLANK_SHARE = 0.1


def _timed(dataset: Dataset) -> bool:
    """Whether any training history says when things happened; one that knows their order alone has them at moments of its own making."""
    return any(len(times) > 1 and bool((np.diff(times) >= 1000).any()) for times in dataset.train_times())


class SideFeatures:
    """Side features of batches, as ``NextToken`` and ``PageWise`` take them."""

    def __init__(self, merger: MergerConfig, actions_E: Tensor | None) -> None:
        """``actions_E``: the merger's number of what was done in each training event."""
        self._features, self._actions_E = merger.features, actions_E

    @classmethod
    def of(cls, merger: MergerConfig, dataset: Dataset, events: EventActions | None) -> SideFeatures | None:
        """For a data set; None where the merger looks at codes alone.

        Raises: Conflict where actions are asked for and not known, or gaps and the data set has no times to tell them by.
        """
        if not merger.features:
            return None
        if "gaps" in merger.features and not _timed(dataset):
            raise Conflict(
                "the generator's merger looks at gaps, and no two events of a user are a second apart in the data set: leave gaps out, or import times"
            )
        if "actions" not in merger.features:
            return cls(merger, None)
        if events is None:
            raise Conflict("the generator's merger looks at actions, and what was done in the data set's events is not known: make the data set anew")
        return cls(merger, torch.from_numpy(events.among(merger.actions)[of_training(dataset, events.numbers_E)].astype(np.int64)))

    def __call__(self, batch: HistoryBatch) -> Tensor:
        """[T, F]; those of a tenth of the histories are unknown, drawn anew each time."""
        items, device = batch.items, batch.items.values.device
        columns = []
        for name in self._features:
            if name == "gaps":
                buckets = gap_buckets(batch.times_T.cpu().numpy(), items.offsets_B1[:-1].cpu().numpy())
                columns.append(torch.from_numpy(buckets).to(device))
            elif self._actions_E is None or batch.events_T is None:
                columns.append(torch.zeros_like(items.values))
            else:
                columns.append(self._actions_E[batch.events_T.cpu()].to(device))
        known_B = torch.rand(len(items), device=device) >= _BLANK_SHARE
        return torch.stack(columns, 1) * known_B.repeat_interleave(items.lengths_B).unsqueeze(1)
