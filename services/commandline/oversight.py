"""``semantide audit``: what admins did."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings


def audit(
    limit: Annotated[int, typer.Option(help="How many, the newest first")] = 50,
    who: Annotated[str | None, typer.Option(help="Only those of the key with this name")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what admins did, from where, and what came of it."""
    entries = Client(Settings()).get("/v1/audit", limit=limit, who=who)
    if as_json:
        display.as_json(entries)
        return
    rows = [
        [
            datetime.fromtimestamp(each["time"] / 1000, UTC).isoformat(timespec="seconds"),
            each["who"],
            each["origin"],
            each["action"],
            each["outcome"],
            each["said"][:80],
        ]
        for each in entries
    ]
    display.table("What admins did, the newest first", ["when", "who", "from", "action", "outcome", "said"], rows)
