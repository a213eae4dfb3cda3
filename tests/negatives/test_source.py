"""Shards of negatives: a function of what asks for them; what comes after training, and what a user took, stays out."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared import negative_source
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.executors import LocalExecutor, Steps
from semantide.shared.negative_sampling import NegativeMix, NegativeSampler
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
    events = TrainingEvents.of(Dataset.load(store.get(dataset)))
    assert source.num_shards >= 3 and source.num_events == len(events.rows_E)
    shards = {(seed, epoch, number): source.shard(seed, epoch, number) for seed in (0, 1) for epoch in (0, 1) for number in range(source.num_shards)}
    again = NegativeSource.of(wanted, store)
    for (seed, epoch, number), rows in shards.items():
        assert np.array_equal(rows, again.shard(seed, epoch, number))
    assert not np.array_equal(shards[0, 0, 0], shards[1, 0, 0]) and not np.array_equal(shards[0, 0, 0], shards[0, 1, 0])
    assert sum(len(shards[0, 0, number]) for number in range(source.num_shards)) == len(events.rows_E)
    rows, users = np.concatenate([shards[0, 0, number] for number in range(source.num_shards)]), events.users_E
    assert not events.known.holds(users[:, None], np.where(rows < 0, 10**6, rows))[rows >= 0].any()
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


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3)), max_size=30), st.integers(1, 500), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))
def test_an_epoch_by_an_executor_is_its_shards_one_by_one(lengths: list[tuple[int, int]], part_events: int, seed: int, prefix: int, beams: int) -> None:
    """Whatever the parts, users with no training event, and users of several shards; and each shard is what all events together give."""
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, 9, length) for length, _ in lengths]
    train_end = [max(len(history) - held_out, 0) for history, (_, held_out) in zip(histories, lengths, strict=True)]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(negative_source, "SHARD_EVENTS", 32)
        table = pa.table({"items": pa.array([history.tolist() for history in histories], pa.list_(pa.int32())), "train_end": pa.array(train_end, pa.int32())})
        pq.write_table(table, Path(folder) / "users.parquet", row_group_size=7)
        events = TrainingEvents.of_histories(table, 9)
        counts_N = np.bincount(events.rows_E, minlength=9)
        lists = BeamLists(np.arange(0, len(events.rows_E), 3), rng.integers(-1, 9, (-(-len(events.rows_E) // 3), 4)).astype(np.int32))
        mix, codes_NL = NegativeMix(uniform=1, popularity=3, prefix=prefix, beams=beams), rng.integers(-1, 3, (9, 2))
        source = NegativeSource(Path(folder) / "users.parquet", counts_N, mix, codes_NL, lists)
        drawn = list(source.epoch(Steps(LocalExecutor(), Path(folder)), 4, 2, part_events=part_events))
        assert len(drawn) == source.num_shards == -(-sum(train_end) // 32)
        sampler = NegativeSampler(mix, counts_N, codes_NL)
        for number, rows in enumerate(drawn):
            at_T = np.arange(number * 32, min(number * 32 + 32, len(events.rows_E)))
            beams_TW = lists.of(at_T, events) if beams else None
            expected = sampler.draw(
                events.rows_E[at_T], np.random.default_rng([4, 2, number]), users_T=events.users_E[at_T], known=events.known, beams_TW=beams_TW
            )
            assert np.array_equal(rows, expected) and np.array_equal(rows, source.shard(4, 2, number))


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
