"""Pages, groups of them, repeats and the order of events are what counting one event after another gives."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.ingestion.cleaning import CleaningConfig, clean
from semantide.services.ingestion.pages import Shown, group_begins, group_times, page_numbers
from semantide.services.ingestion.signals import Signals

SIGNALS = Signals.of({"exposure": 0.0, "click": 1.0, "like": 2.0, "love": 2.0, "hate": -1.0, "block": -2.0})
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-3, 9), st.integers(0, 5), st.integers(-1, 1)), max_size=30)


def tab_of(item: int, action: int) -> int:
    """Where an event happened, -1 for nowhere in particular."""
    return (3 * item + action) % 3 - 1


def strongest(actions: list[int], *, dislike_first: bool) -> int:
    """By intensity, then by name, which is the number."""
    strength = [1000 - one if dislike_first and one < 0 else one for one in SIGNALS.intensities]
    return max(actions, key=lambda action: (strength[action], action))


def shown_of(rows: list[tuple[int, ...]]) -> Shown:
    user, item, time, page = (np.array([row[column] for row in rows], np.int64) for column in (0, 1, 2, 4))
    tabs = np.array([tab_of(item, action) for _, item, _, action, _ in rows], np.int32)
    return Shown(user.astype(np.int32), item.astype(np.int32), time, page.astype(np.int32), tabs)


@settings(deadline=None)
@given(EVENTS, st.integers(0, 4))
def test_pages_are_those_of_one_event_after_another(rows: list[tuple[int, ...]], gap: int) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    wanted: list[tuple[object, ...]] = []
    session, last = 0, (-1, 0)
    for user, item, time, action, page in rows:
        if user != last[0] or time - last[1] > gap:
            session += 1
        last = (user, time)
        wanted.append((user, ("page", page) if page >= 0 else ("session", session, tab_of(item, action))))
    found = page_numbers(shown_of(rows), gap)
    assert len(set(zip(found.tolist(), wanted, strict=True))) == len(set(found.tolist())) == len(set(wanted))


@settings(deadline=None)
@given(EVENTS)
def test_groups_are_of_pages_that_were_seen_at_the_same_time(rows: list[tuple[int, ...]]) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    events = shown_of(rows)
    page = page_numbers(events, 2)
    first: dict[tuple[int, int], int] = {}
    for index, key in enumerate(zip(page.tolist(), events.item.tolist(), strict=True)):
        first.setdefault(key, index)
    order = {number: place for place, number in enumerate(dict.fromkeys(page.tolist()))}
    exposures = sorted((order[number], index) for (number, _), index in first.items())
    begins = group_begins(events, np.array([index for _, index in exposures], np.int64), np.array([number for number, _ in exposures], np.int64))
    spans: dict[int, list[int]] = {}
    for number, index in exposures:
        spans.setdefault(number, []).append(index)
    wanted: list[int] = []
    until = (-1, 0)  # whose, and when the last item of all pages so far was shown
    for indices in spans.values():
        user, begin = rows[indices[0]][0], rows[indices[0]][2]
        if user != until[0] or begin > until[1]:
            wanted.append(indices[0])
            until = (user, begin)
        until = (user, max(until[1], max(rows[index][2] for index in indices)))
    assert begins.tolist() == wanted
    if rows:
        own = [max(rows[begin][2] for begin in wanted if rows[begin][0] == row[0] and rows[begin][2] <= row[2]) for row in rows]
        assert group_times(events, begins, events.user, events.time).tolist() == own


@settings(deadline=None)
@given(EVENTS, st.randoms(use_true_random=False))
def test_repeats_in_a_row_fold_whatever_the_order_of_the_log(rows: list[tuple[int, ...]], random: object) -> None:
    events = [(*row, bytes([number])) for number, row in enumerate(rows)]
    ordered = sorted(events, key=lambda row: (row[0], row[2], row[5]))
    likes = [row for row in ordered if SIGNALS.intensities[row[3]] >= 1]
    wanted = []
    for (user, item), run in groupby(likes, key=lambda row: row[:2]):
        same = list(run)
        wanted.append((user, item, same[0][2], strongest([row[3] for row in same], dislike_first=False)))
    random.shuffle(events)  # type: ignore[attr-defined]
    kinds = {"user": pl.Int32, "item": pl.Int32, "time": pl.Int64, "action": pl.Int16, "page": pl.Int32, "event": pl.Binary}
    frame = pl.DataFrame(events, schema=kinds, orient="row").with_columns(tab=pl.lit(-1, pl.Int32))
    cleaned = clean(frame, pl.Series([], dtype=pl.Int32), SIGNALS, CleaningConfig())
    assert cleaned.positives.select("user", "item", "time", "action").rows() == wanted
    assert cleaned.events.select("user", "item", "time", "action", "page").rows() == [row[:5] for row in ordered]
    assert sum(cleaned.dropped.values()) == len(likes) - len(wanted)
