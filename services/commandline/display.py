"""What the command line shows: progress of jobs, tables, errors."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from semantide.services.commandline.client import Client
from semantide.shared.contracts import ENDED, JobRecord
from semantide.shared.errors import TransientError

# What goes into a file or a pipe must not be cut to a terminal's width.
_WIDE = 200
console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE)
problems = Console(stderr=True, soft_wrap=True, width=None if sys.stderr.isatty() else _WIDE)

_POLL_SECONDS = 0.3
_PATIENCE_SECONDS = 60.0


def follow(client: Client, record: JobRecord) -> JobRecord:
    """Show a job's progress until it ends; Ctrl-C leaves it running."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
        console=problems,
        disable=not sys.stderr.isatty(),
    )
    silent_since: float | None = None
    step = -1
    try:
        with bar:
            task = bar.add_task(record.spec.kind, total=None, unit="", metrics="")
            while record.state not in ENDED:
                time.sleep(_POLL_SECONDS)
                try:
                    record = client.job(record.id)
                    rows = client.get(f"/v1/jobs/{record.id}/metrics", after=step) if not bar.disable else []
                    silent_since = None
                except TransientError:
                    silent_since = silent_since or time.monotonic()
                    if time.monotonic() - silent_since > _PATIENCE_SECONDS:
                        raise
                    continue
                if rows:
                    step = int(rows[-1]["step"])
                    bar.update(task, metrics=" ".join(f"{name} {value:.4g}" for name, value in rows[-1].items() if name != "step"))
                bar.update(task, completed=record.done, total=record.total or None, unit=record.unit, description=record.stage or record.spec.kind)
    except KeyboardInterrupt:
        problems.print(f"\nthe job goes on: `semantide jobs show {record.id}`, `semantide jobs cancel {record.id}`")
        raise
    return record


def seconds(record: JobRecord) -> float:
    """How long a job ran, seconds."""
    return ((record.finished or 0) - (record.started or record.created)) / 1000


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print one table."""
    grid = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        number = position > 0 and bool(rows) and isinstance(rows[0][position], (int, float))
        grid.add_column(column, justify="right" if number else "left", no_wrap=number)
    for row in rows:
        grid.add_row(*[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row])
    console.print(grid)


def rejections(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print why rows were refused."""
    for row in rows:
        where = f"{row['file']} row" if row.get("file") else "row"
        problems.print(
            f"{where} {row['row']}, field {row['field']}, value {row['value']!r}: {row.get('reason', '')}; {row.get('remedy', '')}",
            highlight=False,
            markup=False,
        )


def as_json(value: Any) -> None:
    """Print one JSON document to standard output; JSON has no infinite numbers, which become null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluation(result: Mapping[str, Any]) -> None:
    """Print the tables of an evaluation job."""
    if "logged" in result:
        logged(result)
        return
    rows = result.get("rows", [])
    measured = list(rows[0]["metrics"]) if rows else []
    shown = ("recall@10", "ndcg@10", "mrr@10", "recall@50", "ndcg@50", "coverage@10")
    names = [name for name in shown if name in measured] or measured
    table(
        f"{result.get('part', 'test')} split, {result.get('users', '?')} users, full ranking; filter: what a user has seen is left out",
        ["model", "filter", *names],
        [[row["model"], "on" if row["exclude_seen"] else "off", *[row["metrics"][name] for name in names]] for row in rows],
    )
    if "judgement" in result:
        judgement(result["judgement"])


def logged(result: Mapping[str, Any]) -> None:
    """Print what models would have earned in a log."""
    estimates = result["estimates"]
    for reward in ("clicks", "orders"):
        rows = []
        for row in estimates:
            for name, title in (("ips", "IPS"), ("snips", "SNIPS"), ("doubly_robust", "doubly robust")):
                one = row[reward][name]
                rows.append(
                    [
                        row["model"],
                        "on" if row["exclude_seen"] else "off",
                        title,
                        *_bounded(one, ""),
                        *_bounded(one["lift"], "%"),
                        "yes" if one["lift"]["beyond_noise"] else "no",
                    ]
                )
        earned = _bounded(estimates[0][reward]["log"], "")
        first = estimates[0]
        title = (
            f"{reward} a place; the log earned {earned[0]} ({earned[1]}) at {first['places']:,} places of {first['pages']:,} pages of {first['users']:,} people"
        )
        table(title, ["model", "filter", "estimate", "value", "95 %", "against the log", "95 %", "beyond noise"], rows)
    for row in estimates:
        weight = row["mean_weight"]
        seen = "on" if row["exclude_seen"] else "off"
        console.print(
            f"{row['model']}, filter {seen}: chose as the log did at {row['agrees']:.1%} of the places, worth {row['effective']:.0f} decisions of its own; mean weight {_bounded(weight, '')[0]}"
            f" ({_bounded(weight, '')[1]})",
            highlight=False,
        )
        if not row["covered"]:
            text = "gave only a part of its choices a chance: IPS counts the rest as nothing, SNIPS is about that part alone, and nothing is said to be beyond noise"
            problems.print(f"note: of {row['model']}, filter {seen}, the log {text}", highlight=False)
        elif not row["tells"]:
            problems.print(f"note: of {row['model']}, filter {seen}, the log has too few choices to say what is beyond noise", highlight=False)


def _bounded(found: Mapping[str, float | None], unit: str) -> tuple[str, str]:
    """A figure and its interval."""
    value, low, high = (None if found[name] is None else f"{found[name]:+.1%}" if unit else f"{found[name]:.4f}" for name in ("value", "low", "high"))
    return value or "?", "too few to tell" if low is None or high is None else f"{low} to {high}"


def alignment(result: Mapping[str, Any]) -> None:
    """Print what an alignment job changed."""
    if result["stopped"]:
        problems.print(f"the guard stopped it at {result['stopped']}", highlight=False, markup=False)
    kept = (
        f"the weights of step {result['kept_step']} of {result['steps']} are kept"
        if result["kept_step"]
        else "nothing was better than the start, which stays as it is"
    )
    console.print(f"{kept}; {result['skipped_groups']} groups had rewards that do not differ", highlight=False)
    rows = []
    for name, value in result["test_before"].items():
        rows.append([name, result["valid_before"].get(name, 0.0), result["valid_after"].get(name, 0.0), value, result["test_after"].get(name, 0.0)])
    filtered = "left out" if result["exclude_seen"] else "kept"
    table(
        f"full ranking, {result['beam_width']} beams, items that a user has seen are {filtered}",
        ["held out", "validation before", "after", "test before", "after"],
        rows,
    )
    first, last = (result["policy"].get(name, {}) for name in ("first", "last"))
    table(
        "the policy in training, by its own rollouts",
        ["rollouts", "first step", "last step"],
        [[name, first.get(name, 0.0), value] for name, value in last.items()],
    )
    for warning in result["warnings"]:
        problems.print(f"note: {warning}", highlight=False, markup=False)


def judgement(found: Mapping[str, Any]) -> None:
    """Print what came out of a paired test of a candidate against another model."""
    rows = [[name, own["live"], own["candidate"], own["difference"], own["low"], own["bound"]] for name, own in found["figures"].items()]
    table(f"{found['cases']} held-out users", ["metric", "live", "candidate", "change", "lower bound", "allowed"], rows)
    if "not_worse" in found:
        console.print(
            "; ".join(filter(None, ["not worse" if found["not_worse"] else "not shown to be as good", found["reason"]])), highlight=False, markup=False
        )
