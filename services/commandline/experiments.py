"""``semantide experiment``: what the variants of a split were worth."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings

_MOST_DAYS = 20_000
_ESTIMATES = {"mean": "mean", "ips": "IPS", "snips": "SNIPS", "doubly_robust": "doubly robust"}


def experiment(
    days: Annotated[float, typer.Option(help="Requests of so many days up to now")] = 14.0,
    base: Annotated[str, typer.Option(help="The variant that others are compared with")] = "live",
    before_days: Annotated[int, typer.Option(help="Days before a person's first request whose events make estimates narrower")] = 28,
    as_json: AsJson = False,
) -> None:
    """Compare the variants of a split by the exposures and feedback that came back with request ids: rewards a request, 95 % intervals over people."""
    if not 0 < days <= _MOST_DAYS:
        raise ValueError(f"--days {days}: give a number of days above 0, up to {_MOST_DAYS}")
    since = int((time.time() - days * 86400) * 1000)
    found = Client(Settings()).get("/v1/experiments", since=since, base=base, before_days=before_days)
    if as_json:
        display.as_json(found)
        return
    rows = [[one["name"], f"{one['share']:.2%}", one["users"], one["requests"], one["exposures"], f"{one['drawn']:.1%}"] for one in found["variants"]]
    display.table(
        f"{found['requests']:,} requests of {found['users']:,} users", ["variant", "share", "users", "requests", "exposures", "drawn by chance"], rows
    )
    for reward in ("clicks", "orders"):
        shown = [[one["name"], label, *_figures(one["rewards"][reward][name])] for one in found["variants"] for name, label in _ESTIMATES.items()]
        display.table(f"{reward} a request", ["variant", "estimate", "value", "95 %", f"against {base}", "beyond noise"], shown)
    for warning in found["warnings"]:
        display.problems.print(f"note: {warning}", highlight=False, markup=False)


def _figures(found: dict[str, Any]) -> list[Any]:
    lift = found.get("lift")
    against = (
        ["", ""]
        if lift is None
        else [f"{_percent(lift['value'])} ({_percent(lift['low'])} to {_percent(lift['high'])})", "yes" if lift["beyond_noise"] else "no"]
    )
    return [_number(found["value"]), f"{_number(found['low'])} to {_number(found['high'])}", *against]


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:+.1%}"
