"""A job's report: one HTML page that needs nothing but itself, with what the job is, what came out, and its live metrics as plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from math import isfinite

from semantide.shared.contracts import JobRecord

Rows = Sequence[Mapping[str, float]]

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 190, 64, 22
_MOST_POINTS = 600
_COLOURS = ("#2a78d6", "#c2571a", "#2e8b57", "#8452c9", "#b5335f", "#7a7a1f", "#1f8a8a", "#66707c")

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#66707c;--line:#d8dde3;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#98a2ae;--line:#39424e;--page:#151a21}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1360px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0 0 .3rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,560px),1fr));gap:1.6rem;margin:1.5rem 0}
table{border-collapse:collapse}td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
.note{color:var(--soft);margin:.1rem 0}.key{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .35em 0 .9em}
.error{white-space:pre-wrap;border-left:3px solid #b5335f;padding-left:.8rem}
"""


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


def page(record: JobRecord, rows: Rows) -> str:
    """The report of a job as it stands; ``rows`` are its live metrics, each with its ``step``."""
    series = _series(rows)
    known = {name for plot in PLOTS for name in plot.names} | {"epoch"}
    plots = [*PLOTS, *(Plot(name.replace("_", " "), (name,)) for name in sorted(series) if name not in known)]
    drawn = [_figure(plot, {name: series[name] for name in plot.names if name in series}) for plot in plots if any(name in series for name in plot.names)]
    title = escape(f"{record.spec.kind} {record.id}")
    error = f'<p class="error">{escape(record.error)}</p>' if record.error else ""
    body = "".join(drawn) or '<p class="note">No metrics yet: they come after the first steps.</p>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>{_facts(record)}{error}"
        f'<div class="plots">{body}</div>{_summary(series)}</body></html>\n'
    )


def _facts(record: JobRecord) -> str:
    facts: list[tuple[str, str]] = [("state", record.state), ("recipe", record.spec.recipe), ("seed", str(record.spec.seed)), ("stage", record.stage)]
    if record.started:
        facts.append(("started", datetime.fromtimestamp(record.started / 1000, UTC).isoformat(timespec="seconds")))
        if record.finished:
            facts.append(("took", f"{(record.finished - record.started) / 1000:.1f} s"))
    facts += [(f"input {name}", ref) for name, ref in record.spec.inputs.items()] + [(f"made {name}", ref) for name, ref in record.artifacts.items()]
    facts += [("config", json.dumps(record.spec.config, sort_keys=True))] if record.spec.config else []
    facts += [("result", json.dumps(record.result, sort_keys=True))] if record.result else []
    return (
        '<div class="scroll"><table>'
        + "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts if value)
        + "</table></div>"
    )


def _series(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isfinite(value):
                series.setdefault(name, []).append((row["step"], value))
    return series


def _figure(plot: Plot, series: Mapping[str, list[tuple[float, float]]]) -> str:
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
        colour, hover = _COLOURS[index % len(_COLOURS)], f"<title>{escape(name)}: last {_number(series[name][-1][1])}</title>"
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
        f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{_number(high + (low - high) * part)}</text>'
        for part in (0, 0.5, 1)
        for y in [8 + part * (_HEIGHT - _BELOW - 8)]
    )
    ends = f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step {first:.0f}</text><text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{last:.0f}</text>'
    keys = "".join(f'<span class="key" style="background:{_COLOURS[index % len(_COLOURS)]}"></span>{escape(name)}' for index, name in enumerate(shown))
    return (
        f'<figure style="margin:0"><h2>{escape(plot.title)}</h2><p class="note">{escape(plot.note)}{keys}</p>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(plot.title)}">{grid}{"".join(marks)}{ends}</svg></figure>'
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points as a plot can show, the last among them."""
    every = -(-len(points) // _MOST_POINTS)
    return points[::every] if (len(points) - 1) % every == 0 else [*points[::every], points[-1]]


def _stacked(series: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    """Each metric on top of those before it, at the steps that all of them have."""
    common = sorted(set.intersection(*(({step for step, _ in points}) for points in series.values())))
    below, found = dict.fromkeys(common, 0.0), {}
    for name, points in series.items():
        for step, value in points:
            if step in below:
                below[step] += value
        found[name] = [(step, below[step]) for step in common]
    return found if common else {name: points for name, points in series.items()}


def _summary(series: Mapping[str, list[tuple[float, float]]]) -> str:
    if not series:
        return ""
    head = "".join(f'<th class="number">{name}</th>' for name in ("rows", "first", "last", "mean", "least", "most"))
    body = []
    for name in sorted(series):
        values = [value for _, value in series[name]]
        cells = [str(len(values)), *(_number(x) for x in (values[0], values[-1], sum(values) / len(values), min(values), max(values)))]
        body.append(f"<tr><td>{escape(name)}</td>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>")
    return f'<h2>All metrics</h2><div class="scroll"><table><tr><th>metric</th>{head}</tr>{"".join(body)}</table></div>'


def _number(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g} {unit}"
    return f"{value:.4g}"
