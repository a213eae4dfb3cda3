"""Pages of a data set: what a user saw together, and how strongly each of it was answered.

Of an item's actions on a page the strongest counts; what it means is its intensity in the deployment's actions, which the data set keeps.
Legend: P pages, S items shown on them, U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.stored_files import DATASET_AGAIN, whole

IntArray = npt.NDArray[np.int64]

Answers = npt.NDArray[np.int8]

DISLIKED, EXPOSED, CLICKED, ORDERED = -1, 0, 1, 2
CLICKED_FROM, ORDERED_FROM = 1.0, 3.0
"""Least intensities; below the first an item was only shown, below zero it was disliked."""


def answers(intensities: npt.NDArray[np.floating], clicked_from: float = CLICKED_FROM, ordered_from: float = ORDERED_FROM) -> Answers:
    """How strongly each item was answered: DISLIKED, EXPOSED, CLICKED or ORDERED."""
    steps = np.searchsorted([0.0, clicked_from, ordered_from], intensities, side="right")
    return (steps - 1).astype(np.int8)


@dataclass(frozen=True)
class Pages:
    """Pages in order of user and time; items in the order in which they were first seen there.

    Shapes: ``users_P``, ``times_P`` [P]; ``offsets_P1`` [P + 1]; ``items_S``, ``intensities_S``, ``parts_S`` (as a ``Feedback``'s) [S].
    Units: ``times_P``, of a page's first event, milliseconds.
    """

    users_P: IntArray
    times_P: IntArray
    offsets_P1: IntArray
    items_S: IntArray
    intensities_S: npt.NDArray[np.float32]
    parts_S: npt.NDArray[np.int8]

    @classmethod
    def load(cls, folder: Path, intensities: Mapping[str, float]) -> Pages:
        """Read them from a ``datasets`` artifact; ``intensities`` are those of its actions.

        Raises: Conflict for a data set without pages, or with an action that has no intensity; Corrupt.
        """
        path = folder / "pages.parquet"
        if not path.is_file() or not intensities:
            raise Conflict(f"{folder.name} has no pages or does not say how strong its actions are: make the data set anew (`semantide dataset`)")
        with whole(folder, "pages", DATASET_AGAIN):
            table = pq.read_table(path).combine_chunks()
            if "parts" not in table.column_names:
                raise Conflict(f"{folder.name} was made by a version that cut pages where a part ended: make the data set anew (`semantide dataset`)")
            lists = table["items"].combine_chunks()
            shown = table["actions"].combine_chunks().flatten().dictionary_encode()
            names = shown.dictionary.to_pylist()
            unknown = sorted(set(names) - set(intensities))
            if unknown:
                raise Conflict(f"{folder.name} has pages with the action {unknown[0]!r}, whose intensity it does not know: make the data set anew")
            strength = np.array([intensities[name] for name in names], dtype=np.float32)
            lengths = np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
            return cls(
                table["user"].to_numpy().astype(np.int64),
                table["time"].to_numpy().astype(np.int64),
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64),
                strength[shown.indices.to_numpy()] if names else strength,
                table["parts"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int8),
            )

    @classmethod
    def of(cls, dataset: Dataset, folder: Path) -> Pages:
        """The pages of a data set that lies in ``folder``."""
        return cls.load(folder, dataset.header.get("config", {}).get("actions") or {})

    def __len__(self) -> int:
        return len(self.users_P)

    def answers(self, clicked_from: float = CLICKED_FROM, ordered_from: float = ORDERED_FROM) -> Answers:
        """How strongly each item was answered."""
        return answers(self.intensities_S, clicked_from, ordered_from)

    def take(self, kept_S: npt.NDArray[np.bool_]) -> Pages:
        """Some of the items, and the pages that have any of them."""
        lengths = np.bincount(np.repeat(np.arange(len(self)), np.diff(self.offsets_P1))[kept_S], minlength=len(self))
        offsets = np.concatenate([[0], np.cumsum(lengths[lengths > 0])]).astype(np.int64)
        columns = (self.users_P[lengths > 0], self.times_P[lengths > 0], offsets, self.items_S[kept_S], self.intensities_S[kept_S], self.parts_S[kept_S])
        return Pages(*columns)

    def training(self, dataset: Dataset) -> tuple[Pages, IntArray]:
        """The pages of the training part, without what was held out of them, and how many events of its user's history came before each.

        An event at the very moment of the page is on it, not before it.
        """
        kept = self.take(self.parts_S == 0)
        return kept, np.minimum(earlier_events(dataset, kept.users_P, kept.times_P), dataset.train_end[kept.users_P])


def earlier_events(dataset: Dataset, users_P: IntArray, times_P: IntArray) -> IntArray:
    """How many events of a user came before a moment, of each pair."""
    event_users = np.repeat(np.arange(len(dataset.user_ids)), np.diff(dataset.offsets))
    # Users' events and the pages in one order by user and moment, pages before the events of the same moment.
    users, times = np.concatenate([users_P, event_users]), np.concatenate([times_P, dataset.times])
    is_event = np.concatenate([np.zeros(len(users_P), np.int8), np.ones(len(event_users), np.int8)])
    order = np.lexsort((is_event, times, users))
    passed = np.cumsum(is_event[order], dtype=np.int64)
    before = np.empty(len(order), dtype=np.int64)
    before[order] = passed
    return before[: len(users_P)] - dataset.offsets[users_P]
