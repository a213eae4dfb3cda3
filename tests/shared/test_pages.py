"""Pages of a data set: which of them train, what came before each, and what their figures say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.page_report import SIZES, PageCounts
from semantide.shared.pages import CLICKED, DISLIKED, EXPOSED, ORDERED, Pages, answers, earlier_events

ACTIONS = {"exposure": 0.0, "click": 1.0, "like": 2.0, "order": 3.0, "hate": -1.0}


def dataset_of(users: list[list[int]], train: list[int]) -> Dataset:
    """Users whose events happened at these moments."""
    lengths = [len(times) for times in users]
    return Dataset(
        tuple(map(str, range(len(users)))), ("a",), np.zeros(sum(lengths), np.int32), np.array([time for times in users for time in times], np.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), np.array(train, np.int32), np.array(lengths, np.int32), pa.table({"item": ["a"]}), {},
    )  # fmt: skip


def pages_of(rows: list[tuple[int, int, list[float]]], parts: list[int] | None = None) -> Pages:
    """Pages given as user, time, intensities; each item a new one."""
    lengths = [len(row[2]) for row in rows]
    shown = np.array([value for row in rows for value in row[2]], np.float32)
    columns = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Pages(*columns, offsets, np.arange(len(shown)), shown, np.array([0] * len(shown) if parts is None else parts, np.int8))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), max_size=6).map(sorted), min_size=1, max_size=4), st.data())
def test_what_came_before_a_page_and_what_of_it_trains_is_what_counting_gives(users: list[list[int]], data: st.DataObject) -> None:
    train = [data.draw(st.integers(0, len(times))) for times in users]
    parts = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    drawn = sorted(data.draw(st.lists(st.tuples(st.integers(0, len(users) - 1), st.integers(0, 12), parts), max_size=12)), key=lambda row: row[:2])
    dataset, pages = (
        dataset_of(users, train),
        pages_of([(user, time, [1.0] * len(parts)) for user, time, parts in drawn], [part for *_, parts in drawn for part in parts]),
    )
    before = earlier_events(dataset, pages.users_P, pages.times_P)
    assert before.tolist() == [sum(time < moment for time in users[user]) for user, moment, _ in drawn]
    kept, seen = pages.training(dataset)
    trains = [(user, moment, parts.count(0)) for user, moment, parts in drawn if 0 in parts]
    assert list(zip(kept.users_P.tolist(), kept.times_P.tolist(), np.diff(kept.offsets_P1).tolist(), strict=True)) == trains
    assert kept.items_S.tolist() == np.flatnonzero(pages.parts_S == 0).tolist()
    assert seen.tolist() == [min(sum(time < moment for time in users[user]), train[user]) for user, moment, _ in trains]


def test_the_strength_of_an_answer_comes_from_the_deployments_intensities(tmp_path: Path) -> None:
    assert answers(np.array([-2, -0.1, 0, 0.9, 1, 2.9, 3, 9])).tolist() == [DISLIKED] * 2 + [EXPOSED] * 2 + [CLICKED] * 2 + [ORDERED] * 2
    assert answers(np.array([0.5, 1.5]), 0.5, 1.5).tolist() == [CLICKED, ORDERED]
    table = pa.table({"user": pa.array([0, 2], pa.int32()), "time": pa.array([5, 6]), "items": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
                      "actions": pa.array([["order", "hate"], ["exposure"]]), "parts": pa.array([[0, 1], [2]], pa.list_(pa.int8()))})  # fmt: skip
    pq.write_table(table, tmp_path / "pages.parquet")
    pages = Pages.load(tmp_path, ACTIONS)
    assert (len(pages), pages.offsets_P1.tolist(), pages.items_S.tolist(), pages.answers().tolist()) == (2, [0, 2, 3], [1, 2, 3], [ORDERED, DISLIKED, EXPOSED])
    assert pages.take(np.array([False, True, True])).items_S.tolist() == [2, 3] and pages.take(np.array([False, False, True])).offsets_P1.tolist() == [0, 1]
    with pytest.raises(Conflict, match="'hate', whose intensity it does not know"):
        Pages.load(tmp_path, {"order": 3.0, "exposure": 0.0})
    with pytest.raises(Conflict, match="make the data set anew"):
        Pages.load(tmp_path, {})
    pq.write_table(table.drop_columns(["parts"]), tmp_path / "pages.parquet")
    with pytest.raises(Conflict, match="cut pages where a part ended: make the data set anew"):
        Pages.load(tmp_path, ACTIONS)
    pq.write_table(table.slice(0, 0), tmp_path / "pages.parquet")
    assert len(Pages.load(tmp_path, ACTIONS)) == 0


SHOWN = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 3.0]), min_size=1, max_size=60), max_size=8)


@settings(deadline=None)
@given(SHOWN, SHOWN)
def test_figures_of_parts_add_up_and_are_what_counting_gives(first: list[list[float]], second: list[list[float]]) -> None:
    def counted(rows: list[list[float]]) -> PageCounts:
        pages = pages_of([(0, number, row) for number, row in enumerate(rows)])
        return PageCounts.of(pages.offsets_P1, pages.answers(), in_order(pages))

    rows, both = first + second, counted(first) + counted(second)
    np.testing.assert_allclose(both.flat(), counted(rows).flat())
    np.testing.assert_array_equal(PageCounts.from_flat(both.flat()).flat(), both.flat())
    np.testing.assert_array_equal((PageCounts.nothing() + both).flat(), both.flat())
    report: dict[str, Any] = both.report()
    positives = [sum(value >= 1 for value in row) for row in rows]
    assert report["pages_with_two"] == sum(many > 1 for many in positives)
    assert report["positives_together"] == sum(many for many in positives if many > 1)
    assert (report["positives"], report["pages"], report["shown"]) == (sum(positives), len(rows), sum(map(len, rows)))
    assert list(report["pages_by_size"].values()) == [sum(low <= len(row) < high for row in rows) for low, high in zip(SIZES, [*SIZES[1:], 10**9], strict=True)]
    assert abs(sum(entry["shown"] * entry["rate"] for entry in report["positions"]) - sum(
        sum(value >= 1 for value in row[:10]) for row, many in zip(rows, positives, strict=True) if 0 < many < len(row))) < 0.1 * len(rows) + 0.1  # fmt: skip
    json.dumps(report)


def test_the_verdict_says_what_pages_are_good_for() -> None:
    def verdict(*rows: list[float]) -> tuple[bool, str]:
        report = PageCounts.of(*_counted(list(rows))).report()
        return report["can_pay"], report["verdict"]

    assert verdict() == (False, "nothing was clicked or ordered on any page: there is nothing to train on")
    assert verdict([0.0, 0.0]) == (False, "nothing was clicked or ordered on any page: there is nothing to train on")
    pays, words = verdict([1.0, 3.0], [1.0])
    assert pays and "66.7%" in words and "nothing is known of what was shown and not taken" in words
    pays, words = verdict(*[[1.0, 0.0]] * 200)
    assert not pays and "little to gain" in words and "at position 1 2.00 times" in words
    pays, words = verdict(*[[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]] * 100)
    assert pays and "position" not in words


def test_places_are_those_that_are_known_whatever_the_order_of_events() -> None:
    offsets, found = np.array([0, 3, 6, 9]), answers(np.array([1, 0, 0] * 3))
    places = np.array([2, 0, 1, 2, 1, 0, 1, -1, 0])  # what was clicked stood last, and of the third page one place is unknown
    lifts = {entry["position"]: (entry["shown"], entry["lift"]) for entry in PageCounts.of(offsets, found, places).report()["positions"]}
    assert lifts == {1: (2, 0.0), 2: (2, 0.0), 3: (2, pytest.approx(3.0, abs=1e-3))}
    report = PageCounts.of(offsets, found, np.full(9, -1)).report()
    assert report["positions"] == [] and "a bias by position cannot be told: send `position`" in report["verdict"]


def in_order(pages: Pages) -> Any:
    return np.arange(len(pages.items_S)) - np.repeat(pages.offsets_P1[:-1], np.diff(pages.offsets_P1))


def _counted(rows: list[list[float]]) -> tuple[Any, Any, Any]:
    pages = pages_of([(0, number, row) for number, row in enumerate(rows)])
    return pages.offsets_P1, pages.answers(), in_order(pages)
