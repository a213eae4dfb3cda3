"""The configured actions by number, in the order of their names: what steps over many events carry in the place of words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int16]
Masks = npt.NDArray[np.int64]
MOST_ACTIONS = 62  # whose sets fit into the bits of a whole number


@dataclass(frozen=True)
class Signals:
    """Actions in the order of their names, and how much of a like each is."""

    names: tuple[str, ...]
    intensities: tuple[float, ...]

    @classmethod
    def of(cls, actions: Mapping[str, float]) -> Signals:
        """The actions of a deployment.

        Raises: ValueError for more than a set of them can hold.
        """
        names = tuple(sorted(actions))
        if len(names) > MOST_ACTIONS:
            raise ValueError(f"{len(names)} actions are configured: at most {MOST_ACTIONS} are possible, give fewer in SEMANTIDE_ACTIONS")
        return cls(names, tuple(float(actions[name]) for name in names))

    def numbers(self, words: pa.ChunkedArray) -> Numbers:
        """The number of each word, -1 for one that is not configured."""
        found = pc.index_in(words, value_set=pa.array(self.names, words.type)).fill_null(-1)
        return np.asarray(found.to_numpy(), dtype=np.int16)

    def words(self, numbers: Numbers) -> pa.Array:
        """The words again."""
        return pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(self.names, pa.string())).cast(pa.string())

    def intensity(self, numbers: Numbers) -> npt.NDArray[np.float64]:
        """How much of a like each is."""
        return np.asarray(self.intensities, dtype=np.float64)[numbers]

    def strongest(self, numbers: Numbers, starts: npt.NDArray[np.int64], *, dislike_first: bool = False) -> Numbers:
        """Of each stretch of numbers, the action with the highest intensity, the later name where two are equal; with ``dislike_first`` a dislike outweighs all.

        Shapes: ``starts`` are where stretches begin, ascending from 0.
        """
        if not len(starts):
            return numbers[:0]
        above = max((0.0, *self.intensities))
        strength = np.asarray([above - intensity if dislike_first and intensity < 0 else intensity for intensity in self.intensities])
        by_force = np.argsort(strength, kind="stable").astype(np.int16)
        force = np.empty_like(by_force)
        force[by_force] = np.arange(len(by_force), dtype=np.int16)
        return by_force[np.maximum.reduceat(force[numbers], starts)]

    def sets(self, numbers: Numbers, lists: pa.ChunkedArray) -> Masks:
        """What was done at once, as sets of actions: bit i stands for action i. The action itself and what is in the list, where it is configured."""
        sets = np.where(numbers >= 0, np.int64(1) << numbers.clip(0).astype(np.int64), 0)
        lists = lists.combine_chunks()
        words = lists.flatten()
        if len(words):
            found, events = self.numbers(words), pc.list_parent_indices(lists).to_numpy()
            known = found >= 0
            np.bitwise_or.at(sets, events[known], np.int64(1) << found[known].astype(np.int64))
        return sets

    def words_of_sets(self, sets: Masks) -> pa.Array:
        """The actions of each set as lists of words, in the order of their names; those of intensity 0, which only say that an item was shown, are left out."""
        bits = [number for number, intensity in enumerate(self.intensities) if intensity != 0]
        has = (sets[:, None] >> np.array(bits, dtype=np.int64)) & 1 == 1
        offsets = np.append(0, np.cumsum(has.sum(1))).astype(np.int32)
        numbers = np.array(bits, dtype=np.int16)[np.nonzero(has)[1]]
        return pa.ListArray.from_arrays(pa.array(offsets), self.words(numbers))
