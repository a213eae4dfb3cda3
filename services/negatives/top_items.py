"""What a retriever ranks highest at some places of every user's training history: the wrong items that it takes for the next one, exactly.

Legend: C cuts, W items of a list, V items of the retriever, N items of the data set.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from semantide.kernels.device import best_device
from semantide.services.negatives.cuts import Cuts
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.retriever_search import ExactSearch
from semantide.shared.negative_sampling import IntArray, Rows
from semantide.shared.negative_source import TrainingEvents
from semantide.shared.table_snapshots import TableSnapshot


class TopItems:
    """The best items of a stored retriever, in the rows of a data set; what a user has taken before does not come up."""

    def __init__(self, folder: Path, table: TableSnapshot, dataset: Dataset, events: TrainingEvents, max_items: int, width: int) -> None:
        """The model in a folder with its table; ``max_items`` is the longest history that it reads.

        Raises: Conflict for a data set of which the retriever has nothing.
        """
        device = best_device()
        self._model_rows_N = np.array([table.row_of.get(item, -1) for item in dataset.item_ids], dtype=np.int64)
        known = self._model_rows_N >= 0
        if not known.any():
            raise Conflict(f"none of the data set's {len(known)} items has a vector in the retriever: take one that was trained on this data set")
        self._item_of_V = np.full(len(table.item_ids), -1, dtype=np.int64)
        self._item_of_V[self._model_rows_N[known]] = np.flatnonzero(known)
        self._strange = torch.from_numpy(np.flatnonzero(self._item_of_V < 0)).to(device)
        self._cuts, self._width = Cuts(events), width
        self._seconds_E = np.concatenate([np.zeros(0, dtype=np.int64), *dataset.train_times()]) // 1000
        vectors_VD = table.vectors_ND.to(device)
        self._search = ExactSearch(Retriever.from_pretrained(folder).to(device).eval(), lambda: vectors_VD, max_items)

    @torch.inference_mode()
    def search(self, cuts: Rows) -> Rows:
        """Best items of the histories before some events [C, W], best first, -1 past the end."""
        asked = [(self._before(int(cut)), self._cuts.span(int(cut))) for cut in cuts]
        # A history of which the retriever has nothing says nothing: it gets no items.
        able = [index for index, (rows, _) in enumerate(asked) if (rows >= 0).any()]
        found = np.full((len(cuts), self._width), -1, dtype=np.int32)
        if not able:
            return found
        histories = [asked[index][0] for index in able]
        scores_CV = self._search.scores([rows[rows >= 0] for rows in histories], [self._seconds_E[asked[index][1]][asked[index][0] >= 0] for index in able])
        scores_CV[:, self._strange] = -torch.inf
        for place, rows in enumerate(histories):
            scores_CV[place, torch.from_numpy(rows[rows >= 0]).to(scores_CV.device)] = -torch.inf
        best = scores_CV.topk(min(self._width, scores_CV.shape[1]), dim=1)
        rows_CW = best.indices.masked_fill(best.values == -torch.inf, -1).cpu().numpy()
        found[able, : rows_CW.shape[1]] = np.where(rows_CW >= 0, self._item_of_V[rows_CW], -1)
        return found

    def _before(self, cut: int) -> IntArray:
        return self._model_rows_N[self._cuts.before(cut)]
