"""Overview: the loop with live counts, what is live, what was made last, and what somebody should look at."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from nicegui import ui

from semantide.services.console.alerts import alerts_of
from semantide.services.console.answers import Stack, barred, known
from semantide.services.console.frame import card, live, permitted, picture
from semantide.services.console.loop import loop_picture, stations
from semantide.services.console.measures import Look
from semantide.services.console.tables import Table
from semantide.services.console.words import ago, count, figure, lasting, share, short
from semantide.shared.contracts import JOB_ROOMS

EVERY_SECONDS = 3.0
_KINDS_SHOWN = ("datasets", "catalogs", "beams", "models", "rewards", "evaluations")
_NAMES = ("stats", "queues", "jobs", "live", "variants", "artifacts", "metrics")
_PATHS = ("/v1/interactions/stats", "/v1/queues", "/v1/jobs", "/v1/serving/live", "/v1/serving/variants", "/v1/artifacts", "/metrics")


async def facts_of(stack: Stack) -> dict[str, Any]:
    """Everything that the page shows; a room that does not answer has None."""
    return dict(zip(_NAMES, await asyncio.gather(*(known(stack, path) for path in _PATHS)), strict=True))


def lines(facts: Mapping[str, Any], look: Look, before: Look | None) -> dict[str, list[str]]:
    """What is written into each room's box."""
    stats, made = facts["stats"] or {}, Counter(ref.partition("/")[0] for ref in facts["artifacts"] or [])
    answered = look.rate(before, "semantide_recommendations_total") if before else None
    slow = look.quantile(before, "semantide_serving_stage_seconds", 0.99, stage="total") if before else None
    now = facts["live"] or {}
    return {
        "ingestion": [f"{count(stats.get('interactions'))} interactions", f"{count(stats.get('items'))} items", f"{count(made['datasets'])} data sets"],
        "tokenization": [f"{count(made['catalogs'])} catalogs"],
        "negatives": [f"{count(made['beams'])} beam lists"],
        "training": [f"{count(made['models'])} models", f"{count(made['evaluations'])} evaluations"],
        "reward": [f"{count(made['rewards'])} reward models"],
        "serving": [
            f"live {short(now.get('loaded_model'))}",
            f"{count(answered)} answers/s" if answered is not None else "answers: counting",
            f"P99 {lasting(slow)}" if slow is not None else "none asked just now",
        ],
    }


def last_made(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest artifact of each kind, with the job that made it."""
    found: dict[str, dict[str, Any]] = {}
    for job in sorted((job for job in jobs if job["finished"]), key=lambda job: -job["finished"]):
        for ref in job["artifacts"].values():
            found.setdefault(ref.partition("/")[0], {"ref": ref, "job": job["id"], "finished": job["finished"]})
    return [found[kind] for kind in sorted(found, key=lambda kind: _KINDS_SHOWN.index(kind) if kind in _KINDS_SHOWN else len(_KINDS_SHOWN))]


async def show(stack: Stack) -> None:
    """Build the page and keep it up to date."""
    wide, narrow = picture("").classes("card wide"), picture("").classes("card narrow")
    with card("To look at"):
        hidden = barred(stack, "GET", "/v1/queues")
        all_well = "Nothing: all is well." if not hidden else "Nothing, of what this key shows."
        alerts = Table("Alerts", ["severity", "what", "what to do", "rule"], empty=all_well)
    with ui.element("div").classes("grid"):
        with card("Serving"):
            sides = Table("Who answers whom", ["side", "model", "share of users", "loaded"], numbers=["share of users"], empty="No model is live yet.")
            stages = Table(
                "Where recommendations spend their time, milliseconds since the last look",
                ["stage", "half within", "99 of 100 within"],
                numbers=["half within", "99 of 100 within"],
            )
        with card("Queues"):
            if permitted(stack, "GET", "/v1/queues"):
                queues = Table("Messages, by queue", ["queue", "waiting", "parked"], numbers=["waiting", "parked"], empty="All queues are empty.")
    with card("Made last"):
        artifacts = Table("Newest artifact of each kind", ["artifact", "job", "when"])
    before: Look | None = None

    async def refresh() -> None:
        nonlocal before
        facts = await facts_of(stack)
        jobs, depths = facts["jobs"] or [], (facts["queues"] or {}).get("depths")
        look = Look.of(facts["metrics"] or "", time.monotonic())
        rooms = stations(lines(facts, look, before), depths, [JOB_ROOMS[job["spec"]["kind"]] for job in jobs if not job["finished"]])
        wide.set_content(loop_picture(rooms, 3))
        narrow.set_content(loop_picture(rooms, 2))
        now = time.time()
        waiting = int((facts["stats"] or {}).get("waiting_batches", 0))
        found = alerts_of(facts["queues"] or {}, jobs, facts["live"], facts["variants"], waiting, now * 1000)
        alerts.show([(alert.name + alert.said, ["critical" if alert.critical else "warning", alert.said, alert.remedy, alert.name]) for alert in found])
        split = (facts["variants"] or {}).get("variants", [])
        sides.show(
            [
                (side["name"], [side["name"], short(side["model"]), share(side["share"]), "yes" if side["loaded"] else side["error"] or "not yet"])
                for side in split
            ]
        )
        stages.show([(name, row) for name, row in _stages(look, before)])
        if depths is not None:
            parked = facts["queues"]["parked"]
            busy = sorted({name for name, depth in [*depths.items(), *parked.items()] if depth})
            queues.show([(name, [name.removeprefix("semantide."), count(depths.get(name, 0)), count(parked.get(name, 0))]) for name in busy])
        artifacts.show([(row["ref"], [_ref(row["ref"]), _job(row["job"]), ago(row["finished"], now)]) for row in last_made(jobs)])
        before = look

    await live(refresh, EVERY_SECONDS)


def _ref(ref: str) -> Any:
    return lambda: ui.label(short(ref)).classes("mono").props(f'title="{ref}"')


def _job(job: str) -> Any:
    return lambda: ui.link(job, f"/jobs/{quote(job)}")


def _stages(look: Look, before: Look | None) -> list[tuple[str, list[str]]]:
    names = {dict(labels).get("stage", "") for name, labels in look.values if name == "semantide_serving_stage_seconds_count"}
    rows = []
    for name in sorted(names):
        quantiles = [look.quantile(before, "semantide_serving_stage_seconds", part, stage=name) if before else None for part in (0.5, 0.99)]
        if quantiles[0] is not None:
            rows.append((name, [name, *(figure(1000 * (value or 0.0)) for value in quantiles)]))
    return rows
