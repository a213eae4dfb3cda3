"""Prompts from the middle of a history are judged as of their moment: what their users did later tells nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.reward.building import _train_events
from semantide.services.reward.examples import examples, totals
from semantide.services.reward.item_spaces import halved_spaces, item_spaces
from semantide.services.reward.recipes import recipe
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.feedback import Feedback
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.reward_pairs import Histories
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.own_feedback import OwnFeedback
from semantide.shared.rollouts import Rollouts, Scores, rollouts_of

from .shade_shop import NUM_ITEMS, NUM_USERS, write_shop

TINY = recipe("tiny", {})


def other_later(shop: Path, folder: Path, user: int, end: int, seed: int) -> Path:
    """The same shop, where one user took other items, and answered otherwise, from one of his events on."""
    rng = np.random.default_rng(seed)
    shutil.copytree(shop, folder)
    users, feedback = pq.read_table(shop / "users.parquet"), pq.read_table(shop / "feedback.parquet")
    items, times = users["items"].to_pylist(), users["times"].to_pylist()
    since = times[user][end - 1]
    own = np.flatnonzero((feedback["user"].to_numpy() == user) & (feedback["time"].to_numpy() > since))
    shown, signals = feedback["item"].to_numpy().copy(), feedback["signals"].to_pylist()
    shown[own] = rng.integers(0, NUM_ITEMS, len(own))
    for row in own:
        signals[row] = ["click", "order"] if rng.random() < 0.5 else []
    items[user][end:] = rng.integers(0, NUM_ITEMS, len(items[user]) - end).tolist()
    names = feedback.column_names
    feedback = feedback.set_column(names.index("item"), "item", pa.array(shown, pa.int32())).set_column(
        names.index("signals"), "signals", pa.array(signals, pa.list_(pa.string()))
    )
    pq.write_table(feedback, folder / "feedback.parquet")
    pq.write_table(users.set_column(users.column_names.index("items"), "items", pa.array(items, pa.list_(pa.int32()))), folder / "users.parquet")
    return folder


def learned_from(folder: Path, model: PreferenceModel) -> PreferenceModel:
    """The model with all that is counted in a data set, and none of what is fitted."""
    dataset, feedback = Dataset.load(folder), Feedback.load(folder)
    found = examples(dataset, feedback, TINY)
    train_E = _train_events(dataset, found, TINY)
    spaces = item_spaces(dataset, train_E, TINY, 0)
    items, users = totals(found, NUM_ITEMS, dataset.user_ids)
    return replace(model, spaces=spaces, halves=halved_spaces(dataset, train_E, spaces, TINY, 0), items=items, users=users)


def prompt(folder: Path, user: int, end: int) -> Rollouts:
    dataset = Dataset.load(folder)
    first = int(dataset.offsets[user])
    return rollouts_of("d", [user], [dataset.items[first : first + end].astype(np.int64)], [dataset.times[first : first + end]], np.arange(NUM_ITEMS)[None])


def scores(model: PreferenceModel, folder: Path, user: int, end: int) -> Scores:
    return RewardScorer("rewards/sha256-" + "0" * 64, model, "d", folder).score(prompt(folder, user, end))


@settings(max_examples=10, deadline=None)
@given(user=st.integers(0, NUM_USERS - 1), share=st.floats(0, 0.9), seed=st.integers(0, 99))
def test_what_a_user_does_later_changes_nothing_of_what_a_prompt_is_worth(
    shop: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory, user: int, share: float, seed: int
) -> None:
    length = len(Dataset.load(shop).history(user))
    end = 1 + int(share * (length - 1))
    changed = other_later(shop, tmp_path_factory.mktemp("later") / "shop", user, end, seed)
    model = PreferenceModel.load(trained)
    one, other = learned_from(shop, model), learned_from(changed, model)
    before, after = scores(one, shop, user, end), scores(other, changed, user, end)
    for name in ("preference_BG", "relevance_BG", "gate_BG"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name


def test_totals_would_have_told(shop: Path, trained: Path, tmp_path: Path) -> None:
    """The change of the test above is seen by who is not told of the moment: by what is served now."""
    changed, model = other_later(shop, tmp_path / "shop", 3, 2, 0), PreferenceModel.load(trained)
    judged = []
    for folder in (shop, changed):
        of_folder, rollouts = learned_from(folder, model), prompt(folder, 3, 2)
        histories = Histories(rollouts.histories_E, np.zeros(2, np.int64))
        judged.append(of_folder.judge(np.array([3]), histories, rollouts.offsets_B1, np.zeros(NUM_ITEMS, np.int64), np.arange(NUM_ITEMS)))
    assert not np.allclose(judged[0].preference_X, judged[1].preference_X, atol=1e-4)
    assert not np.allclose(judged[0].relevance_X, judged[1].relevance_X, atol=1e-4)


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 2), st.integers(0, 4), st.booleans(), st.booleans()), max_size=25),
    st.integers(-1, 3), st.integers(-1, 3), st.integers(-1, 6),
)  # fmt: skip
def test_own_feedback_is_what_was_shown_before_and_since(rows: list[tuple[int, int, int, bool, bool]], user: int, item: int, time: int) -> None:
    users, items, times, given_, counted = (np.array([row[column] for row in rows], dtype) for column, dtype in enumerate((int, int, int, bool, bool)))
    nothing = np.zeros(len(rows))
    feedback = Feedback(users, items, times, nothing, nothing, nothing, given_[:, None], nothing, nothing, nothing, ("click",))
    own = OwnFeedback.of(feedback, ("click", "unheard"), 4, counted)
    mine = [row for row in rows if row[4] and row[0] == user >= 0]
    before, since = [row for row in mine if row[2] < time], [row for row in mine if row[2] >= time and row[1] == item]
    for (shown, signals), expected in (
        (own.before(np.array([user]), np.array([time])), before), (own.since(np.array([user]), np.array([item]), np.array([time])), since)
    ):  # fmt: skip
        assert (shown.tolist(), signals.tolist()) == ([len(expected)], [[sum(row[3] for row in expected), 0]])


def test_items_of_the_same_names_and_other_content_are_another_catalog(shop: Path, trained: Path, tmp_path: Path) -> None:
    model = PreferenceModel.load(trained)
    table = pq.read_table(shop / "items.parquet")
    for shift, refused in ((0, False), (1, True)):
        folder = tmp_path / str(shift)
        shutil.copytree(shop, folder)
        turned = {
            name: pa.array(np.roll(np.array(table[name].to_pylist(), dtype=object), shift, axis=0).tolist(), table[name].type)
            for name in ("title", "categories")
        }
        pq.write_table(pa.table({"item": table["item"], "count": table["count"], **turned}), folder / "items.parquet")
        if refused:
            with pytest.raises(
                Conflict, match=r"items of the same names, and 40 of 40 .* described otherwise in data set d: it is of another catalog; train one"
            ):
                RewardScorer("rewards/sha256-" + "0" * 64, model, "d", folder)
        else:
            RewardScorer("rewards/sha256-" + "0" * 64, model, "d", folder)
    bare = write_shop(tmp_path / "bare", described=False)
    RewardScorer("rewards/sha256-" + "0" * 64, model, "d", bare)  # what says nothing of itself is no contradiction
