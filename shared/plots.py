"""Metrics of jobs as pictures: SVG that needs no script and takes its colours from the page it is put in (``--ink``, ``--soft``, ``--line``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

Rows = Sequence[Mapping[str, float]]
Points = list[tuple[float, float]]

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 190, 64, 22
_MOST_POINTS = 600
COLOURS = ("#2a78d6", "#c2571a", "#2e8b57", "#8452c9", "#b5335f", "#7a7a1f", "#1f8a8a", "#66707c")


@dataclass(frozen=True)
class Plot:
    """Metrics that are looked at together; ``stacked`` ones are shares of one whole."""

    title: str
    names: tuple[str, ...]
    note: str = ""
    stacked: bool = False


PLOTS = (
    Plot("Loss", ("loss",), "per target"),
    Plot("Validation", ("valid_ndcg@10", "valid_hr@10")),
    Plot("Tokens per second", ("tokens_per_second",), "of all ranks together"),
    Plot(
        "Use of the arithmetic", ("mfu",), "operations that the packed histories need, of the leading rank, over the matrix-product peak measured on its device"
    ),
    Plot(
        "What the time went into",
        ("compute_share", "exposed_load", "exposed_sparse", "exposed_copy", "exposed_dense", "idle_share"),
        "shares of the computing thread; exposed: it waited for that stage",
        stacked=True,
    ),
    Plot("Busy stages", ("busy_load", "busy_route", "busy_fetch", "busy_copy", "busy_dense", "busy_update"), "shares of the time; stages overlap"),
    Plot("Ranks", ("imbalance", "communication_share"), "wait of an average rank in the cost model; time in collectives, of the leading rank"),
    Plot("Rows that are changed while they are read", ("collision_rate",), "share of the rows asked for that the batches in flight change too"),
    Plot(
        "Rows of tables on the wire",
        ("wire_ids", "wire_vectors", "wire_gradients", "wire_reads", "wire_replica_ids", "wire_replica_vectors", "wire_replica_gradients"),
        "bytes that left the leading rank a step; replica: to other groups; reads: for validation and publication",
    ),
    Plot("Drift of tables", ("drift",), "how far groups' copies had come apart when they last met, of the length of their mean"),
    Plot(
        "Reward",
        ("reward", "preference", "held_out_reward", "held_out_judge"),
        "of the policy's rollouts; where the held-out reward rises and the judge falls, it is being gamed",
    ),
    Plot("Held-out ranking", ("held_out_hr@10", "held_out_hr@50", "held_out_ndcg@10", "held_out_ndcg@50")),
    Plot("Distance from the start", ("kl",), "divergence of the policy, exact at each prefix"),
    Plot("Entropy of the policy", ("entropy",)),
    Plot(
        "Shares of rollouts",
        ("gate_rate", "known_rate", "skipped_share", "held_out_gate_rate", "held_out_invalid_share"),
        "skipped: of groups; invalid: of free beams",
    ),
    Plot("Variety and popularity", ("diversity", "group_diversity", "popularity", "held_out_popularity"), "distinct items; mean percentile by training events"),
    Plot("Memory", ("memory_bytes",), "the most so far, bytes, of the leading rank"),
    Plot("Learning rate", ("lr",)),
)


def plots_of(names: Iterable[str]) -> list[Plot]:
    """Those plots that show some of these metrics, and one for each metric that none knows."""
    wanted = set(names)
    known = {name for plot in PLOTS for name in plot.names} | {"epoch"}
    return [*(plot for plot in PLOTS if wanted & set(plot.names)), *(Plot(name.replace("_", " "), (name,)) for name in sorted(wanted - known))]


def series_of(rows: Rows) -> dict[str, Points]:
    """(step, value) of each metric; what is not finite is left out."""
    series: dict[str, Points] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isfinite(value):
                series.setdefault(name, []).append((row["step"], value))
    return series


def figure(plot: Plot, series: Mapping[str, Points]) -> str:
    """A plot of some series, as an HTML figure; there is at least one, and none is empty."""
    shown = {name: _thinned(points) for name, points in series.items()}
    if plot.stacked:
        shown = _stacked(shown)
    steps = [step for points in shown.values() for step, _ in points]
    values = [value for points in shown.values() for _, value in points]
    low, high = (0.0, max(1.0, *values)) if plot.stacked else (min(values), max(values))
    if low == high:
        low, high = low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def at(step: float, value: float) -> str:
        x = _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 8)
        return f"{x:.1f},{8 + (high - value) / (high - low) * (_HEIGHT - _BELOW - 8):.1f}"

    marks, floor = [], [(step, low) for step in sorted(set(steps))]
    for index, (name, points) in enumerate(shown.items()):
        colour, hover = COLOURS[index % len(COLOURS)], f"<title>{escape(name)}: last {number(series[name][-1][1])}</title>"
        line = " ".join(at(*point) for point in points)
        if plot.stacked:
            back = " ".join(at(*point) for point in reversed(floor))
            marks.append(f'<polygon points="{line} {back}" fill="{colour}" fill-opacity=".75">{hover}</polygon>')
            floor = points
        elif len(points) == 1:
            x, y = line.split(",")
            marks.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{hover}</circle>')
        else:
            marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.7">{hover}</polyline>')
    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.0f}" y2="{y:.0f}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{number(high + (low - high) * part)}</text>'
        for part in (0, 0.5, 1)
        for y in [8 + part * (_HEIGHT - _BELOW - 8)]
    )
    ends = f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step {first:.0f}</text><text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{last:.0f}</text>'
    keys = "".join(f'<span class="key" style="background:{COLOURS[index % len(COLOURS)]}"></span>{escape(name)}' for index, name in enumerate(shown))
    return (
        f'<figure style="margin:0"><h2>{escape(plot.title)}</h2><p class="note">{escape(plot.note)}{keys}</p>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(plot.title)}">{grid}{"".join(marks)}{ends}</svg></figure>'
    )


def _thinned(points: Points) -> Points:
    """At most so many points as a plot can show, the last among them."""
    every = -(-len(points) // _MOST_POINTS)
    return points[::every] if (len(points) - 1) % every == 0 else [*points[::every], points[-1]]


def _stacked(series: Mapping[str, Points]) -> dict[str, Points]:
    """Each metric on top of those before it, at the steps that all of them have."""
    common = sorted(set.intersection(*(({step for step, _ in points}) for points in series.values())))
    below, found = dict.fromkeys(common, 0.0), {}
    for name, points in series.items():
        for step, value in points:
            if step in below:
                below[step] += value
        found[name] = [(step, below[step]) for step in common]
    return found if common else {name: points for name, points in series.items()}


def number(value: float) -> str:
    """Four digits and a unit for large numbers."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g} {unit}"
    return f"{value:.4g}"
