"""``semantide users``: what concerns a single person."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson, Wait, finish_job
from semantide.shared.config import Settings

app = typer.Typer(no_args_is_help=True, help="Single users: forget, export, see who was forgotten.")


@app.command("delete")
def delete(
    user: str,
    accept_later: Annotated[bool, typer.Option("--accept-later", help="Take events again that happen from now on; left out, none is taken ever")] = False,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Forget a user: events, histories, rankings, uploads, data sets with them and what was drawn from these. Models that learned from them are named."""
    client = Client(Settings())
    deletion = client.forget_user(user, accept="later" if accept_later else "never")
    assert deletion.job is not None
    record = finish_job(client, client.job(deletion.job), wait=wait, as_json=as_json)
    if wait and not as_json:
        found = record.result
        display.console.print(f"{found.get('events', 0):,} events; removed: {', '.join(found.get('removed', [])) or 'no artifacts'}", highlight=False)
        if found.get("saw"):
            display.problems.print(
                f"made of what was removed: {', '.join(found['saw'])}; where that matters train anew, from a new `semantide dataset`", highlight=False
            )


@app.command("export")
def export(user: str, output: Annotated[Path, typer.Option("--output", "-o", help="File to write, `-` for the standard output")] = Path("-")) -> None:
    """Write all that is stored of a user as JSON."""
    text = json.dumps(Client(Settings()).export_user(user), indent=1, ensure_ascii=False) + "\n"
    if output == Path("-"):
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
        display.console.print(f"wrote {output}", highlight=False)


@app.command("deletions")
def deletions(as_json: AsJson = False) -> None:
    """List who was forgotten, by digests that tell nobody who it was, and what had learned from them."""
    found = Client(Settings()).get("/v1/deletions")
    if as_json:
        display.as_json(found)
        return

    def moment(milliseconds: int | None) -> str:
        return "not yet" if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")

    rows = [[each["digest"], moment(each["since"]), each["accept"], moment(each["swept"]), " ".join(each["found"].get("saw", []))] for each in found]
    display.table("Forgotten users", ["digest", "since", "accepted again", "swept", "learned from them"], rows)
