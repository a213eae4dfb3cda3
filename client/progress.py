"""How far something long has come: told to a callback, or drawn as a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` (None where nobody knows how many there are), counted in ``unit``; ``stage`` says of what."""

    stage: str
    done: float
    total: float | None
    unit: str


Watcher = Callable[[Progress], None]
Shown = Watcher | bool | None
"""A callback; True for a bar, False for nothing, None for a bar where standard error is a terminal."""


@contextmanager
def watching(shown: Shown) -> Iterator[Watcher]:
    """Whom to tell. A bar needs ``rich``, which the package brings along; where it is missing nothing is drawn."""
    if callable(shown):
        yield shown
        return
    if shown is False or (shown is None and not sys.stderr.isatty()):
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield lambda _: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"), TimeElapsedColumn()
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, unit="")
        yield lambda told: bar.update(task, description=told.stage, completed=told.done, total=told.total or None, unit=told.unit)
