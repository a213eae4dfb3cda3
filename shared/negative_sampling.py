"""Negatives of training targets from several sources, and the probability that a draw had: what the loss needs to be unbiased.

Sources: uniform over all items; popularity to a power; items whose semantic id begins like the target's (hard); items that a model's own beams hold
for the target's history (hard); and the batch's own targets. What a user is known to have taken is no negative: its place is -1.
The probability is that of the whole mixture: how often an item is expected among a target's negatives, divided by their number. Beams are there for certain.
It is a function of targets and negatives alone, so that nothing but rows has to be kept between the draw and the loss.
Legend: N items, T targets, R negatives of a target, W beams, S negatives shared by a batch, U users, K known pairs, L levels, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
Rows = npt.NDArray[np.integer]
Negatives = npt.NDArray[np.int32]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits spread: the high bits of a product depend on all of the key
_MOST_HASH_BITS = 24


@dataclass(frozen=True)
class NegativeMix:
    """How many negatives of each source a target gets."""

    uniform: int = 0
    popularity: int = 64
    exponent: float = 0.75
    """Power of an item's training count that ``popularity`` draws by; 0 is uniform, 1 the data's own distribution."""
    prefix: int = 0
    prefix_levels: int = 1
    """How many first codes a ``prefix`` negative has in common with the target."""
    beams: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("uniform", 0, 65536),
            ("popularity", 0, 65536),
            ("exponent", 0, 4),
            ("prefix", 0, 65536),
            ("prefix_levels", 1, 64),
            ("beams", 0, 4096),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or (name != "exponent" and value != int(value)):
                raise ValueError(f"negatives {name} is {value!r}: give a {'number' if name == 'exponent' else 'whole number'} from {low} to {high}")
        if not self.size:
            raise ValueError("no source gives a negative: give at least one of uniform, popularity, prefix, beams")

    @property
    def size(self) -> int:
        """Negatives of a target."""
        return self.uniform + self.popularity + self.prefix + self.beams

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> NegativeMix:
        """From a message or a job's configuration.

        Raises: ValueError that names the field.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"negatives field {name!r} is unknown: known are {', '.join(known)}")
        # JSON tells 4 from 4.0 as it likes.
        return cls(**{name: int(value) if name != "exponent" and isinstance(value, float) and value.is_integer() else value for name, value in values.items()})

    def values(self) -> dict[str, float]:
        """As a message carries it."""
        return asdict(self)


class AliasTable:
    """Draws from weights in constant time: each place holds two items and where to cut between them.

    Source: Vose, A linear algorithm for generating random numbers with a given distribution, 1991.
    """

    def __init__(self, weights_N: npt.NDArray[np.float64]) -> None:
        total = weights_N.sum()
        if not len(weights_N) or not np.isfinite(total) or total <= 0 or (weights_N < 0).any():
            raise ValueError(f"{len(weights_N)} weights with sum {total}: give at least one positive weight and no negative one")
        self.probabilities_N = weights_N / total
        size = len(weights_N)
        cut, other = [1.0] * size, list(range(size))
        # Numbers of Python's own: a step on an array's elements takes several times as long.
        scaled = (self.probabilities_N * size).tolist()
        below = self.probabilities_N * size < 1
        small, large = np.flatnonzero(below).tolist(), np.flatnonzero(~below).tolist()
        while small and large:
            low, high = small.pop(), large.pop()
            cut[low], other[low] = scaled[low], high
            scaled[high] -= 1 - scaled[low]
            (small if scaled[high] < 1 else large).append(high)
        self.cut_N, self.other_N = np.array(cut), np.array(other, dtype=np.int64)

    @classmethod
    def of(cls, probabilities_N: npt.NDArray[np.float64], cut_N: npt.NDArray[np.float64], other_N: IntArray) -> AliasTable:
        """From the three arrays of one that was made before."""
        made = cls.__new__(cls)
        made.probabilities_N, made.cut_N, made.other_N = probabilities_N, cut_N, other_N
        return made

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        """Rows drawn with replacement."""
        places = rng.integers(0, len(self.cut_N), count)
        return np.where(rng.random(count) < self.cut_N[places], places, self.other_N[places])


class KnownPairs:
    """Which items each user is known to have taken, as sorted keys."""

    def __init__(self, users_K: Rows, rows_K: Rows, num_items: int) -> None:
        self._num_items = num_items
        self.keys_K = np.unique(np.asarray(users_K, dtype=np.int64) * num_items + np.asarray(rows_K, dtype=np.int64))
        # Few of the rows that are asked for are known: a bit for each key's hash says of most that they are not, without a search.
        self._shift = np.uint64(64 - min(4 + len(self.keys_K).bit_length(), _MOST_HASH_BITS))
        self._maybe = np.zeros(1 << (64 - int(self._shift)), dtype=bool)
        self._maybe[self._hash(self.keys_K)] = True

    def holds(self, users: Rows, rows: Rows) -> npt.NDArray[np.bool_]:
        """Where a row is known of a user; shapes broadcast."""
        keys = np.asarray(users, dtype=np.int64) * self._num_items + rows
        known = self._maybe[self._hash(keys)]
        places = np.nonzero(known)
        asked = keys[places]
        if len(asked):
            known[places] = self.keys_K[np.minimum(np.searchsorted(self.keys_K, asked), len(self.keys_K) - 1)] == asked
        return known

    def _hash(self, keys: IntArray) -> npt.NDArray[np.uint64]:
        hashed: npt.NDArray[np.uint64] = (keys.view(np.uint64) * _MULTIPLIER) >> self._shift
        return hashed


class NegativeSampler:
    """Draws a mixture of negatives for targets; all its randomness comes from the generator that it is given."""

    def __init__(self, mix: NegativeMix, counts_N: Rows, codes_NL: Rows | None = None, popularity: AliasTable | None = None) -> None:
        """``counts_N`` are training counts; ``codes_NL`` semantic ids in the same rows, a first code of -1 where there is none.

        ``popularity`` is that of another sampler of the same counts and mixture: making it takes a moment for each million items.
        """
        self.mix, self.num_items = mix, len(counts_N)
        if not self.num_items:
            raise ValueError("there are no items to draw negatives from")
        # An item that training never saw is still an item: it can be drawn as if seen once.
        weights_N = np.maximum(np.asarray(counts_N, dtype=np.float64), 1.0)
        self.popularity = popularity or AliasTable(weights_N**mix.exponent)
        self._drawn_N = torch.from_numpy(mix.popularity * self.popularity.probabilities_N + mix.uniform / self.num_items).float()
        self._popular_N = torch.from_numpy(self.popularity.probabilities_N.astype(np.float32))
        self._in_data_N = torch.from_numpy(weights_N / weights_N.sum()).float()
        self._groups = None
        if mix.prefix:
            if codes_NL is None or codes_NL.ndim != 2 or len(codes_NL) != self.num_items or codes_NL.shape[1] < mix.prefix_levels:
                shape = "none" if codes_NL is None else str(codes_NL.shape)
                raise ValueError(f"prefix negatives share {mix.prefix_levels} codes, and the codes are {shape}: give a catalog with that many levels")
            self._groups = _Groups.of(codes_NL[:, : mix.prefix_levels])

    def draw(
        self, targets_T: Rows, rng: np.random.Generator, *, users_T: Rows | None = None, known: KnownPairs | None = None, beams_TW: Rows | None = None
    ) -> Negatives:
        """Negatives of each target [T, R], source after source, -1 where there is none; ``beams_TW`` are rows that a model's beams hold, -1 where fewer.

        Raises: ValueError where the mixture asks for beams and none are given.
        """
        mix = self.mix
        at_T: IntArray = np.asarray(targets_T, dtype=np.int64)
        size = len(at_T)
        parts: list[Rows] = []
        if mix.uniform:
            parts.append(rng.integers(0, self.num_items, (size, mix.uniform)))
        if mix.popularity:
            parts.append(self.popularity.draw(size * mix.popularity, rng).reshape(size, mix.popularity))
        if self._groups is not None:
            parts.append(self._groups.draw(at_T, mix.prefix, rng))
        if mix.beams:
            beams_TW = self._beams(beams_TW, size)
            # Any of them alike, for the first ones would always be the same; places without a row only where rows run out.
            order = np.where(beams_TW < 0, 1.0, rng.random(beams_TW.shape)).argsort(1)[:, : mix.beams]
            chosen = np.take_along_axis(beams_TW, order, 1)
            parts.append(np.pad(chosen, ((0, 0), (0, mix.beams - chosen.shape[1])), constant_values=-1))
        rows_TR = np.concatenate(parts, axis=1)
        if known is not None and users_T is not None:
            rows_TR = np.where(known.holds(np.asarray(users_T)[:, None], rows_TR), -1, rows_TR)
        return rows_TR.astype(np.int32)

    def log_q(self, targets_T: Tensor, rows_TR: Tensor) -> Tensor:
        """Logarithm of the probability of each drawn row for its target, on the device of ``rows_TR``.

        The rows must be those of ``draw``, in its order: the last ones are beams, which are there for certain once they have been chosen.
        """
        mix, device = self.mix, rows_TR.device
        at_TR = rows_TR.clamp(min=0).long()
        expected_TR = self._drawn_N.to(device)[at_TR]
        if self._groups is not None:
            expected_TR += mix.prefix * self._groups.probability(targets_T, at_TR)
        for column_T in rows_TR[:, mix.size - mix.beams :].T if mix.beams else ():
            # One at a time: no array of targets x negatives x beams. No two columns of a target hold the same item.
            expected_TR += (rows_TR == column_T.unsqueeze(1)).float()
        return (expected_TR.clamp_(min=1e-30) / mix.size).log_()

    def draw_shared(self, count: int, rng: np.random.Generator, targets_T: Rows | None = None) -> Negatives:
        """Negatives that all targets of a batch share [S]: drawn by popularity to the mixture's power, then, where they are given, the batch's own targets."""
        rows = [self.popularity.draw(count, rng)]
        if targets_T is not None:
            rows.append(np.unique(targets_T))
        return np.concatenate(rows).astype(np.int32)

    def log_q_shared(self, rows_S: Tensor, count: int, targets_T: Tensor | None = None) -> Tensor:
        """Logarithm of the probability of each row of ``draw_shared``.

        A target that stands ``m`` times in a batch of T counts m times: T times its share of the data is how often that is expected.
        """
        device = rows_S.device
        at_S = rows_S.long()
        expected_S, times_S = count * self._popular_N.to(device)[at_S], torch.ones(len(rows_S), device=device)
        if targets_T is not None and len(targets_T):
            expected_S += len(targets_T) * self._in_data_N.to(device)[at_S]
            times_S[count:] = torch.unique(targets_T.to(device), return_counts=True)[1].float()
        return (expected_S / (times_S * max(len(rows_S), 1))).clamp_(min=1e-30).log_()

    def _beams(self, beams_TW: Rows | None, size: int) -> Rows:
        if beams_TW is None or beams_TW.ndim != 2 or len(beams_TW) != size:
            shape = "none" if beams_TW is None else str(beams_TW.shape)
            raise ValueError(f"the mixture takes {self.mix.beams} negatives from beams, and the beams of {size} targets are {shape}: give [targets, beams]")
        return beams_TW


@dataclass(frozen=True)
class _Groups:
    """Items by how their semantic ids begin.

    Shapes: ``group_N`` (-1 without codes), ``order_N`` (items, group after group), ``starts_G``, ``sizes_G``.
    """

    group_N: IntArray
    order_N: IntArray
    starts_G: IntArray
    sizes_G: IntArray

    @classmethod
    def of(cls, codes_NP: Rows) -> _Groups:
        _, group_N = np.unique(codes_NP, axis=0, return_inverse=True)
        group_N = group_N.reshape(-1).astype(np.int64)
        sizes_G = np.bincount(group_N)
        return cls(np.where(codes_NP[:, 0] < 0, -1, group_N), np.argsort(group_N, kind="stable"), np.cumsum(sizes_G) - sizes_G, sizes_G)

    def draw(self, targets_T: IntArray, count: int, rng: np.random.Generator) -> IntArray:
        """Members of each target's group [T, count], -1 for a target without codes."""
        group_T1 = self.group_N[targets_T][:, None]
        place = (rng.random((len(targets_T), count)) * self.sizes_G[group_T1]).astype(np.int64)
        return np.where(group_T1 >= 0, self.order_N[self.starts_G[group_T1] + place], -1)

    def probability(self, targets_T: Tensor, rows_TR: Tensor) -> Tensor:
        """That one draw gives each row."""
        group_N, sizes_G = torch.from_numpy(self.group_N).to(rows_TR.device), torch.from_numpy(self.sizes_G).to(rows_TR.device)
        group_T1 = group_N[targets_T].unsqueeze(1)
        return ((group_T1 >= 0) & (group_N[rows_TR] == group_T1)).float() / sizes_G[group_T1.clamp(min=0)]
