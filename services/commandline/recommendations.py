"""``semantide recommend``: asks the live model, or a variant, and shows what came back."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings


def recommend(
    user: Annotated[str | None, typer.Option(help="A user id")] = None,
    history: Annotated[list[str] | None, typer.Option("--item", help="An item of an explicit history, oldest first; repeat it")] = None,
    n: Annotated[int | None, typer.Option(help="How many items; default 10, or as many as the page before had")] = None,
    beam_width: int | None = None,
    exclude_seen: Annotated[bool, typer.Option("--exclude-seen", help="Leave out what the user has acted upon")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="An item that must not appear; repeat it")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only items of any of these categories; repeat it")] = None,
    every_category: Annotated[list[str] | None, typer.Option(help="Only items of all of these categories; repeat it")] = None,
    variety: Annotated[float, typer.Option(help="For a user without history: draw among the beams at this temperature; 0 takes the best")] = 0.0,
    conditional_scores: Annotated[
        bool, typer.Option("--conditional-scores", help="Probabilities among the catalog's codes only, so that all items' sum to 1")
    ] = False,
    depth: Annotated[int | None, typer.Option(help="Rank so many items and show them n at a time; the answer names the cursor of the next page")] = None,
    cursor: Annotated[str | None, typer.Option(help="Show the next page of a ranking; at most --n goes with it")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show codes, their log-probabilities and the nearest items of the history")] = False,
    explore: Annotated[bool, typer.Option(help="Whether new items may take the places that the deployment gives them")] = True,
    split_by: Annotated[str | None, typer.Option(help="With --item: whom the split into variants goes by")] = None,
    variant: Annotated[str | None, typer.Option(help="Ask this variant; `live` is the live model")] = None,
    source: Annotated[str | None, typer.Option(help="Who ranks: generator, retriever, both (lists joined), auto (retriever where no generator can)")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask for recommendations."""
    if user is None and not history and cursor is None:
        raise ValueError("say for whom: --user ID, or a history with --item ID (repeated), or name the --cursor of an answer")
    optional: dict[str, Any] = {"user": user, "history": history or None, "n": n, "beam_width": beam_width, "exclude_ids": exclude, "variety": variety or None}
    optional |= {
        "categories_any": category,
        "categories_all": every_category,
        "depth": depth,
        "cursor": cursor,
        "split_by": split_by,
        "variant": variant,
        "source": source,
    }
    optional |= {"exclude_seen": exclude_seen or None, "explain": explain or None, "explore": None if explore else False}
    optional |= {"conditional_scores": conditional_scores or None}
    answer = Client(Settings()).post("/v1/recommendations", {name: value for name, value in optional.items() if value is not None})
    if as_json:
        display.as_json(answer)
        return
    title = "next page" if cursor else f"for {user or 'this history'}"
    headings = ["item", "score", "title", *(["codes", "log-probability of each", "nearest in the history"] if explain else [])]
    display.table(title + (f", variant {answer['variant']}" if answer.get("variant") else ""), headings, [_row(item, explain) for item in answer["items"]])
    if answer.get("fallback"):
        display.console.print(f"the retriever ranked: {answer['fallback']}", highlight=False, markup=False)
    if answer.get("short_reason"):
        display.console.print(f"fewer than asked for: {answer['short_reason']}", highlight=False, markup=False)
    if answer.get("cursor"):
        display.console.print(f"next page: semantide recommend --cursor {answer['cursor']}", highlight=False, markup=False)


def _row(item: dict[str, Any], explain: bool) -> list[Any]:
    row = [item["item"], item["score"], (item.get("title") or "") + (" (new)" if item["explored"] else "")]
    if explain:
        said = item["explanation"] or {"level_log_probabilities": [], "nearest_history": []}  # the retriever has no codes to explain
        row.append(" ".join(map(str, item["codes"])))
        row.append(" ".join(f"{value:.2f}" for value in said["level_log_probabilities"]))
        row.append(", ".join(f"{near['title'] or near['item']} ({near['similarity']:.2f})" for near in said["nearest_history"]))
    return row
