"""A batch's negatives: what is drawn, what goes into the loss, and that the room changes nothing of what a run computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.job import run
from semantide.services.training.negatives import BatchNegatives, mix_of
from semantide.services.training.recipes import NegativesConfig, TrainConfig, recipe
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import Message, NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errands import Errands
from semantide.shared.errors import BadData, Conflict
from semantide.shared.jagged import Jagged
from semantide.shared.jobs import JobContext
from semantide.shared.negative_shards import store_shard
from semantide.shared.negative_source import BeamLists, NegativeSource, TrainingEvents

COUNTS = np.arange(1, 31)
CODES = np.stack([np.arange(30) // 5, np.arange(30) % 5], 1)
QUICK: dict[str, Any] = {
    "epochs": 2, "items_per_batch": 48, "warmup_steps": 2, "num_negatives": 6, "negative_scope": "target", "negative_power": 0.5,
    "retriever": {"hidden_size": 16, "num_layers": 1, "num_heads": 2},
}  # fmt: skip


def configured(scope: str = "target", num_negatives: int = 4, **hard: Any) -> TrainConfig:
    config = replace(recipe("retriever-tiny"), num_negatives=num_negatives, negative_scope=scope, negative_power=0.75)  # type: ignore[arg-type]
    return replace(config, negatives=NegativesConfig(**hard))


def batch_of(histories: list[list[int]]) -> HistoryBatch:
    return HistoryBatch.of(Jagged.from_sequences(histories))


@pytest.mark.parametrize("scope", ["batch", "target"])
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("prefix", [0, 3])
def test_what_is_drawn_comes_back_as_arguments_of_the_loss(scope: str, in_batch: bool, prefix: int) -> None:
    config = configured(scope, in_batch=in_batch, prefix=prefix, expansion=3)
    negatives = BatchNegatives.of(config, COUNTS, CODES)
    batch = batch_of([[3, 3, 7], [12, 29]])
    ids = negatives.draw(batch, torch.Generator().manual_seed(1))
    own, shared = prefix + (4 if scope == "target" else 0), (4 if scope == "batch" else 0) + (4 if in_batch else 0)
    assert len(ids) == 5 * own + shared
    fetched_U, at = torch.unique(ids, return_inverse=True)
    found = negatives.arguments(batch.items.values, fetched_U[at], at)
    assert ("negatives_TR" in found, "shared_S" in found, "partners_MT" in found) == (own > 0, shared > 0, own > 0)
    if own:
        assert found["negatives_TR"].shape == found["log_q_TR"].shape == (5, own)
        assert found["partners_MT"].sort(1).values.tolist() == [list(range(5))] * 2
    if prefix:
        rows_TR = fetched_U[found["negatives_TR"]][:, own - prefix :]
        assert (rows_TR // 5 == batch.items.values.unsqueeze(1) // 5).all()
    if shared:
        assert found["shared_S"].shape == found["log_q_S"].shape == (shared,)
    if in_batch:
        assert fetched_U[found["shared_S"][-4:]].tolist() == [3, 7, 12, 29]
    assert torch.equal(ids, negatives.draw(batch, torch.Generator().manual_seed(1)))
    assert own + shared == 0 or in_batch or not torch.equal(ids, negatives.draw(batch, torch.Generator().manual_seed(2)))


def test_mixtures_follow_the_configuration() -> None:
    assert mix_of(configured("batch")) is None
    mix = mix_of(configured("target", prefix=2, beams=1))
    assert mix is not None and (mix.popularity, mix.uniform, mix.prefix, mix.beams, mix.exponent) == (4, 0, 2, 1, 0.75)
    uniform = mix_of(replace(configured(), negative_power=0.0))
    assert uniform is not None and (uniform.uniform, uniform.popularity) == (4, 0)
    with pytest.raises(ValueError, match="input `beams`"):
        BatchNegatives.of(configured(beams=2), COUNTS, CODES)
    with pytest.raises(ValueError, match="precision is 'int4'"):
        NegativesConfig(precision="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expansion is 0"):
        NegativesConfig(expansion=0)


@pytest.mark.parametrize("skip_rate", [0.0, 0.5])
def test_every_target_of_a_batch_knows_its_event(ring: Dataset, skip_rate: float) -> None:
    events = TrainingEvents.of(ring)
    config = replace(recipe("retriever-tiny"), max_items=4, crop="cover", skip_rate=skip_rate, items_per_batch=32)
    for number in (0, 1):
        epoch = Sampler(ring.train_histories(), config, 3).epoch(number)
        for index in range(len(epoch)):
            batch = epoch.batch(index)
            assert batch.events_T is not None and batch.epoch == batch.to("cpu").epoch == number
            assert np.array_equal(events.rows_E[batch.events_T.numpy()], batch.items.values.numpy())
            for user in Jagged(torch.from_numpy(events.users_E[batch.events_T.numpy()]), batch.items.offsets_B1):
                assert len(set(user.tolist())) == 1


def test_a_run_is_the_same_with_the_room_and_without(
    make_job: Callable[..., JobContext], inputs: dict[str, str], store: ArtifactStore, queues: Any, broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = TrainingEvents.of(Dataset.load(store.get(inputs["dataset"])))
    cuts_C = np.arange(1, len(events.rows_E), 2)
    BeamLists(cuts_C, np.random.default_rng(0).integers(0, 60, (len(cuts_C), 5)).astype(np.int32)).save(tmp_path / "beams")
    beams = store.put("beams", tmp_path / "beams", inputs={"dataset": inputs["dataset"]})
    hard = {"prefix": 2, "beams": 2, "expansion": 2, "in_batch": True, "precision": "float16"}
    answered: list[NegativesWanted] = []

    def answer(message: Message) -> None:
        if not isinstance(message, NegativesWanted):
            return
        # As the room would, at once.
        rows = NegativeSource.of(message, store).shard(message.seed, message.epoch, message.shard)
        Errands(NegativesWanted, broker, store).put(message, store_shard(message, rows, store), 0.0)
        answered.append(message)

    monkeypatch.setattr(queues, "send", answer)
    references = []
    for ahead in (False, True):
        job = make_job("train", recipe="retriever-tiny", config={**QUICK, "negatives": {**hard, "ahead": ahead}}, inputs={**inputs, "beams": beams}, seed=5)
        folder = store.get(run(job).artifacts["model"])
        references.append((folder / "vectors.parquet").read_bytes() + (folder / "model.safetensors").read_bytes())
    assert references[0] == references[1]
    assert {message.epoch for message in answered} == {0, 1, 2} and all(message.beams == beams and message.catalog == inputs["catalog"] for message in answered)
    assert json.loads((store.get(store.list("negatives")[0]) / "wanted.json").read_text())["epoch"] in (1, 2), "what was used is taken away"


def test_what_hard_negatives_need_is_asked_for(make_job: Callable[..., JobContext], inputs: dict[str, str]) -> None:
    for hard, given, error, text in (
        ({"prefix": 1}, {"dataset": inputs["dataset"]}, Conflict, "needs the input 'catalog'"),
        ({"beams": 1}, inputs, Conflict, "needs the input 'beams'"),
        ({"prefix": 1, "prefix_levels": 3}, inputs, BadData, "that many levels"),
        ({"wrong": 1}, inputs, BadData, "negatives.wrong"),
    ):
        with pytest.raises(error, match=text):
            run(make_job("train", recipe="retriever-tiny", config={**QUICK, "negatives": hard}, inputs=given))
