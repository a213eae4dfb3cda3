"""Data sets: cleaning, sessions, pages and splits, and that only the content decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.services.ingestion.schema import INTERACTION_SCHEMA
from semantide.shared.artifacts import digest_file
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.executors import Executor, Tick
from semantide.shared.pages import Pages

ACTIONS = {"exposure": 0.0, "click": 1.0, "like": 2.0, "order": 3.0, "hate": -1.0}
MINUTE = 60_000


def log(rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    padded = [(*row, *(None,) * (len(INTERACTION_SCHEMA) - len(row))) for row in rows]
    table = pa.table({name: [row[index] for row in padded] for index, name in enumerate(INTERACTION_SCHEMA.names)}, schema=INTERACTION_SCHEMA)
    frame = pl.from_arrow(table.append_column("event", pa.array(event_hashes(table), pa.binary())))
    assert isinstance(frame, pl.DataFrame)
    return frame


def catalogue(*rows: dict[str, Any]) -> pa.Table:
    base = {"title": "", "text": "", "categories": [], "attributes": "{}", "available": True, "deleted": False, "embedding": None}
    return pa.Table.from_pylist([{**base, **row} for row in rows], schema=ARTIFACT_SCHEMA)


def made(folder: Path, rows: list[tuple[Any, ...]], items: pa.Table | None = None, **config: Any) -> Dataset:
    store(log(rows), folder, items, **config)
    return Dataset.load(folder)


def store(
    events: pl.DataFrame,
    folder: Path,
    items: pa.Table | None = None,
    *,
    groups: int = 1,
    part_rows: int = 1_000_000,
    executor: Executor | None = None,
    workdir: Path | None = None,
    tick: Tick = lambda done, total, name: None,
    **config: Any,
) -> dict[str, Any]:
    """Write a data set of events that lie in several files."""
    if workdir is None:
        workdir = folder.with_name(folder.name + "-steps")
        shutil.rmtree(workdir, ignore_errors=True)
    sources = []
    for group in range(groups):
        path = workdir.with_name(f"{workdir.name}-events-{group}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        events[group::groups].write_parquet(path)
        sources.append([path])
    made = DatasetConfig.parse(config, session_gap_seconds=1800)
    items = catalogue() if items is None else items
    return write_dataset(sources, events.height, items, ACTIONS, made, folder, workdir=workdir, executor=executor, part_rows=part_rows, tick=tick)


def names(data: Dataset, user: int) -> list[str]:
    return [data.item_ids[row] for row in data.history(user)]


def test_leave_one_out_of_users_of_every_length(tmp_path: Path) -> None:
    rows = [(f"u{length}", f"i{n}", n, "click") for length in (1, 2, 3, 5) for n in range(length)]
    data = made(tmp_path, rows)
    assert data.user_ids == ("u1", "u2", "u3", "u5")
    assert list(zip(data.train_end.tolist(), data.valid_end.tolist(), strict=True)) == [(1, 1), (2, 2), (1, 2), (3, 4)]
    assert [data.item_ids[targets[0]] for _, _, targets in data.cases("test")] == ["i2", "i4"]
    assert dict(zip(data.item_ids, data.item_table["count"].to_pylist(), strict=True)) == {"i0": 4, "i1": 2, "i2": 1, "i3": 0, "i4": 0}


def test_the_last_pages_are_held_out_whole(tmp_path: Path) -> None:
    rows = [("u", f"i{n}", n, "click", page) for n, page in enumerate("aabbbccd")]
    rows += [("v", f"i{n}", 100 * MINUTE * (n // 2) + n, "click") for n in range(6)]  # sessions
    rows += [("w", "i0", 1, "click", "a"), ("w", "i1", 2, "click", "b"), ("x", "i0", 1, "click", "p")]
    rows += [("y", f"i{n}", n, "click", page) for n, page in enumerate("opqpqr")]
    data = made(tmp_path, [*rows, ("u", "i1", 8, "exposure", "d")], split="last-page")
    ends = list(zip(data.train_end.tolist(), data.valid_end.tolist(), strict=True))
    assert ends == [(5, 7), (2, 4), (2, 2), (1, 1), (1, 5)], "few pages only train, and pages that mix are held out together"
    assert [len(targets) for _, _, targets in data.cases("test")] == [1, 2, 1]
    pages = pq.read_table(tmp_path / "pages.parquet").to_pylist()
    assert [(len(page["items"]), set(page["parts"])) for page in pages if page["user"] == 0] == [(2, {0}), (3, {0}), (2, {1}), (2, {2})]
    assert [set(page["parts"]) for page in pages if page["user"] == 4] == [{0}, {1}, {1}, {2}]
    report = data.header["page_report"]
    assert (report["pages_with_two"], report["exposed"]) == (sum(sum(one != "exposure" for one in page["actions"]) > 1 for page in pages), 1)
    with pytest.raises(ValueError, match="use leave-one-out, last-page or temporal"):
        made(tmp_path, rows, split="page")


def test_a_held_out_page_begins_with_its_first_exposure_and_an_answer_does_not_make_it_longer(tmp_path: Path) -> None:
    rows = [
        ("u", item, hour * 60 * MINUTE, "exposure", page)
        for hour, (page, items) in enumerate([("p", "ab"), ("q", "cd"), ("r", "ef"), ("s", "gh"), ("t", "ij")])
        for item in items
    ]
    rows += [("u", item, (hour * 60 + 2) * MINUTE, "click", page) for hour, page, item in [(0, "p", "a"), (1, "q", "c"), (2, "r", "f"), (3, "s", "g")]]
    rows.append(("u", "d", (4 * 60 + 5) * MINUTE, "order", "q"))  # long after its page, when the last one, on which nothing was clicked, had come
    data = made(tmp_path, rows, catalogue({"item": "i"}, {"item": "j"}), split="last-page")
    assert (names(data, 0), data.train_end.tolist(), data.valid_end.tolist()) == (["a", "c", "f", "g", "d"], [3], [4])
    pages = pq.read_table(tmp_path / "pages.parquet").to_pylist()
    # What is held out of a page takes all of it along; b, e and h were neither described nor liked.
    assert [page["parts"] for page in pages] == [[0], [2, 2], [0], [1], [2, 2]]
    assert [row["part"] for row in feedback(tmp_path)] == [0, 2, 2, 0, 1, 2, 2]


def test_exposures_and_dislikes_are_on_pages_but_not_in_histories(tmp_path: Path) -> None:
    rows = [
        ("u", "a", 1, "exposure", "p"),
        ("u", "a", 2, "click", "p"),
        ("u", "b", 3, "exposure", "p"),
        ("u", "c", 4, "hate", "p"),
        ("u", "c", 5, "click", "p"),
        ("u", "d", 6, "exposure", "p"),
    ]
    data = made(tmp_path, [*rows, ("v", "b", 9, "click"), ("w", "z", 10, "exposure")])
    assert [names(data, user) for user in range(2)] == [["a", "c"], ["b"]]
    page = pq.read_table(tmp_path / "pages.parquet").to_pylist()[0]
    shown = [(data.item_ids[item], action) for item, action in zip(page["items"], page["actions"], strict=True)]
    assert shown == [("a", "click"), ("b", "exposure"), ("c", "hate")], "d was never described nor used"


def test_sessions_end_after_silence_and_what_is_held_out_of_a_page_is_told_apart(tmp_path: Path) -> None:
    rows = [("u", f"i{n}", moment * MINUTE, "click") for n, moment in enumerate([0, 10, 39, 70, 80, 81])]
    made(tmp_path, rows, session_gap_seconds=1800)
    pages = pq.read_table(tmp_path / "pages.parquet")
    assert pages["parts"].to_pylist() == [[0, 0, 0], [0, 1, 2]]
    assert pages["time"].to_pylist() == [0, 70 * MINUTE]


def test_repeats_in_a_row_fold_into_their_strongest(tmp_path: Path) -> None:
    rows = [("u", "a", 1, "click"), ("u", "a", 2, "like"), ("u", "b", 3, "click"), ("u", "a", 4, "click"), ("v", "a", 5, "click")]
    data = made(tmp_path / "c", rows)
    assert names(data, 0) == ["a", "b", "a"]
    assert pq.read_table(tmp_path / "c" / "users.parquet")["actions"].to_pylist()[0] == ["like", "click", "click"]
    assert names(made(tmp_path / "n", rows, deduplicate="none"), 0) == ["a", "a", "b", "a"]
    assert names(made(tmp_path / "a", rows, deduplicate="all"), 0) == ["a", "b"]


def test_thin_users_and_items_leave_until_nothing_changes(tmp_path: Path) -> None:
    rows = [(user, item, n, "click") for n, (user, item) in enumerate([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("c", "x"), ("c", "z"), ("d", "z")])]
    data = made(tmp_path, rows, min_user_events=2, min_item_events=2, keep_cold_items=False)
    assert (data.user_ids, data.item_ids) == (("a", "b"), ("x", "y"))
    assert sum(data.header["dropped"].values()) == 3


def test_deleted_items_leave_and_cold_ones_stay(tmp_path: Path) -> None:
    rows = [("u", "gone", 1, "click"), ("u", "kept", 2, "click")]
    items = catalogue(
        {"item": "gone", "deleted": True},
        {"item": "cold", "title": "Cold", "categories": ["c"], "embedding": [1.0, 2.0]},
        {"item": "hidden", "available": False},
    )
    data = made(tmp_path, rows, items)
    assert data.item_ids == ("cold", "hidden", "kept")
    assert data.item_table.to_pylist()[0] == {
        "item": "cold", "count": 0, "title": "Cold", "text": "", "categories": ["c"], "attributes": "{}", "available": True, "embedding": [1.0, 2.0],
    }  # fmt: skip
    assert (data.item_table["available"].to_pylist(), data.item_table["embedding"].to_pylist()[2]) == ([True, False, True], None)


def test_temporal_split_trains_only_on_the_past(tmp_path: Path) -> None:
    rows = [(f"u{n % 5}", f"i{n % 11}", 1000 + n, "click") for n in range(100)]
    data = made(tmp_path, rows, split="temporal", valid_fraction=0.2, test_fraction=0.1, deduplicate="none")
    train, rest = [], []
    for user in range(5):
        times = data.times[data.offsets[user] : data.offsets[user + 1]]
        train += times[: data.train_end[user]].tolist()
        rest += times[data.train_end[user] :].tolist()
    assert max(train) < min(rest)
    assert (len(train), len(rest)) == (70, 30)
    with pytest.raises(BadData, match="leaves no event to train on"):
        made(tmp_path, rows, split="temporal", valid_time=5)


def test_a_temporal_splits_times_part_exposures_and_pages_of_everybody(tmp_path: Path) -> None:
    """Of those who like nothing after them, too, and of those who like something only long after them."""
    liked = [
        ("quits", "a", 10, "click", "o"),
        ("returns", "a", 10, "click", "o"),
        ("returns", "b", 150, "click", "s"),
        ("returns", "c", 290, "click", "t"),
        ("late", "c", 295, "click", "t"),
    ]
    shown = [
        (user, item, time, "exposure", page)
        for user in ("quits", "returns", "late", "silent")
        for page, item, time in (("p", "b", 90), ("q", "c", 101), ("q", "a", 180), ("r", "b", 205))
    ]
    data = made(tmp_path, liked + shown, split="temporal", valid_time=100, test_time=200, keep_cold_items=True)
    feedback = pq.read_table(tmp_path / "feedback.parquet")
    times, parts = feedback["time"].to_numpy(), feedback["part"].to_numpy()
    assert len(times) == len(liked + shown)
    assert parts.tolist() == ((times >= 100).astype(int) + (times >= 200)).tolist()
    kept, _ = Pages.load(tmp_path, ACTIONS).training(data)
    shown_there = np.repeat(kept.times_P, np.diff(kept.offsets_P1))
    assert {data.user_ids[user] for user in kept.users_P} == {"quits", "returns", "late"} and kept.times_P.max() < 100
    assert len(shown_there) == 5, "what came later is of a later part"


def test_max_history_keeps_the_latest(tmp_path: Path) -> None:
    data = made(tmp_path, [("u", f"i{n}", n, "click") for n in range(9)], max_history=4, keep_cold_items=False)
    assert names(data, 0) == ["i5", "i6", "i7", "i8"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"splt": 1}, "splt"),
        ({"split": "random"}, "temporal"),
        ({"min_user_events": 0}, "at least 1"),
        ({"test_fraction": 0.95}, "below 1"),
        ({"max_history": "9"}, "max_history"),
        ({"max_history": True}, "max_history"),
    ],
)
def test_a_wrong_option_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DatasetConfig.parse(config, session_gap_seconds=1800)


def test_an_empty_result_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="relax the conditions"):
        made(tmp_path, [("u", "a", 1, "exposure")])


EVENTS = st.lists(
    st.tuples(
        st.sampled_from("uvw"),
        st.sampled_from("abcde"),
        st.integers(0, 6).map(lambda n: n * 20 * MINUTE),
        st.sampled_from(sorted(ACTIONS)),
        st.sampled_from([None, "p", "q"]),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=EVENTS,
    seed=st.integers(0, 9),
    groups=st.integers(1, 4),
    part_rows=st.integers(1, 50),
    config=st.fixed_dictionaries(
        {
            "split": st.sampled_from(["leave-one-out", "last-page", "temporal"]),
            "deduplicate": st.sampled_from(["consecutive", "all", "none"]),
            "min_user_events": st.integers(1, 4),
            "min_item_events": st.integers(1, 4),
            "max_history": st.integers(0, 5),
        }
    ),
)
def test_only_the_content_decides(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], seed: int, groups: int, part_rows: int, config: dict[str, Any]
) -> None:
    """Neither the order of the events, nor the files that they are in, nor the parts in which they are worked on."""
    rows = list(dict.fromkeys(rows))
    shuffled = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    try:
        data = made(one, rows, **config)
    except BadData:
        return
    store(log(shuffled), two, groups=groups, part_rows=part_rows, **config)
    for path in sorted(one.iterdir()):
        assert digest_file(path) == digest_file(two / path.name), path.name
    pages = pq.read_table(one / "pages.parquet").to_pylist()
    for user in range(len(data.user_ids)):
        own = data.times[data.offsets[user] : data.offsets[user + 1]]
        assert (np.diff(own) >= 0).all()
        assert 0 <= data.train_end[user] <= data.valid_end[user] <= len(own)
    assert [page["user"] for page in pages] == sorted(page["user"] for page in pages)
    assert sum(data.item_table["count"].to_pylist()) == int(data.train_end.sum())
    assert json.loads((one / "dataset.json").read_text())["counts"]["events"] == len(data.items)


def test_a_broken_off_run_goes_on_with_what_is_left(tmp_path: Path) -> None:
    rows = [(f"u{n % 40:02}", f"i{n % 11}", 1000 + n, "click") for n in range(400)]
    store(log(rows), tmp_path / "whole", part_rows=50, min_user_events=2)
    seen: list[str] = []

    def stop_at(limit: int) -> Tick:
        def tick(done: int, total: int, name: str) -> None:
            seen.append(f"{name} {done}")
            if len(seen) == limit:
                raise InterruptedError

        return tick

    limit = 1
    while True:
        seen.clear()
        try:
            store(log(rows), tmp_path / "resumed", part_rows=50, min_user_events=2, workdir=tmp_path / "steps", tick=stop_at(limit))
            break
        except InterruptedError:
            limit += 3
    assert limit > 20
    for path in sorted((tmp_path / "whole").iterdir()):
        assert digest_file(path) == digest_file(tmp_path / "resumed" / path.name), path.name


SHOWN = st.lists(  # pages: user, minutes since the one before, items, and of those that were taken after how many minutes
    st.tuples(st.sampled_from("uvw"), st.integers(0, 40), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), st.dictionaries(st.integers(0, 3), st.integers(1, 90), max_size=3)),
    min_size=3, max_size=24,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=SHOWN, split=st.sampled_from(["leave-one-out", "last-page", "temporal"]), named=st.booleans())
def test_an_answer_that_comes_later_joins_its_exposure_and_takes_it_along(
    tmp_path_factory: pytest.TempPathFactory, pages: list[tuple[str, int, list[str], dict[int, int]]], split: str, named: bool
) -> None:
    """So nothing that is held out stands in training as shown and not taken, nor is it known there that it was taken."""
    rows, taken, now = [], {}, 0
    for number, (user, pause, items, answers) in enumerate(pages):
        now += pause * MINUTE + 1
        # Without names, pages are told apart by silence.
        begin, page = (now, f"p{number}") if named else (now + number * 200 * MINUTE, None)
        rows += [(user, item, begin, "exposure", page) for item in items]
        for place, wait in answers.items():
            if place < len(items):
                moment = begin + (wait if named else wait % 29 + 1) * MINUTE
                rows.append((user, items[place], moment, "click", page))
                taken[user, items[place], begin] = moment
    folder = tmp_path_factory.mktemp("late")
    try:
        data = made(folder, rows, split=split, deduplicate="none")
    except BadData:
        return
    found, number_of = feedback(folder), {name: row for row, name in enumerate(data.item_ids)}
    shown = [(user, item, time) for user, item, time, action, _ in rows if action == "exposure" and item in number_of]
    assert len(found) == len(shown)
    name_of = dict(enumerate(data.user_ids)) | {-1: None}
    exposed = {(name_of[row["user"]], data.item_ids[row["item"]], row["time"]): row for row in found if row["user"] >= 0}
    ends = {
        user: [len(data.history(row)) and train, valid]
        for row, (user, train, valid) in enumerate(zip(data.user_ids, data.train_end.tolist(), data.valid_end.tolist(), strict=True))
    }
    for (user, item, time), moment in taken.items():
        row = exposed[user, item, time]
        assert row["signals"] == ["click"]
        numbers = [
            place
            for place, own in enumerate(data.times[data.offsets[data.user_ids.index(user)] : data.offsets[data.user_ids.index(user) + 1]])
            if own == moment
        ]
        if row["part"] == 0:
            assert max(numbers) < ends[user][0], "what is held out is not known in training"
        if split == "temporal":
            begun, done = (sum(when >= data.header[end] for end in ("valid_time", "test_time")) for when in (time, moment))
            assert row["part"] == (-1 if done > begun == 0 else begun)
    assert all(key in taken or not row["signals"] for key, row in exposed.items())
    stored = Pages.of(data, folder)
    assert [(data.user_ids[user], time) for user, time in zip(stored.users_P.tolist(), stored.times_P.tolist(), strict=True)] == list(
        dict.fromkeys((name_of[row["user"]], row["time"]) for row in found if row["user"] >= 0)
    )
    assert stored.parts_S.tolist() == [row["part"] for row in found if row["user"] >= 0]
    if split == "last-page":
        by_page: dict[tuple[Any, ...], set[int]] = {}
        for row in found:
            by_page.setdefault((row["user"], row["page"]), set()).add(row["part"])
        assert all(len(parts) == 1 for parts in by_page.values())


def test_the_report_sees_no_bias_by_position_where_there_is_none_and_the_one_that_is_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, chances in (("even", [0.3] * 4), ("steep", [0.5, 0.3, 0.2, 0.2])):
        rows: list[tuple[Any, ...]] = []
        for user in range(200):
            for page in range(6):
                begin = (user * 6 + page) * 60 * MINUTE
                items = rng.permutation(30)[:4]
                rows += [(f"u{user}", f"i{item}", begin, "exposure", f"p{page}", None, None, None, place) for place, item in enumerate(items)]
                # Who looks at a page clicks from the bottom to the top.
                rows += [(f"u{user}", f"i{items[place]}", begin + 9 - place, "click", f"p{page}") for place in range(4) if rng.random() < chances[place]]
        for split in ("leave-one-out", "last-page", "temporal"):
            report = made(tmp_path / name / split, rows, split=split).header["page_report"]
            lifts = [entry["lift"] for entry in report["positions"]]
            if name == "even":
                assert report["pages"] == 1200 and all(abs(lift - 1) < 0.12 for lift in lifts), lifts
            else:
                assert 1.5 < lifts[0] < 1.8 and max(lifts[2:]) < 0.8 and "at position 1" in report["verdict"], lifts


def feedback(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "feedback.parquet").to_pylist()


def test_feedback_keeps_exposures_with_everything_that_was_done(tmp_path: Path) -> None:
    rows = [
        ("a", "x", 1, "exposure", "p", None, None, "home", 4, 0.5, None),
        ("a", "y", 2, "exposure", "p", 0.25, None, "home", 0, 0.1, ["click", "like"]),
        ("a", "x", 2, "order", "p", None, None, None, None, None, None),
        ("a", "z", 3, "click", None, None, None, "search", None, None, None),
        ("a", "x", 4, "click"),
        ("a", "z", 5, "click"),
        ("b", "y", 7, "hate", "q"),
    ]
    made(tmp_path, rows, catalogue({"item": "y"}))
    found = feedback(tmp_path)
    assert [(row["user"], row["item"], row["page"], row["tab"], row["position"], row["signals"], row["part"]) for row in found] == [
        (0, 0, 0, "home", 4, ["order"], 0),
        (0, 1, 0, "home", 0, ["click", "like"], 0),
        (0, 2, 1, "search", 0, ["click"], 0),
        (0, 0, 2, None, 0, ["click"], 1),
        (0, 2, 2, None, 1, ["click"], 2),
        (-1, 1, 3, None, 0, ["hate"], 0),
    ]
    assert [row["propensity"] for row in found[:3]] == [0.5, pytest.approx(0.1), None] and [row["value"] for row in found[:3]] == [None, 0.25, None]
