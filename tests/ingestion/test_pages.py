"""Pages, repeats and the order of events are what counting one event after another gives."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.ingestion.cleaning import CleaningConfig, clean
from semantide.services.ingestion.pages import Shown, pages
from semantide.services.ingestion.signals import Signals

SIGNALS = Signals.of({"exposure": 0.0, "click": 1.0, "like": 2.0, "love": 2.0, "hate": -1.0, "block": -2.0})
NEVER = np.iinfo(np.int64).max
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(-3, 9), st.integers(0, 5), st.integers(-1, 1)), max_size=30)


def tab_of(item: int, action: int) -> int:
    """Where an event happened, -1 for nowhere in particular."""
    return (3 * item + action) % 3 - 1


def strongest(actions: list[int], *, dislike_first: bool) -> int:
    """By intensity, then by name, which is the number."""
    strength = [1000 - one if dislike_first and one < 0 else one for one in SIGNALS.intensities]
    return max(actions, key=lambda action: (strength[action], action))


@settings(deadline=None)
@given(EVENTS, st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 4)), min_size=3, max_size=3), st.integers(0, 4))
def test_pages_are_those_of_one_event_after_another(rows: list[tuple[int, ...]], cuts: list[tuple[int, int]], gap: int) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    valid = [moment if moment < 9 else NEVER for moment, _ in cuts]
    test = [min(moment + later, NEVER) if moment != NEVER else NEVER for moment, (_, later) in zip(valid, cuts, strict=True)]
    expected: dict[tuple[object, ...], dict[int, list[int]]] = {}
    begins: dict[tuple[object, ...], int] = {}
    session, last = 0, (-1, 0)
    for user, item, time, action, page in rows:
        if user != last[0] or time - last[1] > gap:
            session += 1
        last = (user, time)
        key = (user, ("page", page) if page >= 0 else ("session", session, tab_of(item, action)), (time >= valid[user]) + (time >= test[user]))
        begins.setdefault(key, time)
        expected.setdefault(key, {}).setdefault(item, []).append(action)
    columns = [np.array([row[column] for row in rows], dtype) for column, dtype in enumerate((np.int32, np.int32, np.int64, np.int16, np.int32))]
    found = pages(
        Shown(*columns, tab=np.array([tab_of(item, action) for _, item, _, action, _ in rows], np.int32)),
        np.array(valid),
        np.array(test),
        SIGNALS,
        session_gap_ms=gap,
    )
    shown = [
        (user, time, list(zip(found.items[begin:end].tolist(), found.actions[begin:end].tolist(), strict=True)))
        for user, time, begin, end in zip(found.user.tolist(), found.time.tolist(), found.offsets[:-1], found.offsets[1:], strict=True)
    ]
    wanted = [(key[0], begins[key], [(item, strongest(actions, dislike_first=True)) for item, actions in items.items()]) for key, items in expected.items()]
    assert shown == wanted


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
