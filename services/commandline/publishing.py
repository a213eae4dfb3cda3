"""``semantide promote`` and ``semantide decisions``: what goes live, and why."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings
from semantide.shared.contracts import Promotion
from semantide.shared.errors import TransientError

_PATIENCE_SECONDS = 60.0

IfNotWorse = Annotated[
    bool,
    typer.Option("--if-not-worse", help="Make it live only once a paired test on held-out users shows that it loses no more than SEMANTIDE_PROMOTION_BOUNDS"),
]


def promotion(promote: bool, if_not_worse: bool) -> Promotion | None:
    """What a job is told of going live; None where nothing was said."""
    return "if-not-worse" if if_not_worse else promote or None


def promote(model: str | None = None, catalog: str | None = None, if_not_worse: IfNotWorse = False, as_json: AsJson = False) -> None:
    """Make a model live; requests in flight end on the old one. A retriever becomes the second source of candidates beside it."""
    client = Client(Settings())
    # Without a catalog the stack takes the newest extension of the one the model was trained for.
    if model:
        answer = client.promote(model, catalog, if_not_worse=if_not_worse)
    else:
        answer = client.promote(client.latest_generator(), catalog, if_not_worse=if_not_worse, patience_seconds=30)
    if answer.get("judging"):
        _judged(client, answer["judging"], as_json)
        return
    display.as_json(answer) if as_json else display.console.print(
        f"live: {answer['model'] or 'no generator'} with {answer['catalog'] or 'no catalog'}; retriever: {answer['retriever'] or 'none'}", highlight=False
    )


def decisions(as_json: AsJson = False) -> None:
    """Show what went live and what was held back, when and why, with the figures of the test that decided."""
    found = Client(Settings()).get("/v1/serving/decisions")["decisions"]
    if as_json:
        display.as_json(found)
        return
    rows = [
        [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["time"] / 1000)), one["action"], one["model"][:26], one["reason"], _brief(one["figures"])]
        for one in found
    ]
    display.table("decisions, oldest first (UTC)", ["when", "what", "model", "why", "figures (live to candidate, lower bound of the change)"], rows)


def _judged(client: Client, job_id: str, as_json: bool) -> None:
    """Follow the evaluation and show what serving made of it; exit status 1 where the candidate was held back."""
    record = display.follow(client, client.job(job_id))
    if record.state != "succeeded":
        display.problems.print(
            f"{record.id} {record.state}: {record.error}\nthe live model stays; the test can be asked for again", highlight=False, markup=False
        )
        raise typer.Exit(1)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (found := [one for one in client.get("/v1/serving/decisions")["decisions"] if one["evaluation"] == job_id]):
        if any(one["judging"] not in ("", job_id) for one in client.get("/v1/serving/candidates")["candidates"] if one["model"] == record.spec.inputs["model"]):
            raise TransientError("another model went live meanwhile and the candidate is compared with that one: see `semantide decisions`")
        if time.monotonic() > deadline:
            raise TransientError(f"serving has not taken the verdict of {job_id} within {_PATIENCE_SECONDS:.0f} s: does its worker run? (`semantide status`)")
        time.sleep(0.2)
    decision = found[0]
    if as_json:
        display.as_json(decision)
    else:
        display.judgement(decision)
        display.console.print(
            f"{'live' if decision['action'] == 'promote' else 'held back'}: {decision['model']}; {decision['reason']}", highlight=False, markup=False
        )
    if decision["action"] != "promote":
        raise typer.Exit(1)


def _brief(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {own['live']:.4f} to {own['candidate']:.4f} ({own['low']:+.4f})" for name, own in figures.items())
