"""How many bytes one request of a generator holds while it is decoded: known before it begins, and what a lease is good for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from semantide.shared.models.linear_memory import LinearSize

_MOST_WIDTH = 1 << 16


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's requests. ``place`` are those of the keys and values of a prompt's place or a beam's token over all softmax layers.

    A level has no more beams than its prefixes have codes, and what beams of the last level do to a linear state nobody goes on from.
    """

    place: int
    linear: LinearSize
    level_sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Tokens that beams take."""
        return len(self.level_sizes) - 1

    def widths(self, width: int) -> list[int]:
        """Most beams at each step."""
        return [min(width, prefixes) for prefixes in accumulate(self.level_sizes[:-1], lambda some, size: min(some * size, _MOST_WIDTH))]

    def rows(self, width: int) -> int:
        """Tokens of beams whose keys and values are kept."""
        return sum(self.widths(width))

    def recorded(self, width: int) -> int:
        """Tokens of beams of which linear layers keep records."""
        return sum(self.widths(width)[:-1])

    def row_bytes(self, level: int) -> int:
        """Of one token that beams take, the first at level 1."""
        return self.place + (self.linear.row if level < self.steps else 0)

    def beams(self, width: int) -> int:
        """All that is kept of beams, beside their prompt; it grows with the width."""
        own = min(width * self.linear.own_state, self.linear.most_own) if self.steps > self.linear.flush_depth else 0
        return self.rows(width) * self.place + self.recorded(width) * self.linear.row + own

    def prompt(self, places: int, remembered: bool) -> int:
        """Keys and values of a prompt, and the linear states at its end and, where a user may return, before it."""
        return places * self.place + (self.linear.snapshots if remembered else 1) * self.linear.mark

    def width_within(self, num_bytes: int) -> int:
        """The largest width whose beams fit."""
        low, high = 0, _MOST_WIDTH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.beams(middle) <= num_bytes else (low, middle - 1)
        return low
