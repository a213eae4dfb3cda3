"""The loop as a picture: the six rooms in their order, what each holds and what waits in front of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

ROOMS = ("ingestion", "tokenization", "negatives", "training", "reward", "serving")
_BOX_HEIGHT = 112
_SIZES = {2: (166, 22), 3: (250, 56)}  # width of a box and the gap between boxes, by columns: as many pixels as narrow and wide screens have


@dataclass(frozen=True)
class Station:
    """One room. ``facts`` are short lines; ``waiting`` messages are in its queues (None: not known), ``jobs`` of it have not ended."""

    room: str
    facts: tuple[str, ...]
    waiting: int | None = 0
    jobs: int = 0


def stations(facts: Mapping[str, Sequence[str]], depths: Mapping[str, int] | None, open_jobs: Sequence[str]) -> list[Station]:
    """The rooms with their queues' depths, named as in ``semantide.training.RunJob``, and the rooms of the jobs that have not ended."""
    waiting: dict[str, int] = {room: sum(depth for queue, depth in (depths or {}).items() if queue.split(".")[1:2] == [room]) for room in ROOMS}
    return [Station(room, tuple(facts.get(room, ())), waiting[room] if depths is not None else None, sum(job == room for job in open_jobs)) for room in ROOMS]


def loop_picture(rooms: Sequence[Station], columns: int) -> str:
    """The six rooms clockwise around a rectangle of two or three columns, arrows between them, and the way back from serving to ingestion."""
    (box, gap), rows = _SIZES[columns], len(rooms) // columns
    cells = [(column, 0) for column in range(columns)] + [(columns - 1, row) for row in range(1, rows - 1)]
    cells += [(column, rows - 1) for column in range(columns - 1, -1, -1)] + [(0, row) for row in range(rows - 2, 0, -1)]
    places = [(4 + column * (box + gap), 4 + row * (_BOX_HEIGHT + gap)) for column, row in cells]
    width, height = columns * (box + gap) - gap + 8, rows * (_BOX_HEIGHT + gap) - gap + 8
    boxes = "".join(_box(station, box, *place) for station, place in zip(rooms, places, strict=True))
    arrows = "".join(_arrow(box, places[number], places[(number + 1) % len(rooms)]) for number in range(len(rooms)))
    said = "; ".join(f"{station.room}: {', '.join(station.facts) or 'nothing yet'}" for station in rooms)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape("The loop. " + said)}"><defs><marker id="tip{columns}" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="var(--soft)"/></marker></defs>'
        f"{arrows.replace('#tip', f'#tip{columns}')}{boxes}</svg>"
    )


def _box(station: Station, width: int, x: int, y: int) -> str:
    busy = station.waiting or station.jobs
    known = [f"{station.waiting} waiting"] if station.waiting is not None else []
    lines = [*station.facts[:3], ", ".join([*known, f"{station.jobs} jobs"]) if busy or not known else "idle"]
    texts = "".join(
        f'<text x="{x + 10}" y="{y + 46 + 17 * place}" font-size="12.5" style="fill:var({"--soft" if place < len(lines) - 1 or not busy else "--accent"})">{escape(line)}</text>'
        for place, line in enumerate(lines)
    )
    border = "var(--accent)" if busy else "var(--line)"
    return (
        f'<g><rect x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="10" fill="var(--card)" stroke="{border}" stroke-width="1.5"/>'
        f'<text x="{x + 10}" y="{y + 25}" font-size="15" font-weight="650">{escape(station.room)}</text>{texts}</g>'
    )


def _arrow(width: int, begin: tuple[int, int], end: tuple[int, int]) -> str:
    (x, y), (to_x, to_y) = begin, end
    middle_x, middle_y = width // 2, _BOX_HEIGHT // 2
    if y == to_y:
        right = to_x > x
        points = (x + (width if right else 0), y + middle_y, to_x + (0 if right else width), to_y + middle_y)
    else:
        down = to_y > y
        points = (x + middle_x, y + (_BOX_HEIGHT if down else 0), to_x + middle_x, to_y + (0 if down else _BOX_HEIGHT))
    return '<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="var(--soft)" stroke-width="1.6" marker-end="url(#tip)"/>'.format(*points)
