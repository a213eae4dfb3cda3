"""Catalog: items found by their words, ids as a tree that opens level by level, and how good the ids are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nicegui import ui

from semantide.services.console.answers import Refused, Stack
from semantide.services.console.frame import card, note, refusal
from semantide.services.console.tables import Cell, table
from semantide.services.console.words import count, figure, share, short

_FOUND, _NEIGHBOURS, _BRANCHES = 20, 30, 300


def spelled(codes: Sequence[int]) -> str:
    """As in 12-250-3."""
    return "-".join(str(code) for code in codes)


def level_rows(report: Mapping[str, Any]) -> list[list[Cell]]:
    """Each level's use of its codebook."""
    return [
        [
            str(row["level"] + 1),
            f"{row['used']} of {row['size']}",
            share(row["utilisation"]),
            f"{row['entropy_bits']:.2f}",
            share(row["normalised_entropy"]),
            count(row["largest_prefix_group"]),
        ]
        for row in report["levels"]
    ]


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What to know of a catalog's ids, sentence by sentence."""
    before, after = report["collisions"]["before"], report["collisions"]["after"]
    said = [
        f"{count(report['items'])} items, levels of {' x '.join(str(size) for size in report['level_sizes'])}.",
        f"Collisions: {count(before['items'])} items ({share(before['rate'])}) shared an id before they were moved apart, {count(after['items'])} do now; "
        f"{count(report['moved_items'])} items were moved.",
    ]
    return [*said, *report["verdict"]["reasons"], *report["verdict"]["warnings"]]


def neighbours(codes: Sequence[int], answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items by how many first codes they share with these, most first; ``answers`` are those below ever shorter prefixes."""
    found: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for item in answer["items"]:
            common = next((place for place, (mine, its) in enumerate(zip(codes, item["codes"], strict=True)) if mine != its), len(codes))
            found.setdefault(item["item"], {**item, "common": common})
    return sorted((item for item in found.values() if item["common"] < len(codes)), key=lambda item: -item["common"])[:_NEIGHBOURS]


async def show(stack: Stack) -> None:
    """The current catalog."""
    try:
        report = await stack.get("/v1/catalogs/current/report")
    except Refused as error:
        with card():
            refusal(error)
        return
    with card("Find items"):
        words = ui.input("Words of a title, or of an id").props("outlined dense").style("width:min(100%,28rem)")
        found = ui.element("div").props('aria-live="polite"')
    item_place = ui.element("div").props('aria-live="polite"')

    async def search() -> None:
        found.clear()
        if not str(words.value or "").strip():
            return
        with found:
            try:
                answer = await stack.get("/v1/catalogs/current/search", text=words.value.strip(), limit=_FOUND)
            except Refused as error:
                refusal(error)
                return
            rows = [[_open(item), item["title"] or "-", spelled(item["codes"])] for item in answer["items"]]
            table(
                f"{count(answer['total'])} found" + (f", the first {_FOUND}" if answer["total"] > _FOUND else ""),
                ["item", "title", "codes"],
                rows,
                empty="No item has these letters.",
            )

    def _open(item: Mapping[str, Any]) -> Cell:
        return lambda: ui.button(item["item"], on_click=lambda: open_item(item["item"])).props("flat dense no-caps")

    async def open_item(ident: str) -> None:
        item_place.clear()
        with item_place, card(f"Item {ident}"):
            try:
                item = await stack.get(f"/v1/catalogs/current/items/{quote(ident, safe='')}")
                prefixes = [item["codes"][:length] for length in range(len(item["codes"]) - 1, 0, -1)]
                answers = [await stack.get(f"/v1/catalogs/current/codes/{spelled(prefix)}", limit=_NEIGHBOURS) for prefix in prefixes]
            except Refused as error:
                refusal(error)
                return
            note(f"{item['title'] or 'Without a title'}; codes {spelled(item['codes'])} of {' x '.join(str(size) for size in item['level_sizes'])}.")
            near = neighbours(item["codes"], answers)
            rows: list[list[Cell]] = [[_open(one), one["title"] or "-", spelled(one["codes"]), str(one["common"])] for one in near]
            table(
                "Near by code: the more first codes are the same, the nearer",
                ["item", "title", "codes", "codes in common"],
                rows,
                numbers=["codes in common"],
                empty="No item shares its first code.",
            )

    words.on("keydown.enter", search)
    words.on_value_change(lambda: search() if len(str(words.value or "")) >= 3 else None)
    with ui.element("div").classes("grid"):
        with card("The ids as a tree"):
            note(f"{short(report['catalog'])}: a branch opens to the codes that follow it, and a whole id to its item.")
            with ui.element("div").props('role="tree" aria-label="Semantic ids"'):
                await _branches(stack, [], open_item)
        with card("How good the ids are"):
            for sentence in verdict(report):
                note(sentence)
            head = ["level", "codes used", "utilisation", "entropy, bits", "of the most", "largest group"]
            table("Levels of the ids", head, level_rows(report), numbers=head[1:])
            note(f"Left over of the vectors' variance: {figure(report['reconstruction']['after']['share_of_variance'])}.")


async def _branches(stack: Stack, prefix: list[int], open_item: Any) -> None:
    answer = await stack.get("/v1/catalogs/current/tree", prefix=spelled(prefix) or None)
    whole = len(prefix) + 1 == len(answer["level_sizes"])
    for branch in answer["branches"][:_BRANCHES]:
        codes = [*prefix, branch["code"]]
        if whole:
            await _leaf(stack, codes, branch, open_item)
        else:
            _branch(stack, codes, branch, open_item)
    if len(answer["branches"]) > _BRANCHES:
        note(f"and {len(answer['branches']) - _BRANCHES} codes more")


def _branch(stack: Stack, codes: list[int], branch: Mapping[str, Any], open_item: Any) -> None:
    filled = False
    label = f"{spelled(codes)}  -  {count(branch['items'])} items: {', '.join(branch['examples'])}"
    made = ui.expansion(label).props('dense role="treeitem"').style("width:100%")
    with made:
        inside = ui.element("div").props('role="group"').style("padding-left:1rem")

    async def fill(event: Any) -> None:
        nonlocal filled
        if event.value and not filled:
            filled = True
            with inside:
                try:
                    await _branches(stack, codes, open_item)
                except Refused as error:
                    filled = False
                    refusal(error)

    made.on_value_change(fill)


async def _leaf(stack: Stack, codes: list[int], branch: Mapping[str, Any], open_item: Any) -> None:
    async def look() -> None:
        below = await stack.get(f"/v1/catalogs/current/codes/{spelled(codes)}", limit=1)
        await open_item(below["items"][0]["item"])

    with ui.element("div").props('role="treeitem"'):
        ui.button(f"{spelled(codes)}  -  {branch['examples'][0]}", on_click=look).props("flat dense no-caps align=left")
