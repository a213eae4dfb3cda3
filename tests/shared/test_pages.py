"""Pages of a data set: which of them train, what came before each, and what their figures say."""

from __future__ import annotations

import json
from dataclasses import replace
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


def pages_of(rows: list[tuple[int, int, list[float]]]) -> Pages:
    """Pages given as user, time, intensities."""
    rows = sorted(rows, key=lambda row: row[:2])
    lengths = [len(row[2]) for row in rows]
    shown = np.array([value for row in rows for value in row[2]], np.float32)
    columns = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    return Pages(*columns, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), np.arange(len(shown)), shown)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), max_size=6).map(sorted), min_size=1, max_size=4), st.data())
def test_what_came_before_a_page_and_which_pages_train_is_what_counting_gives(users: list[list[int]], data: st.DataObject) -> None:
    train = [data.draw(st.integers(0, len(times))) for times in users]
    drawn = data.draw(st.lists(st.tuples(st.integers(0, len(users) - 1), st.integers(0, 12)), max_size=12))
    dataset, pages = dataset_of(users, train), pages_of([(user, time, [1.0]) for user, time in drawn])
    before = earlier_events(dataset, pages.users_P, pages.times_P)
    where = list(zip(pages.users_P.tolist(), pages.times_P.tolist(), strict=True))
    assert before.tolist() == [sum(time < moment for time in users[user]) for user, moment in where]
    kept, seen = pages.training(dataset)
    trains = [(user, moment) for user, moment in where if train[user] == len(users[user]) or moment < users[user][train[user]]]
    assert list(zip(kept.users_P.tolist(), kept.times_P.tolist(), strict=True)) == trains
    assert seen.tolist() == [min(sum(time < moment for time in users[user]), train[user]) for user, moment in trains]
    dated, _ = pages.training(replace(dataset, header={"valid_time": 6}))
    assert list(zip(dated.users_P.tolist(), dated.times_P.tolist(), strict=True)) == [(user, moment) for user, moment in where if moment < 6]


def test_the_strength_of_an_answer_comes_from_the_deployments_intensities(tmp_path: Path) -> None:
    assert answers(np.array([-2, -0.1, 0, 0.9, 1, 2.9, 3, 9])).tolist() == [DISLIKED] * 2 + [EXPOSED] * 2 + [CLICKED] * 2 + [ORDERED] * 2
    assert answers(np.array([0.5, 1.5]), 0.5, 1.5).tolist() == [CLICKED, ORDERED]
    table = pa.table({"user": pa.array([0, 2], pa.int32()), "time": pa.array([5, 6]), "items": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
                      "actions": pa.array([["order", "hate"], ["exposure"]])})  # fmt: skip
    pq.write_table(table, tmp_path / "pages.parquet")
    pages = Pages.load(tmp_path, ACTIONS)
    assert (len(pages), pages.offsets_P1.tolist(), pages.items_S.tolist(), pages.answers().tolist()) == (2, [0, 2, 3], [1, 2, 3], [ORDERED, DISLIKED, EXPOSED])
    assert pages.take(np.array([False, True])).items_S.tolist() == [3]
    with pytest.raises(Conflict, match="'hate', whose intensity it does not know"):
        Pages.load(tmp_path, {"order": 3.0, "exposure": 0.0})
    with pytest.raises(Conflict, match="make the data set anew"):
        Pages.load(tmp_path, {})
    pq.write_table(table.slice(0, 0), tmp_path / "pages.parquet")
    assert len(Pages.load(tmp_path, ACTIONS)) == 0


SHOWN = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 3.0]), min_size=1, max_size=60), max_size=8)


@settings(deadline=None)
@given(SHOWN, SHOWN)
def test_figures_of_parts_add_up_and_are_what_counting_gives(first: list[list[float]], second: list[list[float]]) -> None:
    def counted(rows: list[list[float]]) -> PageCounts:
        pages = pages_of([(0, number, row) for number, row in enumerate(rows)])
        return PageCounts.of(pages.offsets_P1, pages.answers())

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


def _counted(rows: list[list[float]]) -> tuple[Any, Any]:
    pages = pages_of([(0, number, row) for number, row in enumerate(rows)])
    return pages.offsets_P1, pages.answers()
