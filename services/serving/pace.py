"""How long rounds take, learned from those that were: a fixed part, and a part for each row."""

from __future__ import annotations

_FIXED_SECONDS, _ROW_SECONDS = 2e-3, 2e-5  # until rounds were measured
_MEMORY = 0.05  # weight of the newest round


class Pace:
    """A straight line through (rows, seconds) of recent rounds, older ones fading."""

    def __init__(self) -> None:
        self._rows = self._seconds = self._variance = self._covariance = 0.0
        self._seen = 0

    def learn(self, rows: int, seconds: float) -> None:
        """A round of so many rows took so long."""
        self._seen += 1
        weight = max(_MEMORY, 1 / self._seen)
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        self._rows += weight * off_rows
        self._seconds += weight * off_seconds
        self._variance = (1 - weight) * (self._variance + weight * off_rows * off_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * off_rows * off_seconds)

    @property
    def row_seconds(self) -> float:
        """What a row adds."""
        if not self._seen:
            return _ROW_SECONDS
        # Rounds of one size say nothing about the slope; it never exceeds what rows cost if there were no fixed part.
        most = self._seconds / max(self._rows, 1.0)
        return min(max(self._covariance / self._variance, 0.0), most) if self._variance > 1e-9 else most / 2

    def seconds(self, rows: int, rounds: int) -> float:
        """What so many rows in so many rounds will take."""
        fixed = max(self._seconds - self.row_seconds * self._rows, 0.0) if self._seen else _FIXED_SECONDS
        return rounds * fixed + rows * self.row_seconds
