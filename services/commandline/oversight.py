"""``semantide audit`` and ``semantide retention``: what admins did, and what is kept no longer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson, Wait, run_kind
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


def retention(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be removed, and remove nothing")] = False,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Remove what the settings keep no longer: artifacts that nobody needs, old jobs and uploads. The stack does it by itself every SEMANTIDE_RETENTION_HOURS."""
    record = run_kind(Client(Settings()), "retention", {}, wait=wait, as_json=as_json, dry_run=dry_run)
    if wait and not as_json:
        found = record.result
        begin = "would be removed" if dry_run else "removed"
        display.console.print(
            f"{begin}: {found['num_artifacts']:,} artifacts of {found['artifact_bytes']:,} bytes, {found['num_jobs']:,} jobs, {found['num_uploads']:,} uploads",
            highlight=False,
        )
        for name in (*found["artifacts"], *found["jobs"], *found["uploads"]):
            display.console.print(f"  {name}", highlight=False, soft_wrap=True)
