"""What was done in each event of a data set, as numbers.

Legend: E events of all users one after another, as ``Dataset.items``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.stored_files import DATASET_AGAIN, whole

Numbers = npt.NDArray[np.int16]


@dataclass(frozen=True)
class EventActions:
    """The distinct actions, and each event's number among them."""

    names: tuple[str, ...]
    numbers_E: Numbers

    @classmethod
    def load(cls, folder: Path) -> EventActions:
        """Read them from a ``datasets`` artifact.

        Raises: Conflict for one that does not have them, Corrupt.
        """
        with whole(folder, "events", DATASET_AGAIN):
            stored = pq.ParquetFile(folder / "users.parquet")
            if "actions" not in stored.schema_arrow.names:
                raise Conflict(f"{folder.name} does not say what was done in its events: make the data set anew, or leave `actions` out of features")
            number_of: dict[str, int] = {}
            parts = [np.zeros(0, dtype=np.int16)]
            for batch in stored.iter_batches(1 << 16, columns=["actions"]):
                own = batch["actions"].flatten().dictionary_encode()
                numbers = [number_of.setdefault(name, len(number_of)) for name in own.dictionary.to_pylist()]
                parts.append(np.array(numbers, dtype=np.int16)[own.indices.to_numpy()] if numbers else parts[0])
            return cls(tuple(number_of), np.concatenate(parts))

    def among(self, names: Sequence[str]) -> Numbers:
        """The number of each distinct action among ``names``, counted from 1; 0 for what is not one of them."""
        place = {name: number for number, name in enumerate(names, 1)}
        return np.array([place.get(name, 0) for name in self.names], dtype=np.int16)


def of_training(dataset: Dataset, numbers_E: Numbers) -> Numbers:
    """The numbers of the training events alone, in the order in which they are numbered."""
    lengths_U = np.diff(dataset.offsets)
    places_E = np.arange(len(dataset.items)) - np.repeat(dataset.offsets[:-1], lengths_U)
    return numbers_E[places_E < np.repeat(dataset.train_end, lengths_U)]
