"""How long requests take a replica, learned from how long they took. Pure.

A request's time is taken to be a sum: something for itself, for each beam, for each item of its history, for beams and items together, and for items whose
prompt the replica does not have. The five rates are those of least squares over what was seen, with what was seen long ago forgotten; before anything was seen,
and in directions in which nothing was, those that were guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

_BEAMS, _ITEMS = 50.0, 200.0  # so that all five are of about one size
_GUESSED = (0.01, 0.01, 0.0, 0.0, 0.01)  # seconds
_GUESS_COUNTS = 0.2  # as much as so many requests of the size above
_MEMORY = 2000.0  # requests; what was seen so many ago counts less than half
_EVERY = 32  # requests between two solutions
_OUTLIER = 8.0  # times what was expected; longer is somebody else's fault, a pause or a lost packet
_SURE = 64  # requests, before anything is taken for an outlier
_LEAST_SECONDS = 1e-4


class WorkEstimate:
    """Learns from ``saw`` and answers with ``seconds``."""

    def __init__(self) -> None:
        size = len(_GUESSED)
        self._rates: Sequence[float] = _GUESSED
        self._products = [[0.0] * size for _ in range(size)]
        self._times = [0.0] * size
        self._seen = 0

    def seconds(self, beams: float, items: float, *, known: bool) -> float:
        """What a request is expected to take; ``known``: the replica has the prompt of the user's last visit."""
        return max(_LEAST_SECONDS, sum(rate * part for rate, part in zip(self._rates, _parts(beams, items, known), strict=True)))

    def saw(self, beams: float, items: float, seconds: float, *, known: bool) -> None:
        """A request took so long."""
        parts = _parts(beams, items, known)
        if self._seen >= _SURE:
            seconds = min(seconds, _OUTLIER * self.seconds(beams, items, known=known))
        kept = 1 - 1 / _MEMORY
        for at, part in enumerate(parts):
            row = self._products[at]
            self._times[at] = self._times[at] * kept + part * seconds
            for beside, other in enumerate(parts):
                row[beside] = row[beside] * kept + part * other
        self._seen += 1
        if self._seen % _EVERY == 0 or self._seen in (8, 16):
            guesses = [[value + (_GUESS_COUNTS if at == beside else 0.0) for beside, value in enumerate(row)] for at, row in enumerate(self._products)]
            self._rates = _solved(guesses, [time + _GUESS_COUNTS * guess for time, guess in zip(self._times, _GUESSED, strict=True)])


def _parts(beams: float, items: float, known: bool) -> tuple[float, ...]:
    beams, items = beams / _BEAMS, items / _ITEMS
    return 1.0, beams, items, beams * items, 0.0 if known else items


def _solved(matrix: list[list[float]], values: list[float]) -> list[float]:
    """The solution of a small symmetric positive definite system, by elimination; so few equations need no pivots."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    size = len(rows)
    for at in range(size):
        for below in range(at + 1, size):
            share = rows[below][at] / rows[at][at]
            rows[below] = [value - share * above for value, above in zip(rows[below], rows[at], strict=True)]
    solution = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][beside] * solution[beside] for beside in range(at + 1, size))
        solution[at] = (rows[at][size] - rest) / rows[at][at]
    return solution
