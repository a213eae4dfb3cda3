"""Where rollouts begin, and what is known to be right there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.alignment_recipes import align_recipe
from semantide.services.training.rollout import Prompts
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.pages import Pages

NUM_ITEMS = 9
CONFIG = replace(align_recipe("grpo-sr"), prompts=4)


def dataset_of(histories: list[list[tuple[int, int]]], train: list[int]) -> Dataset:
    """Users with events of (time, item)."""
    events = [event for history in histories for event in history]
    offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])]).astype(np.int64)
    items = pa.table({"item": [str(row) for row in range(NUM_ITEMS)]})
    return Dataset(
        tuple(map(str, range(len(histories)))), tuple(items["item"].to_pylist()), np.array([item for _, item in events], np.int32),
        np.array([time for time, _ in events], np.int64), offsets, np.array(train, np.int32), np.diff(offsets).astype(np.int32), items, {},
    )  # fmt: skip


def pages_of(rows: list[tuple[int, int, list[tuple[int, float, int]]]]) -> Pages:
    """Pages of (user, time, [(item, intensity, part)])."""
    rows = sorted(rows, key=lambda row: row[:2])
    shown = [entry for row in rows for entry in row[2]]
    users, times = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    offsets = np.concatenate([[0], np.cumsum([len(row[2]) for row in rows])]).astype(np.int64)
    columns = (np.array([entry[column] for entry in shown], kind) for column, kind in enumerate((np.int64, np.float32, np.int8)))
    return Pages(users, times, offsets, *columns)


event_lists = st.lists(st.tuples(st.integers(0, 9), st.integers(0, NUM_ITEMS - 1)), max_size=6).map(sorted)


def every(prompts: Prompts) -> list[tuple[int, int, tuple[int, ...]]]:
    """All places of an epoch, each once."""
    found = [prompt for step in range(-(-len(prompts) // CONFIG.prompts)) for prompt in prompts.at(step)][: len(prompts)]
    return sorted((prompt.user, prompt.end, prompt.known) for prompt in found)


@settings(deadline=None)
@given(st.lists(event_lists, min_size=1, max_size=4), st.data())
def test_pages_positives_are_known_where_there_are_pages_and_the_next_events_elsewhere(histories: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    train = [data.draw(st.integers(0, len(history))) for history in histories]
    dataset = dataset_of(histories, train)
    entries = st.lists(
        st.tuples(st.integers(0, NUM_ITEMS - 1), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0]), st.integers(0, 2)),
        max_size=4,
        unique_by=lambda entry: entry[0],
    )
    moments = st.tuples(st.integers(0, len(histories) - 1), st.integers(0, 9))
    rows = [(*where, data.draw(entries)) for where in data.draw(st.lists(moments, max_size=6, unique=True))]
    most, many = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    clicked_from = data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.5]))
    config = replace(CONFIG, page_positives=most, positives=many, clicked_from=clicked_from)
    by_event = sorted(
        (user, end, tuple(item for _, item in history[end : min(end + many, train[user])]))
        for user, history in enumerate(histories) for end in range(1, train[user])
    )  # fmt: skip
    by_page = []
    for user, time, shown in rows:
        history, positives = histories[user], [entry for entry in shown if entry[1] >= (clicked_from or 1) and entry[2] == 0]
        before = min(sum(event[0] < time for event in history), train[user])
        if positives and before:
            by_page.append((user, before, tuple(item for item, *_ in sorted(positives, key=lambda entry: -entry[1])[:most])))
    for pages, expected in ((None, by_event), (pages_of(rows), sorted(by_page) or by_event)):
        if expected:
            assert every(Prompts(dataset, config, 3, pages)) == expected
        else:
            with pytest.raises(BadData, match="no user of the data set has two training events"):
                Prompts(dataset, config, 3, pages)
    if by_event:
        assert every(Prompts(dataset, replace(config, page_positives=0), 3, pages_of(rows))) == by_event
