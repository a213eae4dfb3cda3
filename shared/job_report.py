"""A job's report: one HTML page that needs nothing but itself, with what the job is, what it was made from, what came out, and its metrics as plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Any

from semantide.shared.contracts import JobRecord
from semantide.shared.plots import Points, Rows, figure, number, plots_of, series_of

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5c6672;--line:#d8dde3;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#98a2ae;--line:#39424e;--page:#151a21}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1360px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0 0 .3rem}section{margin:1.6rem 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,560px),1fr));gap:1.6rem;margin:1.5rem 0}
table{border-collapse:collapse}td,th{padding:.15rem .9rem .15rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:anywhere}
th{white-space:nowrap}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:11px}
.note{color:var(--soft);margin:.1rem 0}.key{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .35em 0 .9em}
.error{white-space:pre-wrap;border-left:3px solid #b5335f;padding-left:.8rem;overflow-wrap:anywhere}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}
"""


@dataclass(frozen=True)
class Origin:
    """What a run was made from. ``config`` is the whole configuration, recipe and changes together; ``manifests`` are those of its inputs and of what it made,
    by reference: the digest in a reference is that of the data. ``log`` is the end of what the process said."""

    code: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    log: str = ""


def page(record: JobRecord, rows: Rows, origin: Origin | None = None) -> str:
    """The report of a job as it stands; ``rows`` are its live metrics, each with its ``step``."""
    origin = origin or Origin()
    series = series_of(rows)
    drawn = [figure(plot, {name: series[name] for name in plot.names if name in series}) for plot in plots_of(name for name in series if name != "epoch")]
    title = escape(f"{record.spec.kind} {record.id}")
    error = f'<p class="error">{escape(record.error)}</p>' if record.error else ""
    body = "".join(drawn) or '<p class="note">No metrics yet: they come after the first steps.</p>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>{_table(_facts(record, origin))}{error}"
        f'<div class="plots">{body}</div>{_summary(series)}{_config(record, origin)}{_data(record, origin)}{_log(record, origin)}</body></html>\n'
    )


def _table(facts: list[tuple[str, str]]) -> str:
    return (
        '<div class="scroll"><table>'
        + "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts if value)
        + "</table></div>"
    )


def _facts(record: JobRecord, origin: Origin) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = [("state", record.state), ("recipe", record.spec.recipe), ("seed", str(record.spec.seed)), ("stage", record.stage)]
    if record.started:
        facts.append(("started", datetime.fromtimestamp(record.started / 1000, UTC).isoformat(timespec="seconds")))
        if record.finished:
            facts.append(("took", f"{(record.finished - record.started) / 1000:.1f} s"))
    facts += [("attempts", str(record.attempt))] if record.attempt > 1 else []
    facts += [("result", json.dumps(record.result, sort_keys=True))] if record.result else []
    return [*facts, ("code", origin.code), *origin.machine.items()]


def _config(record: JobRecord, origin: Origin) -> str:
    config = dict(_flat(origin.config or record.spec.config))
    if not config:
        return ""
    said = dict(_flat(record.spec.config))
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(json.dumps(value, sort_keys=True))}</td><td>{'changed' if name in said and origin.config else ''}</td></tr>"
        for name, value in config.items()
    )
    return f'<section><h2>Configuration</h2><div class="scroll"><table><tr><th>field</th><th>value</th><th></th></tr>{rows}</table></div></section>'


def _flat(config: Mapping[str, Any], under: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in sorted(config.items()):
        found += _flat(value, f"{under}{name}.") if isinstance(value, Mapping) and value else [(f"{under}{name}", value)]
    return found


def _data(record: JobRecord, origin: Origin) -> str:
    refs = [(f"input {name}", ref) for name, ref in record.spec.inputs.items()] + [(f"made {name}", ref) for name, ref in record.artifacts.items()]
    if not refs:
        return ""
    rows = []
    for name, ref in refs:
        manifest = origin.manifests.get(ref, {})
        size = sum(int(file["bytes"]) for file in manifest.get("files", {}).values())
        seed = manifest.get("seed")
        cells = (name, ref, str(manifest.get("code", "")), "" if seed is None else str(seed), number(size) + "B" if size else "")
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", "digest of its files", "code that made it", "seed", "size"))
    return f'<section><h2>Data</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div></section>'


def _log(record: JobRecord, origin: Origin) -> str:
    return f"<section><h2>End of the log</h2><pre>{escape(origin.log)}</pre></section>" if origin.log and record.error else ""


def _summary(series: Mapping[str, Points]) -> str:
    if not series:
        return ""
    head = "".join(f'<th class="number">{name}</th>' for name in ("rows", "first", "last", "mean", "least", "most"))
    body = []
    for name in sorted(series):
        values = [value for _, value in series[name]]
        cells = [str(len(values)), *(number(x) for x in (values[0], values[-1], sum(values) / len(values), min(values), max(values)))]
        body.append(f"<tr><td>{escape(name)}</td>" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>")
    return f'<section><h2>All metrics</h2><div class="scroll"><table><tr><th>metric</th>{head}</tr>{"".join(body)}</table></div></section>'
