"""Exposures are what counting one event after another gives, and carry all that was said and done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion.eventlog import SEGMENT_SCHEMA, read_segment
from semantide.services.ingestion.exposures import Told, exposures
from semantide.services.ingestion.schema import completed
from semantide.services.ingestion.signals import MOST_ACTIONS, Signals

SIGNALS = Signals.of({"click": 1.0, "exposure": 0.0, "hate": -1.0, "like": 2.0})
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([-1, -1, -1, 0, 4]), st.sampled_from([None, 0.25, 0.5]), st.sampled_from([None, 1.0, 2.0]),
              st.integers(1, 7), st.integers(0, 3)),
    max_size=25,
)  # fmt: skip


@given(EVENTS)
def test_exposures_fold_events_of_one_item_on_one_page(events: list[tuple[int, int, int, float | None, float | None, int, int]]) -> None:
    rows = [(*row, index // 3) for index, row in enumerate(events)]  # with their times
    pages: dict[int, dict[int, list[int]]] = {}
    for index, row in enumerate(rows):
        pages.setdefault(row[0], {}).setdefault(row[1], []).append(index)
    wanted = []
    for number, items in enumerate(pages.values()):
        placed = any(rows[index][2] >= 0 for events in items.values() for index in events)
        for place, indices in enumerate(items.values()):
            own = [rows[index] for index in indices]
            alone = sum(rows[other[0]][7] == own[0][7] for other in items.values()) == 1
            said = next((row[2] for row in own if row[2] >= 0), place if alone and not placed else -1)
            propensity = next((row[3] for row in own if row[3] is not None), None)
            value = next((row[4] for row in reversed(own) if row[4] is not None), None)
            action = 2 if any(row[6] == 2 for row in own) else max((row[6] for row in own), key=lambda one: SIGNALS.intensities[one])
            wanted.append((indices[0], indices[-1], number, said, propensity, value, int(np.bitwise_or.reduce([row[5] for row in own])), action))

    def floats(column: int) -> np.ndarray:
        return np.array([np.nan if row[column] is None else row[column] for row in rows], np.float32)

    def ints(column: int, dtype: type) -> np.ndarray:
        return np.array([row[column] for row in rows], dtype)

    told = Told(ints(1, np.int32), ints(7, np.int64), ints(6, np.int16), ints(2, np.int32), floats(3), floats(4), ints(5, np.int64))
    found = exposures(told, ints(0, np.int64), SIGNALS)
    columns = (found.first, found.last, found.page, found.position, found.propensity, found.value, found.signals, found.action)
    got = [tuple(None if value != value else value for value in row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    assert got == wanted


def test_sets_of_actions_keep_them_all_but_what_only_says_that_something_was_shown() -> None:
    signals = Signals.of({"exposure": 0.0, "click": 1.0, "half": 0.5, "hate": -1.0})
    lists = pa.chunked_array([pa.array([["hate"], None, [], ["click", "unheard", "half"]], pa.list_(pa.string()))])
    numbers = signals.numbers(pa.chunked_array([pa.array(["click", "exposure", "gone", "click"])]))
    assert signals.words_of_sets(signals.sets(numbers, lists)).to_pylist() == [["click", "hate"], [], [], ["click", "half"]]
    with pytest.raises(ValueError, match=f"at most {MOST_ACTIONS} are possible"):
        Signals.of({f"a{number}": 1.0 for number in range(MOST_ACTIONS + 1)})


@pytest.mark.parametrize("most", [1.0, 3.0, 999.5, 1001.0, 1e9])
def test_a_dislike_outweighs_whatever_else_was_done_however_intense(most: float) -> None:
    signals = Signals.of({"exposure": 0.0, "order": most, "hate": -0.5, "block": -2.0})
    done = signals.numbers(pa.chunked_array([pa.array(["exposure", "order", "hate", "order", "order", "hate", "block"])]))
    starts = np.array([0, 3, 4])
    assert signals.words(signals.strongest(done, starts, dislike_first=True)).to_pylist() == ["hate", "order", "block"]
    assert signals.words(signals.strongest(done, starts)).to_pylist() == ["order", "order", "order"]


def test_what_an_earlier_version_wrote_is_read_with_nulls(tmp_path: Path) -> None:
    old = SEGMENT_SCHEMA.empty_table().select(["user", "item", "time", "action", "page", "value", "event_id", "event"])
    row = {"user": "a", "item": "b", "time": 5, "action": "click", "page": None, "value": None, "event_id": None, "event": b"x" * 16}
    pq.write_table(type(old).from_pylist([row], schema=old.schema), tmp_path / "old.parquet")
    assert read_segment(tmp_path / "old.parquet").to_pylist() == [dict.fromkeys(SEGMENT_SCHEMA.names) | row]
    with pytest.raises(ValueError, match="columns event are missing"):
        completed(old.drop_columns(["event"]), SEGMENT_SCHEMA)
