"""What users were shown and what they did with it: the exposures of a data set as columns, and how to select and count them.

Legend: X exposures, S signals, U users, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.stored_files import DATASET_AGAIN, whole

IntArray = npt.NDArray[np.int64]
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Feedback:
    """Exposures, each with everything that was done.

    Shapes: all [X], ``signals_XS`` [X, S] whether each of ``signals`` was given. ``users`` are rows of the data set's users, -1 for one without; ``positions``
    are -1, ``tabs`` (numbers among ``tab_names``) -1, ``propensities`` and ``values`` NaN where nothing is known; ``parts`` 0 train, 1 validation, 2 test, -1 none of them.
    Units: ``times`` milliseconds since 1970-01-01 UTC.
    """

    users: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    times: IntArray
    pages: IntArray
    tabs: npt.NDArray[np.int16]
    positions: npt.NDArray[np.int32]
    signals_XS: npt.NDArray[np.bool_]
    values: npt.NDArray[np.float32]
    propensities: npt.NDArray[np.float32]
    parts: npt.NDArray[np.int8]
    signals: tuple[str, ...]
    tab_names: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Feedback:
        """Read the exposures of a ``datasets`` artifact.

        Raises: Conflict for one that has none, Corrupt.
        """
        path = folder / "feedback.parquet"
        if not path.exists():
            raise Conflict(f"{folder.name} was made without exposures: make the data set anew")
        with whole(folder, "exposures", DATASET_AGAIN):
            table = pq.read_table(path).combine_chunks()
            lists = table["signals"].combine_chunks() if table.num_rows else pa.array([], pa.list_(pa.string()))
            words = lists.flatten()
            names = sorted(word for word in pc.unique(words).to_pylist() if word is not None)
            signals_XS = np.zeros((table.num_rows, len(names)), dtype=np.bool_)
            if names:
                signals_XS[pc.list_parent_indices(lists).to_numpy(), pc.index_in(words, value_set=pa.array(names)).to_numpy()] = True
            tab_names = sorted(name for name in pc.unique(table["tab"]).to_pylist() if name is not None)
            tabs = pc.index_in(table["tab"], value_set=pa.array(tab_names, pa.string())).fill_null(-1).to_numpy().astype(np.int16)

            def column(name: str, nothing: float, dtype: Any) -> Any:
                return table[name].fill_null(nothing).to_numpy().astype(dtype)

            return cls(
                users=column("user", -1, np.int32),
                items=column("item", -1, np.int32),
                times=column("time", 0, np.int64),
                pages=column("page", -1, np.int64),
                tabs=tabs,
                positions=column("position", -1, np.int32),
                signals_XS=signals_XS,
                values=column("value", float("nan"), np.float32),
                propensities=column("propensity", float("nan"), np.float32),
                parts=column("part", 0, np.int8),
                signals=tuple(names),
                tab_names=tuple(tab_names),
            )

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: npt.NDArray[Any]) -> Feedback:
        """Some exposures, by their numbers or by a mask."""
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name not in ("signals", "tab_names")}
        return replace(self, **columns)

    def among(self, signals: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether each of some signals was given [X, len(signals)]; one that nobody ever gave was not."""
        place = {name: number for number, name in enumerate(self.signals)}
        found = np.zeros((len(self), len(signals)), dtype=np.bool_)
        for column, name in enumerate(signals):
            if name in place:
                found[:, column] = self.signals_XS[:, place[name]]
        return found


def history_ends(dataset: Dataset, users_X: npt.NDArray[np.int32], times_X: IntArray) -> IntArray:
    """How many events of the user's history came before each exposure [X]; what happened at the same moment did not."""
    lengths_U = np.diff(dataset.offsets)
    # Users one after another on one axis of time, each with a stretch of its own: one search answers for all.
    moments = np.unique(np.concatenate([dataset.times, times_X]))
    span = len(moments) + 1
    keys_E = np.repeat(np.arange(len(lengths_U)), lengths_U) * span + np.searchsorted(moments, dataset.times)
    known = users_X >= 0
    keys_X = users_X[known].astype(np.int64) * span + np.searchsorted(moments, times_X[known])
    ends_X = np.zeros(len(users_X), dtype=np.int64)
    ends_X[known] = np.searchsorted(keys_E, keys_X, side="left") - dataset.offsets[users_X[known]]
    return ends_X
