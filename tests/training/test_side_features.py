import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.batches import Sampler
from semantide.services.training.recipes import recipe
from semantide.services.training.side_features import SideFeatures
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.models.token_merger import MergerConfig
from semantide.shared.models.vocabulary import Vocabulary

EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 10**7)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(st.lists(EVENTS, min_size=1, max_size=5), st.permutations(["actions", "gaps"]), st.integers(0, 99))
def test_training_reads_what_serving_spells_or_nothing(histories: list[list[tuple[int, int, int]]], features: list[str], seed: int) -> None:
    merger = MergerConfig(True, "none", tuple(features), ("click", "buy"))
    histories = [sorted(history, key=lambda event: event[2]) for history in histories]
    actions = torch.tensor([event[1] for history in histories for event in history])
    side = SideFeatures(merger, actions)
    spelling = PromptSpelling(Vocabulary((5,)), merger, np.arange(1, 6)[:, None])
    sampler = Sampler(
        [np.array([item for item, _, _ in history]) for history in histories],
        recipe("tiny", {"skip_rate": 0}),
        seed,
        [np.array([time for _, _, time in history]) for history in histories],
    )
    batch = sampler.epoch(0).batch(0)
    torch.manual_seed(seed)
    found = side(batch).split(batch.items.lengths_B.tolist())
    for history, own in zip((histories[user] for user in batch.samples_B.tolist()), found, strict=True):
        rows, done, times = (np.array(column) for column in zip(*history, strict=True))
        spelled = spelling.prompt(rows, done, times // 1000)[1:].reshape(-1, 3)[:, 1:]
        assert own.tolist() in (spelled.tolist(), np.zeros_like(spelled).tolist())


def test_some_histories_are_read_without_and_most_with() -> None:
    sampler = Sampler([np.arange(3)] * 300, recipe("tiny", {"skip_rate": 0}), 0, [np.array([0, 10_000, 20_000])] * 300)
    batch = sampler.epoch(0).batch(0)
    torch.manual_seed(0)
    known = SideFeatures(MergerConfig(True, features=("gaps",)), None)(batch).view(-1, 3).any(1)
    assert 0.03 < 1 - float(known.float().mean()) < 0.2


def test_codes_alone_need_nothing_and_unknown_actions_are_refused(ring: Dataset) -> None:
    assert SideFeatures.of(MergerConfig(True), ring, None) is None
    with pytest.raises(Conflict, match="leave gaps out"):
        SideFeatures.of(MergerConfig(True, features=("gaps",)), ring, None)
    with pytest.raises(Conflict, match="make the data set anew"):
        SideFeatures.of(MergerConfig(True, features=("actions",)), ring, None)
