"""Try it: recommendations for a user or a typed history, explained, by one model or by two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import exp
from typing import Any
from urllib.parse import quote

from nicegui import ui

from semantide.services.console.answers import Refused, Stack, known
from semantide.services.console.frame import card, heading, note, picture, refusal
from semantide.services.console.tables import Cell, table
from semantide.services.console.words import count, figure, share, short
from semantide.shared.plots import COLOURS

_SOURCES = {"": "as deployed", "auto": "auto", "generator": "generator", "retriever": "retriever", "both": "both"}
_HISTORY_SHOWN = 30


def body_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request that a filled form asks for; what was left empty is left out.

    Raises: ValueError.
    """
    user, history = str(fields["user"] or "").strip(), words(fields["history"])
    if bool(user) == bool(history):
        raise ValueError("Give a user or a history of items, and not both.")
    body: dict[str, Any] = {"user": user} if user else {"history": history}
    body |= {"n": int(fields["n"] or 10), "explain": True, "exclude_seen": bool(fields["exclude_seen"]), "explore": False}
    if fields["width"]:
        body["beam_width"] = int(fields["width"])
    for name in ("categories_any", "categories_all", "exclude_ids"):
        if found := words(fields[name]):
            body[name] = found
    if fields["source"]:
        body["source"] = fields["source"]
    return body


def words(text: Any) -> list[str]:
    """What a field lists, separated by commas or lines."""
    return [word.strip() for word in str(text or "").replace("\n", ",").split(",") if word.strip()]


def path_picture(codes: Sequence[int], log_probabilities: Sequence[float]) -> str:
    """An item's codes, each with its probability given those before it."""
    parts = []
    for level, code in enumerate(codes):
        known_share = level < len(log_probabilities)
        probability = exp(log_probabilities[level]) if known_share else 0.0
        x, colour = level * 86, COLOURS[level % len(COLOURS)]
        bar = f'<rect x="{x}" y="25" width="{76 * probability:.1f}" height="5" fill="{colour}"/>' if known_share else ""
        said = f"{100 * probability:.1f} %" if known_share else ""
        parts.append(
            f'<text x="{x}" y="18" font-size="14" font-weight="600">{code}</text><text x="{x + 76}" y="18" font-size="11" text-anchor="end" style="fill:var(--soft)">{said}</text>'
            f'<rect x="{x}" y="25" width="76" height="5" fill="var(--line)"/>{bar}'
        )
    width = max(86 * len(codes), 1)
    label = " then ".join(str(code) for code in codes)
    return f'<svg viewBox="0 0 {width} 32" style="width:{width}px;max-width:none" role="img" aria-label="{escape(f"codes {label}")}">{"".join(parts)}</svg>'


def times_picture(timing: Mapping[str, Any]) -> str:
    """Where the milliseconds of a request went, stage after stage."""
    stages = {name: value for name, value in timing["stages_ms"].items() if value > 0} or {"queue": timing["queue_ms"], "search": timing["search_ms"]}
    total = max(timing["total_ms"], sum(stages.values()), 1e-9)
    stages = {**stages, "the rest": max(0.0, total - sum(stages.values()))}
    bars, keys, x = [], [], 0.0
    for place, (name, value) in enumerate(stages.items()):
        colour = COLOURS[place % len(COLOURS)]
        bars.append(
            f'<rect x="{x:.2f}" y="0" width="{600 * value / total:.2f}" height="18" fill="{colour}"><title>{escape(name)}: {value:.2f} ms</title></rect>'
        )
        keys.append(f'<span class="key" style="background:{colour}"></span>{escape(name)} {value:.2f}')
        x += 600 * value / total
    svg = f'<svg viewBox="0 0 600 18" preserveAspectRatio="none" style="height:18px" role="img" aria-label="Time by stage">{"".join(bars)}</svg>'
    return f'{svg}<p class="note">{timing["total_ms"]:.1f} ms in all: {"".join(keys)} ms</p>'


def facts(answer: Mapping[str, Any]) -> str:
    """How an answer was found, in a sentence."""
    said = [f"{answer['source']} {short(answer['model'])}"]
    if answer["variant"]:
        said.append(f"variant {answer['variant']}" + (f" ({share(answer['share'])} of users)" if answer["share"] is not None else ""))
    said.append(f"continues {count(answer['history_items'])} items" if answer["based_on"] == "history" else "without a history")
    if answer["unknown_history_items"]:
        said.append(f"{answer['unknown_history_items']} unknown items skipped")
    if answer["beam_width"]:
        narrowed = f" of {answer['requested_beam_width']} asked for" if answer["narrowed"] else ""
        said.append(f"{answer['beam_width']} beams{narrowed}")
    said.append("exact" if answer["exact"] else "best found")
    return ", ".join(said) + "."


def rows_of(answer: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[list[Cell]]:
    """The items of an answer; with another answer, where each stands there."""
    places = {item["item"]: place for place, item in enumerate(other["items"], 1)} if other else {}
    return [_row(place, item, places.get(item["item"]), other is not None) for place, item in enumerate(answer["items"], 1)]


def _row(place: int, item: Mapping[str, Any], there: int | None, beside: bool) -> list[Cell]:
    explained = item["explanation"] or {"level_log_probabilities": [], "nearest_history": []}
    near = [f"{one['title'] or one['item']} ({one['similarity']:.2f})" for one in explained["nearest_history"]]
    moved = "-" if there is None else f"{there}" + (f" ({there - place:+d})" if there != place else "")
    title: Cell = lambda: _title(item)  # noqa: E731
    path: Cell = (lambda: picture(path_picture(item["codes"], explained["level_log_probabilities"]))) if item["codes"] else "-"
    return [str(place), title, f"{item['score']:.3f}", path, "; ".join(near) or "-", *([moved] if beside else [])]


def _title(item: Mapping[str, Any]) -> None:
    ui.label(item["title"] or item["item"])
    words_of = item["item"] + (", explored" if item["explored"] else "") + (", retriever" if item["source"] == "retriever" else "")
    ui.label(words_of).classes("note mono")


async def show(stack: Stack) -> None:
    """The form and, below it, what came back."""
    split = await known(stack, "/v1/serving/variants") or {"variants": []}
    sides = {"": "whoever is due"} | {side["name"]: f"{side['name']} ({short(side['model'])})" for side in split["variants"]}
    with card("For whom"):
        with ui.element("div").classes("line"):
            user = ui.input("User").props("outlined dense")
            history = ui.input("History of items, oldest first").props("outlined dense").style("min-width:min(100%,24rem)")
            n = ui.number("How many", value=10, min=1, max=1000, precision=0).props("outlined dense")
            width = ui.number("Beams", placeholder="as deployed", min=1, max=4096, precision=0).props("outlined dense")
        with ui.expansion("Filters and source").style("width:100%"), ui.element("div").classes("line"):
            any_of = ui.input("Any of these categories").props("outlined dense")
            all_of = ui.input("All of these categories").props("outlined dense")
            without = ui.input("Without these items").props("outlined dense")
            seen = ui.checkbox("Leave out what was seen")
            source = ui.select(_SOURCES, value="", label="Source").props("outlined dense")
        with ui.element("div").classes("line"):
            first = ui.select(sides, value="", label="Model A").props("outlined dense")
            second = ui.select({"none": "no second model", **sides}, value="none", label="Model B, beside it").props("outlined dense")
            button = ui.button("Recommend").props("no-caps unelevated")
    results = ui.element("div").props('aria-live="polite"')

    async def ask() -> None:
        fields = {"user": user.value, "history": history.value, "n": n.value, "width": width.value, "source": source.value, "exclude_seen": seen.value}
        fields |= {"categories_any": any_of.value, "categories_all": all_of.value, "exclude_ids": without.value}
        results.clear()
        try:
            body = body_of(fields)
            answers = [await stack.send("POST", "/v1/recommendations", body | ({"variant": first.value} if first.value else {}))]
            if second.value != "none":
                answers.append(await stack.send("POST", "/v1/recommendations", body | ({"variant": second.value} if second.value else {})))
            past = await known(stack, f"/v1/users/{quote(body['user'], safe='')}/history") if "user" in body else None
        except (Refused, ValueError) as error:
            with results:
                refusal(error)
            return
        with results:
            if past is not None:
                await _history(stack, past["events"])
            with ui.element("div").classes("grid") if len(answers) > 1 else ui.element("div"):
                for place, answer in enumerate(answers):
                    other = answers[1 - place] if len(answers) > 1 else None
                    _answer(answer, other, f"Model {'AB'[place]}" if other else "Recommendations")

    button.on_click(ask)
    for field in (user, history):
        field.on("keydown.enter", ask)


async def _history(stack: Stack, events: list[dict[str, Any]]) -> None:
    with card("What this user did last"):
        if not events:
            note("Nothing is known of this user: the answer is for a newcomer.")
            return
        latest = list(reversed(events))[:_HISTORY_SHOWN]
        text = ", ".join(f"{event['item']} ({event['action']})" for event in latest)
        note(f"Newest first: {text}" + (f", and {len(events) - len(latest)} before" if len(events) > len(latest) else "") + ".")


def _answer(answer: Mapping[str, Any], other: Mapping[str, Any] | None, title: str) -> None:
    with card():
        heading(title)
        note(facts(answer))
        for text in (answer["fallback"], answer["short_reason"]):
            if text:
                note(text, "warn")
        picture(times_picture(answer["timing"]))
        head = ["place", "item", "score", "codes and their probabilities", "nearest in the history", *(["place in the other"] if other else [])]
        table(f"{figure(len(answer['items']))} items, best first", head, rows_of(answer, other), numbers=["score"], empty="No item.")
