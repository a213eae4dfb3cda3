"""Tables: built once, their texts changed in place, so that whoever stands in one with the keyboard stays where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

Cell = str | Callable[[], Any]


class Table:
    """A table whose rows have keys. A cell is a text, or makes its own components."""

    def __init__(self, caption: str, head: Sequence[str], numbers: Sequence[str] = (), empty: str = "Nothing yet.") -> None:
        self._head, self._numbers, self._empty = list(head), set(numbers), empty
        self._labels: dict[tuple[str, int], Any] = {}
        self._keys: list[str] | None = None
        with ui.element("div").classes("scroll"), ui.element("table"):
            with ui.element("caption"):
                ui.label(caption)
            with ui.element("thead"), ui.element("tr"):
                for name in self._head:
                    with ui.element("th").props('scope="col"').classes(self._class(name)):
                        ui.label(name)
            self._body = ui.element("tbody")

    def _class(self, name: str) -> str:
        return "number" if name in self._numbers else ""

    def show(self, rows: Sequence[tuple[str, Sequence[Cell]]]) -> None:
        """Show these (key, cells)."""
        keys = [key for key, _ in rows]
        if keys != self._keys:
            self._build(rows)
            self._keys = keys
            return
        for key, cells in rows:
            for place, cell in enumerate(cells):
                if isinstance(cell, str) and (label := self._labels.get((key, place))) is not None and label.text != cell:
                    label.set_text(cell)

    def _build(self, rows: Sequence[tuple[str, Sequence[Cell]]]) -> None:
        self._body.clear()
        self._labels.clear()
        with self._body:
            if not rows:
                with ui.element("tr"), ui.element("td").props(f'colspan="{len(self._head)}"'):
                    ui.label(self._empty).classes("note")
            for key, cells in rows:
                with ui.element("tr"):
                    for place, (name, cell) in enumerate(zip(self._head, cells, strict=True)):
                        with ui.element("td").classes(self._class(name)):
                            if isinstance(cell, str):
                                self._labels[key, place] = ui.label(cell)
                            else:
                                cell()


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Cell]], numbers: Sequence[str] = (), empty: str = "Nothing yet.") -> None:
    """A table that stays as it is."""
    Table(caption, head, numbers, empty).show([(str(place), row) for place, row in enumerate(rows)])
