from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.event_actions import EventActions, of_training

USERS = st.lists(st.lists(st.sampled_from(["click", "like", "order"]), max_size=5), min_size=1, max_size=5)


def write(folder: Path, users: list[list[str]]) -> Path:
    lengths = [len(actions) for actions in users]
    pq.write_table(pa.table({"item": ["a"], "count": [1], "title": ["a"]}), folder / "items.parquet")
    columns = {
        "user": [str(user) for user in range(len(users))],
        "items": pa.array([[0] * length for length in lengths], pa.list_(pa.int32())),
        "times": pa.array([[0] * length for length in lengths], pa.list_(pa.int64())),
        "actions": pa.array(users, pa.list_(pa.string())),
        "train_end": pa.array([length // 2 for length in lengths], pa.int32()),
        "valid_end": pa.array(lengths, pa.int32()),
    }
    pq.write_table(pa.table(columns), folder / "users.parquet", row_group_size=2)
    (folder / "dataset.json").write_text("{}")
    return folder


@given(USERS)
def test_each_event_has_the_number_of_its_action(tmp_path_factory: pytest.TempPathFactory, users: list[list[str]]) -> None:
    folder = write(tmp_path_factory.mktemp("d"), users)
    actions, dataset = EventActions.load(folder), Dataset.load(folder)
    assert [actions.names[number] for number in actions.numbers_E] == [action for own in users for action in own]
    training = [action for own in users for action in own[: len(own) // 2]]
    assert [actions.names[number] for number in of_training(dataset, actions.numbers_E)] == training
    model = actions.among(["order", "view", "click"])[actions.numbers_E] if len(actions.numbers_E) else np.zeros(0)
    assert model.tolist() == [{"order": 1, "click": 3}.get(action, 0) for own in users for action in own]


def test_a_data_set_without_them_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, [["click"]])
    pq.write_table(pq.read_table(folder / "users.parquet").drop_columns(["actions"]), folder / "users.parquet")
    with pytest.raises(Conflict, match="leave `actions` out of features"):
        EventActions.load(folder)
