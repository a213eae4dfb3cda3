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
Read = Callable[[Tensor], Tensor]
"""Gives the vectors of some rows: [T] -> [T, D]."""


@torch.inference_mode()
def states(
    model: Retriever, histories: Sequence[Rows], times: Sequence[Rows | None], read: Read, max_items: int, actions: Sequence[Rows | None] = ()
) -> Tensor:
    """What the model makes of histories: [R, D], to be compared with ``model.scored`` vectors of items.

    ``actions``: the model's number of each event's action; nothing where they are not known.
    Units: ``times`` of each history's events, seconds; nothing where they are not known.
    """
    device = model.begin.device
    moments_R = [np.zeros(0, dtype=np.int64) if moments is None else np.asarray(moments) for moments in (times or [None] * len(histories))]
    rows = [history[-max_items:] for history in histories]
    # The begin row happens with the first event, as in training.
    seen = [
        np.concatenate([known[:1], known]) if len(known) else np.zeros(len(taken) + 1, dtype=np.int64)
        for taken, known in ((taken, moments[len(moments) - len(taken) :] if len(moments) else moments) for taken, moments in zip(rows, moments_R, strict=True))
    ]
    packed = Jagged.from_sequences(np.concatenate([[-1], taken]) for taken in rows)
    begins_T = packed.values < 0
    inputs_TD = read(packed.values[~begins_T])
    # The begin row's own vector does not count.
    vectors_TD = inputs_TD.new_zeros(len(begins_T), inputs_TD.shape[1])
    vectors_TD[~begins_T.to(inputs_TD.device)] = inputs_TD
    if not histories:
        return vectors_TD.to(device)
    times_T = torch.from_numpy(np.concatenate(seen).astype(np.int64)).to(device)
    actions_T = None
    if model.actions is not None and actions:
        done = [np.zeros(len(taken), dtype=np.int64) if own is None else own[len(own) - len(taken) :] for taken, own in zip(rows, actions, strict=True)]
        actions_T = torch.from_numpy(np.concatenate([np.concatenate([[0], own]) for own in done]).astype(np.int64)).to(device)
    packed = packed.to(device)
    hidden_RD: Tensor = model.eval()(vectors_TD.to(device), begins_T.to(device), packed.offsets_B1, times_T, actions_T)[packed.last_rows_B()]
    return hidden_RD


class ExactSearch:
    """Scores of all items after histories, with the vectors of all of them in memory."""

    def __init__(self, model: Retriever, vectors_of: Callable[[], Tensor], max_items: int) -> None:
        self._model, self._vectors_of, self._max_items = model, vectors_of, min(max_items, model.config.max_items)

    @torch.inference_mode()
    def scores(self, histories: Sequence[Rows], times: Sequence[Rows | None] = (), actions: Sequence[Rows | None] = ()) -> Tensor:
        """Log-probabilities over all items but for the normaliser, which does not change an order: [R, V] float32.

        ``actions`` as in ``states``.
        Units: ``times`` of each history's events, seconds; nothing where they are not known.
        """
        model, vectors_VD = self._model, self._vectors_of()
        hidden_RD = states(model, histories, times, lambda rows_T: vectors_VD[rows_T.to(vectors_VD.device)], self._max_items, actions)
        scores_RV: Tensor = (hidden_RD @ model.scored(vectors_VD.to(hidden_RD.device)).T).float() / model.temperature
        return scores_RV
