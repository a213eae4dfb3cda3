"""What two looks at a process's metrics say together: rates and quantiles of the time between."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Labels = tuple[tuple[str, str], ...]

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Look:
    """The metrics at one moment, seconds from anywhere."""

    time: float
    values: Mapping[tuple[str, Labels], float]

    @classmethod
    def of(cls, text: str, time: float) -> Look:
        """Read Prometheus's text format."""
        values = {}
        for line in text.splitlines():
            if not line.startswith("#") and (found := _LINE.match(line)):
                name, labels, value = found.groups()
                values[name, tuple(sorted(_LABEL.findall(labels or "")))] = float(value)
        return cls(time, values)

    def total(self, name: str, **labels: str) -> float:
        """The sum over everything of this name that has these labels."""
        wanted = set(labels.items())
        return sum(value for (own, its), value in self.values.items() if own == name and wanted <= set(its))

    def rate(self, before: Look, name: str, **labels: str) -> float | None:
        """How much a counter grew a second; None where no time went by or the process began anew."""
        seconds, grown = self.time - before.time, self.total(name, **labels) - before.total(name, **labels)
        return grown / seconds if seconds > 0 and grown >= 0 else None

    def quantile(self, before: Look, name: str, share: float, **labels: str) -> float | None:
        """A quantile of what a histogram counted since, as its buckets tell; None where it counted nothing."""
        bounds: dict[float, float] = {}
        for own, its in self.values:
            if own == f"{name}_bucket" and set(labels.items()) <= set(its):
                edge = dict(its)["le"]
                bounds[float(edge)] = self.total(own, le=edge, **labels) - before.total(own, le=edge, **labels)
        if not bounds or (counted := bounds[max(bounds)]) <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound in sorted(bounds):
            if bounds[bound] >= share * counted:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (share * counted - below) / max(bounds[bound] - below, 1e-12)
            lower, below = bound, bounds[bound]
        return lower
