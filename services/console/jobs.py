"""Jobs: the list, one job live with its curves, log and actions, and several side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from nicegui import ui

from semantide.services.console.answers import Stack, all_of
from semantide.services.console.frame import card, live, note, permitted, picture, told
from semantide.services.console.tables import Cell, Table, table
from semantide.services.console.words import ago, figure, lasting, short
from semantide.shared.plots import Plot, number, plots_of, series_of
from semantide.shared.plots import figure as plotted

EVERY_SECONDS = 2.0
MOST_COMPARED = 6
_STATES = {"": "all states", "queued": "queued", "running": "running", "succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled"}


def progress(job: Mapping[str, Any]) -> str:
    """How far a job is, in a few words."""
    if job["state"] != "running":
        return ""
    part = f"{100 * job['done'] / job['total']:.0f} %" if job["total"] else ""
    return " ".join(word for word in (part, job["stage"]) if word)


def took(job: Mapping[str, Any], now: float) -> str:
    """How long it has run, or ran."""
    if not job["started"]:
        return "-"
    return lasting(((job["finished"] or now * 1000) - job["started"]) / 1000)


async def show_list(stack: Stack) -> None:
    """All jobs, newest first."""
    chosen: set[str] = set()
    state = ui.select(_STATES, value="", label="State").props("outlined dense")

    def compare() -> None:
        ui.navigate.to("/compare?" + urlencode({"jobs": ",".join(sorted(chosen))}))

    def choose(job: str, event: Any) -> None:
        (chosen.add if event.value else chosen.discard)(job)
        button.set_enabled(2 <= len(chosen) <= MOST_COMPARED)

    def cells(job: Mapping[str, Any], now: float) -> list[Cell]:
        ident = job["id"]
        box = partial(_box, ident, ident in chosen, partial(choose, ident))
        return [
            box,
            partial(ui.link, ident, f"/jobs/{quote(ident)}"),
            job["spec"]["recipe"] or "-",
            job["state"],
            progress(job),
            took(job, now),
            ago(job["created"], now),
            (job["error"] or "")[:120],
        ]

    with card():
        button = ui.button("Compare the chosen ones", on_click=compare).props("no-caps outline")
        button.set_enabled(False)
        rows = Table("Jobs, newest first", ["", "job", "recipe", "state", "progress", "took", "begun", "error"])

    async def refresh() -> None:
        jobs, now = await stack.get("/v1/jobs", state=state.value or None, limit=60), time.time()
        rows.show([(job["id"], cells(job, now)) for job in jobs])

    timer = await live(refresh, EVERY_SECONDS)
    state.on_value_change(lambda: timer.callback())


def _box(job: str, on: bool, choose: Any) -> None:
    ui.checkbox(value=on, on_change=choose).props(f'dense aria-label="Choose {escape(job)} to compare"')


def curves(rows: Sequence[Mapping[str, float]]) -> str:
    """The live metrics as plots."""
    series = series_of(rows)
    drawn = [plotted(plot, {name: series[name] for name in plot.names if name in series}) for plot in plots_of(name for name in series if name != "epoch")]
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""


def latest(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, list[Cell]]]:
    """The last value of every metric."""
    return [(name, [name, number(points[-1][1]), figure(int(points[-1][0]))]) for name, points in sorted(series_of(rows).items())]


async def show_one(stack: Stack, ident: str) -> None:
    """One job: what it is, how it goes, and what may be done with it."""
    path = f"/v1/jobs/{quote(ident, safe='')}"
    record = await stack.get(path)
    rows: list[dict[str, float]] = []

    async def cancel() -> str:
        await stack.send("POST", f"{path}/cancel")
        await refresh()
        return "It was asked to stop; its checkpoint stays."

    async def resume() -> str:
        await stack.send("POST", f"{path}/resume")
        await refresh()
        return "It goes on from its last checkpoint."

    with card():
        facts = Table(f"Job {ident}", ["what", "value"])
        error = ui.label("").classes("bad").props('role="status"')
        with ui.element("div").classes("line"):
            stop = ui.button("Cancel", on_click=lambda: told(cancel)).props("no-caps outline color=negative")
            go = ui.button("Resume", on_click=lambda: told(resume)).props("no-caps outline")
            ui.link("Report", f"/reports/{quote(ident)}", new_tab=True)
            ui.link("Compare with others", "/compare?" + urlencode({"jobs": ident}))
        may = permitted(stack, "POST", f"{path}/cancel", stop, go)
    with card("Curves"):
        waiting = note("No metrics yet: they come after the first steps.")
        drawn = picture("")
    with ui.element("div").classes("grid"):
        with card("Now"):
            values = Table("The last value of each metric", ["metric", "value", "step"], numbers=["value", "step"])
        with card("End of the log"):
            log = (
                ui.label("")
                .classes("log")
                .style("white-space:pre-wrap;overflow-wrap:anywhere;font:12px ui-monospace,monospace;max-height:28rem;overflow:auto")
                .props('tabindex="0"')
            )
            log_shown = permitted(stack, "GET", f"{path}/log")
            log.set_visibility(log_shown)

    async def refresh() -> None:
        nonlocal record
        record, now = await stack.get(path), time.time()
        rows.extend(await stack.get(f"{path}/metrics", after=int(rows[-1]["step"]) if rows else -1))
        facts.show([(name, [name, text]) for name, text in _facts(record, now)])
        error.set_text(record["error"] or "")
        stop.set_enabled(may and not record["finished"] and not record["cancel_requested"])
        go.set_enabled(may and record["state"] in ("failed", "cancelled"))
        waiting.set_visibility(not rows)
        drawn.set_content(curves(rows))
        values.show(latest(rows))
        if log_shown:
            log.set_text((await stack.get(f"{path}/log"))["log"][-20_000:] or "Nothing was said yet.")

    await live(refresh, EVERY_SECONDS)


def _facts(job: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    spec = job["spec"]
    facts = [
        ("state", job["state"]),
        ("kind", spec["kind"]),
        ("recipe", spec["recipe"] or "-"),
        ("progress", progress(job) or "-"),
        ("took", took(job, now)),
        ("attempts", str(job["attempt"])),
    ]
    facts += [(f"input {name}", short(ref)) for name, ref in spec["inputs"].items()] + [(f"made {name}", short(ref)) for name, ref in job["artifacts"].items()]
    facts += [(f"config {name}", str(value)) for name, value in spec["config"].items()]
    facts += [(f"result {name}", figure(value)) for name, value in job["result"].items() if isinstance(value, int | float | str)]
    return [*facts, ("seed", str(spec["seed"])), *([("NPUJob", job["npujob"])] if job["npujob"] else [])]


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """One plot for each metric, a line for each run."""
    series = {name: series_of(rows) for name, rows in runs.items()}
    metrics = sorted(
        {metric for own in series.values() for metric in own} - {"epoch"}, key=lambda metric: (metric != "loss", not metric.startswith("valid"), metric)
    )
    drawn = [plotted(Plot(metric.replace("_", " "), tuple(runs)), {name: own[metric] for name, own in series.items() if metric in own}) for metric in metrics]
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""


def differences(records: Mapping[str, Mapping[str, Any]]) -> list[list[Cell]]:
    """The facts in which runs are not alike."""
    facts: dict[str, dict[str, str]] = {}
    for name, record in records.items():
        spec = record["spec"]
        own = {"state": record["state"], "recipe": spec["recipe"] or "-", "seed": str(spec["seed"])}
        own |= {f"config {key}": str(value) for key, value in spec["config"].items()} | {f"input {key}": short(ref) for key, ref in spec["inputs"].items()}
        for key, value in own.items():
            facts.setdefault(key, {})[name] = value
    return [[key, *(values.get(name, "-") for name in records)] for key, values in facts.items() if len({values.get(name) for name in records}) > 1]


async def show_compared(stack: Stack, asked: str) -> None:
    """Several runs side by side."""
    others = await stack.get("/v1/jobs", limit=100)
    wanted = [name for name in dict.fromkeys(asked.split(",")) if name][:MOST_COMPARED]
    options = {
        job["id"]: f"{job['id']} ({job['spec']['recipe'] or job['spec']['kind']}, {job['state']})"
        for job in others
        if job["spec"]["kind"] in ("train", "align", "evaluate")
    }
    options |= {name: name for name in wanted if name not in options}

    async def draw() -> None:
        names = [str(name) for name in choice.value][:MOST_COMPARED]
        records = await all_of(stack, "/v1/jobs/{}", names)
        runs = await all_of(stack, "/v1/jobs/{}/metrics", list(records))
        body.clear()
        with body:
            if not records:
                note("Choose at least one run.")
                return
            table("In what they differ", ["", *records], differences(records), empty="They have the same recipe, configuration, inputs and seed.")
            picture(compared(runs) or '<p class="note">None of them has metrics.</p>')

    with card():
        choice = ui.select(options, value=wanted, multiple=True, label="Runs", on_change=draw).props("outlined use-chips").style("width:100%")
        note(f"Up to {MOST_COMPARED} of them.")
    with card("Runs"):
        body = ui.element("div")
    await draw()
