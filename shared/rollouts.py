"""Rollouts: what a generator that is being aligned would recommend, on the way to whoever scores it, and the scores on the way back.

A group is one prompt (a user's history up to some moment) and the items that the policy came up with for it. All rows are those of one data set's item table,
which the header names; whoever scores them maps them to its own items by id.
Artifact ``rollouts/...``: ``rollouts.safetensors`` and ``rollouts.json``. Artifact ``scores/...``: ``scores.safetensors``.
Legend: B groups, G items of a group, E events of all histories.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from semantide.shared.stored_files import whole

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NO_ITEM = -1
"""Stands in the place of an item where the codes that were generated spell none, or the group is shorter."""


@dataclass(frozen=True)
class Rollouts:
    """Groups of items to be scored.

    Shapes: ``users_B`` rows of the data set's users, -1 unknown; ``histories_E``, ``times_E``, ``actions_E`` (numbers among ``actions``, -1 unknown) of all
    histories, group after group, with ``offsets_B1``; ``items_BG`` item rows, ``NO_ITEM`` for what is none.
    Units: ``times_E`` milliseconds since 1970-01-01 UTC, 0 where unknown.
    """

    dataset: str
    users_B: IntArray
    offsets_B1: IntArray
    histories_E: IntArray
    times_E: IntArray
    actions_E: IntArray
    items_BG: IntArray
    actions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        groups, events = len(self.users_B), len(self.histories_E)
        if self.offsets_B1.shape != (groups + 1,) or self.items_BG.ndim != 2 or len(self.items_BG) != groups:
            raise ValueError(
                f"{groups} users, offsets {self.offsets_B1.shape} and items {self.items_BG.shape}: give each group one user, history and row of items"
            )
        if int(self.offsets_B1[0]) != 0 or int(self.offsets_B1[-1]) != events or (np.diff(self.offsets_B1) < 0).any():
            raise ValueError(f"offsets do not cover {events} events: give them ascending from 0 to the number of events")
        if not len(self.times_E) == len(self.actions_E) == events:
            raise ValueError(f"{len(self.times_E)} times and {len(self.actions_E)} actions for {events} events: give one of each")

    def __len__(self) -> int:
        return len(self.users_B)

    @property
    def group_size(self) -> int:
        """Items of a group, those that are none included."""
        return int(self.items_BG.shape[1])

    def history(self, group: int) -> IntArray:
        """The item rows of one group's history, oldest first."""
        return self.histories_E[self.offsets_B1[group] : self.offsets_B1[group + 1]]

    def save(self, folder: Path) -> None:
        """Write the artifact's files."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        save_file(arrays, folder / "rollouts.safetensors")
        (folder / "rollouts.json").write_text(json.dumps({"dataset": self.dataset, "actions": list(self.actions)}, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Rollouts:
        """Read what ``save`` wrote.

        Raises: Corrupt for a folder that holds something else.
        """
        with whole(folder, "rollouts", "let the alignment job make them again"):
            header = json.loads((folder / "rollouts.json").read_text())
            arrays = load_file(folder / "rollouts.safetensors")
            return cls(header["dataset"], **{name: arrays[name] for name in _ARRAYS}, actions=tuple(header["actions"]))


_ARRAYS = ("users_B", "offsets_B1", "histories_E", "times_E", "actions_E", "items_BG")


@dataclass(frozen=True)
class Scores:
    """What a reward model says of rollouts, item by item.

    ``gate_BG``: whether the item is relevant enough to be rewarded at all; ``valid_BG``: whether it is an item that the reward model knows. What is not valid
    has a closed gate.

    Shapes: all [B, G]; ``preference_BG`` in [0, 1], ``relevance_BG`` any finite number.
    """

    preference_BG: FloatArray
    relevance_BG: FloatArray
    gate_BG: BoolArray
    valid_BG: BoolArray

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.preference_BG, self.relevance_BG, self.gate_BG, self.valid_BG)}
        if len(shapes) != 1:
            raise ValueError(f"scores have shapes {sorted(shapes)}: give all of them for the same groups and items")

    def save(self, folder: Path) -> None:
        """Write the artifact's files."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(getattr(self, name)) for name in _SCORES}, folder / "scores.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Scores:
        """Read what ``save`` wrote.

        Raises: Corrupt for a folder that holds something else.
        """
        with whole(folder, "scores", "let the rollouts be scored again"):
            arrays = load_file(folder / "scores.safetensors")
            return cls(*(arrays[name] for name in _SCORES))


_SCORES = ("preference_BG", "relevance_BG", "gate_BG", "valid_BG")


class Scorer(Protocol):
    """Whoever scores rollouts: a reward model in this process, or the reward room behind its queue."""

    def score(self, rollouts: Rollouts) -> Scores:
        """Scores of every item; the same for the same rollouts."""
        ...


def rollouts_of(
    dataset: str,
    users: Sequence[int],
    histories: Sequence[IntArray],
    times: Sequence[IntArray],
    items_BG: IntArray,
    actions: Sequence[IntArray] = (),
    names: Sequence[str] = (),
) -> Rollouts:
    """Pack groups; without ``actions`` nobody knows what was done."""
    lengths = [len(history) for history in histories]
    empty = [np.zeros(0, dtype=np.int64)]
    total = sum(lengths)
    return Rollouts(
        dataset=dataset,
        users_B=np.asarray(users, dtype=np.int64),
        offsets_B1=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        histories_E=np.concatenate([*empty, *histories]).astype(np.int64),
        times_E=np.concatenate([*empty, *times]).astype(np.int64),
        actions_E=np.concatenate([*empty, *actions]).astype(np.int64) if len(actions) else np.full(total, -1, dtype=np.int64),
        items_BG=np.asarray(items_BG, dtype=np.int64),
        actions=tuple(names),
    )
