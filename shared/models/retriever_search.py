"""Exact search with a retriever: every item is scored, so the list is the true top.

Legend: R requests, T packed places, V items of the model, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.shared.jagged import Jagged
from semantide.shared.models.retriever import Retriever

Rows = npt.NDArray[np.integer]


class ExactSearch:
    """Scores of all items after histories; ``vectors_of`` is asked each time, since training changes them."""

    def __init__(self, model: Retriever, vectors_of: Callable[[], Tensor], max_items: int) -> None:
        self._model, self._vectors_of, self._max_items = model, vectors_of, min(max_items, model.config.max_items)

    @torch.inference_mode()
    def scores(self, histories: Sequence[Rows], times: Sequence[Rows | None] = ()) -> Tensor:
        """Log-probabilities over all items but for the normaliser, which does not change an order: [R, V] float32.

        Units: ``times`` of each history's events, seconds; nothing where they are not known.
        """
        model, vectors_VD = self._model.eval(), self._vectors_of()
        device = model.begin.device
        moments_R = [np.zeros(0, dtype=np.int64) if moments is None else np.asarray(moments) for moments in (times or [None] * len(histories))]
        rows = [history[-self._max_items :] for history in histories]
        # The begin row happens with the first event, as in training.
        seen = [
            np.concatenate([known[:1], known]) if len(known) else np.zeros(len(read) + 1, dtype=np.int64)
            for read, known in ((read, moments[len(moments) - len(read) :] if len(moments) else moments) for read, moments in zip(rows, moments_R, strict=True))
        ]
        packed = Jagged.from_sequences(np.concatenate([[-1], read]) for read in rows).to(device)
        times_T = torch.from_numpy(np.concatenate(seen).astype(np.int64)).to(device)
        begins_T = packed.values < 0
        inputs_TD = vectors_VD[packed.values.clamp_min(0).to(vectors_VD.device)].to(device)
        hidden_RD = model(inputs_TD, begins_T, packed.offsets_B1, times_T)[packed.last_rows_B()]
        scores_RV: Tensor = (hidden_RD @ model.scored(vectors_VD.to(device)).T).float() / model.temperature
        return scores_RV
