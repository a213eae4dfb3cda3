"""``semantide score``: how probable given items are for a user or a history."""

from __future__ import annotations

from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings


def score(
    items: Annotated[list[str], typer.Argument(help="Items to be scored")],
    user: Annotated[str | None, typer.Option(help="A user id")] = None,
    history: Annotated[list[str] | None, typer.Option("--item", help="An item of an explicit history, oldest first; repeat it")] = None,
    conditional_scores: Annotated[
        bool, typer.Option("--conditional-scores", help="Probabilities among the catalog's codes only, so that all items' sum to 1")
    ] = False,
    split_by: Annotated[str | None, typer.Option(help="With --item: whom the split into variants goes by")] = None,
    variant: Annotated[str | None, typer.Option(help="Ask this variant; `live` is the live model")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask the live model for the log-probabilities of given items."""
    if user is None and not history:
        raise ValueError("say for whom: --user ID, or a history with --item ID (repeated)")
    optional = {"user": user, "history": history or None, "conditional_scores": conditional_scores or None, "split_by": split_by, "variant": variant}
    answer = Client(Settings()).post("/v1/scores", {"items": items} | {name: value for name, value in optional.items() if value is not None})
    if as_json:
        display.as_json(answer)
        return
    rows = [
        [each["item"], each["score"], " ".join(map(str, each["codes"])), " ".join(f"{value:.2f}" for value in each["level_log_probabilities"])]
        for each in answer["items"]
    ]
    side = f", variant {answer['variant']}" if answer.get("variant") else ""
    display.table(f"for {user or 'this history'}{side}", ["item", "score", "codes", "log-probability of each"], rows)
