"""Estimates with their intervals, and points of runs, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from semantide.shared.plots import COLOURS, number

_WIDTH, _LABEL, _ROW = 620, 150, 30


@dataclass(frozen=True)
class Interval:
    """A named value and where it lies in 95 of 100 such experiments."""

    name: str
    value: float
    low: float
    high: float


def intervals_picture(title: str, rows: Sequence[Interval]) -> str:
    """One line for each interval, on one axis."""
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    spread = (high - low) or abs(high) or 1.0
    low, high = low - 0.05 * spread, high + 0.05 * spread

    def at(value: float) -> float:
        return _LABEL + (value - low) / (high - low) * (_WIDTH - _LABEL - 120)

    marks = []
    for place, row in enumerate(rows):
        y, colour = 14 + _ROW * place, COLOURS[place % len(COLOURS)]
        marks.append(
            f'<text x="0" y="{y + 4}">{escape(row.name)}</text><line x1="{at(row.low):.1f}" x2="{at(row.high):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{at(row.value):.1f}" cy="{y}" r="5" fill="{colour}"/><text x="{_WIDTH - 112}" y="{y + 4}">{number(row.value)} ({number(row.low)} to {number(row.high)})</text>'
        )
    said = "; ".join(f"{row.name} {number(row.value)}, {number(row.low)} to {number(row.high)}" for row in rows)
    return f'<figure><h3>{escape(title)}</h3><svg viewBox="0 0 {_WIDTH + 40} {_ROW * len(rows)}" role="img" aria-label="{escape(f"{title}: {said}")}">{"".join(marks)}</svg></figure>'


def scatter_picture(title: str, x_name: str, y_name: str, runs: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Each run's way through the plane, from its open first point to its last one."""
    points = [point for run in runs.values() for point in run]
    bounds = [(min(point[axis] for point in points), max(point[axis] for point in points)) for axis in (0, 1)]
    spans = [((high - low) or abs(high) or 1.0) for low, high in bounds]

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return 60 + (point[0] - bounds[0][0]) / spans[0] * 540, 220 - (point[1] - bounds[1][0]) / spans[1] * 200

    marks, keys = [], []
    for place, (name, run) in enumerate(runs.items()):
        colour, places = COLOURS[place % len(COLOURS)], [at(point) for point in run]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        marks += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"var(--card)" if step == 0 else colour}" stroke="{colour}"><title>{escape(name)}, test {step}</title></circle>'
            for step, (x, y) in enumerate(places)
        ]
        keys.append(f'<span class="key" style="background:{colour}"></span>{escape(name)}')
    axes = (
        f'<text x="60" y="244">{escape(x_name)} {number(bounds[0][0])}</text><text x="600" y="244" text-anchor="end">{number(bounds[0][1])}</text>'
        f'<text x="54" y="224" text-anchor="end">{number(bounds[1][0])}</text><text x="54" y="24" text-anchor="end">{number(bounds[1][1])}</text><text x="4" y="10">{escape(y_name)}</text>'
    )
    return (
        f'<figure><h3>{escape(title)}</h3><p class="note">{"".join(keys)}</p><svg viewBox="0 0 620 250" role="img" aria-label="{escape(title)}">'
        f'<path d="M60 20V220H600" fill="none" stroke="var(--line)"/>{axes}{"".join(marks)}</svg></figure>'
    )
