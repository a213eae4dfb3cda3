"""Shards of negatives: a function of what asks for them; what comes after training, and what a user took, stays out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from semantide.shared import negative_source
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.negative_source import BeamLists, NegativeSource, TrainingEvents


def test_events_are_the_training_parts_in_order(store: ArtifactStore, dataset: str) -> None:
    loaded = Dataset.load(store.get(dataset))
    events = TrainingEvents.of(loaded)
    assert np.array_equal(events.rows_E, np.concatenate(list(loaded.train_histories())))
    assert np.array_equal(np.bincount(events.users_E, minlength=len(loaded.user_ids)), loaded.train_end)
    # What is held out is unknown: a mask that knew it would tell the model what to expect.
    later = [(user, row) for user in range(len(loaded.user_ids)) for row in loaded.history(user)[loaded.train_end[user] :].tolist()]
    trained = set(zip(events.users_E.tolist(), events.rows_E.tolist(), strict=True))
    held_out = [pair for pair in later if pair not in trained]
    assert held_out and not any(events.known.holds(np.array([user]), np.array([row]))[0] for user, row in held_out)


def test_a_shard_is_a_function_of_seed_epoch_and_number(store: ArtifactStore, dataset: str, catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negative_source, "SHARD_EVENTS", 32)
    wanted = NegativesWanted(dataset=dataset, catalog=catalog, mix={"popularity": 4, "prefix": 2})
    source = NegativeSource.of(wanted, store)
    assert source.events.num_shards >= 3
    shards = {(seed, epoch, number): source.shard(seed, epoch, number) for seed in (0, 1) for epoch in (0, 1) for number in range(source.events.num_shards)}
    again = NegativeSource.of(wanted, store)
    for (seed, epoch, number), rows in shards.items():
        assert np.array_equal(rows, again.shard(seed, epoch, number))
    assert not np.array_equal(shards[0, 0, 0], shards[1, 0, 0]) and not np.array_equal(shards[0, 0, 0], shards[0, 1, 0])
    assert sum(len(shards[0, 0, number]) for number in range(source.events.num_shards)) == len(source.events.rows_E)
    rows, users = np.concatenate([shards[0, 0, number] for number in range(source.events.num_shards)]), source.events.users_E
    assert not source.events.known.holds(users[:, None], np.where(rows < 0, 10**6, rows))[rows >= 0].any()
    with pytest.raises(BadData, match="shard 99"):
        source.shard(0, 0, 99)


def test_beams_come_from_before_the_event_and_from_its_own_user(store: ArtifactStore, dataset: str) -> None:
    events = TrainingEvents.of(Dataset.load(store.get(dataset)))
    cuts_C = np.arange(2, len(events.rows_E), 3)
    lists = BeamLists(cuts_C, np.tile(cuts_C[:, None], (1, 2)).astype(np.int32))  # each list names its own cut
    found = lists.of(np.arange(len(events.rows_E)), events)
    for event, row in enumerate(found[:, 0].tolist()):
        before = [cut for cut in cuts_C.tolist() if cut <= event and events.users_E[cut] == events.users_E[event]]
        assert row == (before[-1] if before else -1)


def test_what_a_mixture_needs_is_asked_for(store: ArtifactStore, dataset: str, tmp_path: Path) -> None:
    other = tmp_path / "beams"
    BeamLists(np.zeros(0, dtype=np.int64), np.zeros((0, 4), dtype=np.int32)).save(other)
    foreign = store.put("beams", other, inputs={"dataset": "datasets/sha256-" + "0" * 64})
    for changes, error, text in (
        ({"mix": {"prefix": 2}}, BadData, "name the catalog"),
        ({"mix": {"beams": 2}}, BadData, "beams artifact"),
        ({"mix": {"beams": 2}, "beams": foreign}, Conflict, "run a negatives job"),
        ({"mix": {"wrong": 2}}, BadData, "'wrong' is unknown"),
        ({"mix": {"popularity": 0}}, BadData, "no source"),
    ):
        with pytest.raises(error, match=text):
            NegativeSource.of(NegativesWanted(dataset=dataset, **changes), store)
