"""The paired test before a model goes live."""

import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from semantide.services.training.evaluate import EvaluateConfig
from semantide.services.training.job import run
from semantide.services.training.judgement import judge
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import CandidateJudged, ModelTrained
from semantide.shared.errors import BadData, Conflict

BOUNDS = {"hr@50": 0.02}
QUICK = {
    "items_per_batch": 64,
    "warmup_steps": 5,
    "learning_rate": 1e-2,
    "generator": {"num_layers": 1, "hidden_size": 32, "dropout": 0.0, "embedding_dropout": 0.0},
}


def hits(share: float, count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(count) < share).astype(float)


def test_the_same_model_is_not_worse_than_itself_and_a_clearly_worse_one_is() -> None:
    live = hits(0.4, 2000)
    same = judge({"hr@50": live}, {"hr@50": live}, {"hr@50": 0.0})
    assert same.not_worse and same.cases == 2000 and same.figures["hr@50"]["low"] == 0
    worse = live * hits(0.9, 2000, 1)
    found = judge({"hr@50": worse}, {"hr@50": live}, BOUNDS)
    assert not found.not_worse and "hr@50 may have lost" in found.reason and "2.00%" in found.reason
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_model_that_loses_more_than_allowed_passes_once_in_twenty_times() -> None:
    rng = np.random.default_rng(3)
    passed = 0
    for _ in range(400):
        live = rng.random(3000) < 0.4
        flips = rng.random(3000)
        # Loses a tenth of its hits and wins so many others that exactly the bound is lost.
        candidate = np.where(live, flips > 0.1, flips < (0.04 - 0.008) / 0.6)
        passed += judge({"hr@50": candidate.astype(float)}, {"hr@50": live.astype(float)}, BOUNDS).not_worse
    assert passed / 400 < 0.09


def test_what_too_few_users_cannot_show_is_held_back() -> None:
    for count in (0, 1, 20):
        live, candidate = hits(0.4, count), hits(0.4, count, 1)
        assert not judge({"hr@50": candidate}, {"hr@50": live}, BOUNDS).not_worse


def test_all_bounds_must_hold() -> None:
    live = {"hr@50": hits(0.4, 500), "ndcg@50": hits(0.2, 500)}
    candidate = {"hr@50": live["hr@50"], "ndcg@50": live["ndcg@50"] * hits(0.7, 500, 2)}
    found = judge(candidate, live, {"hr@50": 0.02, "ndcg@50": 0.02})
    assert not found.not_worse and "ndcg@50" in found.reason and "hr@50" not in found.reason


def test_bounds_decide_which_lists_are_made() -> None:
    config = EvaluateConfig.of({"bounds": {"hr@50": 0.02, "ndcg@200": 0.1}})
    assert config.ks == (10, 50, 200) and config.beam_width == 200
    for wrong in ({"hr": 0.1}, {"coverage@10": 0.1}, {"hr@50": -0.1}, {"hr@50": True}, {"hr@50": 1.0}, "hr@50"):
        with pytest.raises(ValueError, match="bounds"):
            EvaluateConfig.of({"bounds": wrong})
    with pytest.raises(ValueError, match="publish"):
        EvaluateConfig(publish=True)


def test_a_candidate_is_judged_user_by_user_and_serving_is_told(make_job: Any, inputs: dict[str, str], store: ArtifactStore, queues: Any) -> None:
    live, good = (run(make_job("train", recipe="tiny", config={**QUICK, "epochs": epochs}, inputs=inputs)).artifacts["model"] for epochs in (1, 6))
    queues.sent.clear()

    def judged(model: str, against: str) -> CandidateJudged:
        config = {"bounds": {"hr@10": 0.02}, "publish": True, "beam_width": 20}
        job = make_job("evaluate", config=config, inputs={**inputs, "model": model, "live": against, "live_catalog": inputs["catalog"]})
        outcome = run(job)
        folder = store.get(outcome.artifacts["evaluation"])
        cases = pq.read_table(folder / "cases.parquet")
        assert cases.num_rows == 2 * outcome.result["users"]
        users = cases["user"].to_pylist()
        assert users[: len(users) // 2] == users[len(users) // 2 :]
        for index, row in enumerate(outcome.result["rows"]):
            part = cases.slice(index * len(users) // 2, len(users) // 2)
            assert np.mean(part["ndcg@10"].to_pylist()) == pytest.approx(row["metrics"]["ndcg@10"], abs=1e-6)
        message = queues.sent.pop()
        assert not queues.sent and message.job_id == job.id and message.figures == outcome.result["judgement"]["figures"]
        assert isinstance(message, CandidateJudged)
        return message

    better = judged(good, live)
    assert better.not_worse and better.figures["hr@10"]["candidate"] > better.figures["hr@10"]["live"] and better.cases == 80
    worse = judged(live, good)
    assert not worse.not_worse and (worse.model, worse.against, worse.catalog) == (live, good, inputs["catalog"])
    assert judged(good, good).not_worse


def test_what_cannot_be_compared_is_held_back_with_the_reason(make_job: Any, inputs: dict[str, str], queues: Any, store: ArtifactStore, tmp_path: Any) -> None:
    model = run(make_job("train", recipe="tiny", config={**QUICK, "epochs": 1}, inputs=inputs)).artifacts["model"]
    folder = tmp_path / "foreign"
    folder.mkdir()
    for path in store.get(model).iterdir():
        if path.is_file() and path.name != "manifest.json":
            (folder / path.name).write_bytes(path.read_bytes())
    card = json.loads((folder / "semantide.json").read_text())
    (folder / "semantide.json").write_text(json.dumps({**card, "tokenizer_digest": "0" * 64}))
    foreign = store.put("models", folder)
    queues.sent.clear()
    run(make_job("evaluate", config={"bounds": BOUNDS, "publish": True}, inputs={**inputs, "model": model, "live": foreign, "live_catalog": inputs["catalog"]}))
    (message,) = queues.sent
    assert not message.not_worse and "cannot be compared" in message.reason
    with pytest.raises(Conflict, match="live"):
        run(make_job("evaluate", config={"bounds": BOUNDS}, inputs={**inputs, "model": model}))


def test_a_live_model_of_an_older_catalog_is_compared_by_what_it_can_recommend(
    make_job: Any, inputs: dict[str, str], queues: Any, store: ArtifactStore, tmp_path: Any
) -> None:
    """A data set that has grown by some items is the ordinary case, and must not hold every candidate back for ever."""
    model = run(make_job("train", recipe="tiny", config={**QUICK, "epochs": 1}, inputs=inputs)).artifacts["model"]
    whole = Catalog.load(store.get(inputs["catalog"]))

    def judged(kept: int) -> CandidateJudged:
        older = Catalog(whole.item_ids[:kept], whole.codes[:kept], whole.level_sizes, whole.tokenizer_digest)
        older.save(tmp_path / f"older-{kept}")
        refs = {**inputs, "model": model, "live": model, "live_catalog": store.put("catalogs", tmp_path / f"older-{kept}")}
        queues.sent.clear()
        run(make_job("evaluate", config={"bounds": BOUNDS, "publish": True}, inputs=refs))
        (message,) = queues.sent
        assert isinstance(message, CandidateJudged)
        return message

    found = judged(len(whole) - 1)
    assert found.not_worse and found.figures["hr@50"]["candidate"] >= found.figures["hr@50"]["live"] > 0
    assert found.reason == f"the live model lacks 1 of the {len(whole)} items"
    foreign = judged(len(whole) // 3)
    assert not foreign.not_worse and "cannot be compared" in foreign.reason and not foreign.figures


def test_retrievers_are_judged_by_the_same_test(make_job: Any, inputs: dict[str, str], queues: Any) -> None:
    quick = {"items_per_batch": 64, "max_items": 8, "retriever": {"hidden_size": 16, "num_layers": 1}, "promote": "if-not-worse"}
    models = [run(make_job("train", recipe="retriever-tiny", config={**quick, "epochs": epochs}, inputs=inputs)).artifacts["model"] for epochs in (1, 3)]
    assert [(sent.catalog, sent.promote) for sent in queues.sent if isinstance(sent, ModelTrained)] == [(None, "if-not-worse")] * 2
    queues.sent.clear()
    refs = {"dataset": inputs["dataset"], "model": models[1], "live": models[0]}
    run(make_job("evaluate", config={"bounds": {"hr@10": 0.5}, "publish": True}, inputs=refs))
    (message,) = queues.sent
    assert isinstance(message, CandidateJudged) and message.catalog is None and message.against == models[0] and message.cases == 80 and message.figures


def test_jobs_carry_the_wish_to_be_judged(make_job: Any, inputs: dict[str, str], queues: Any) -> None:
    job = make_job("train", recipe="tiny", config={**QUICK, "epochs": 1, "promote": "if-not-worse"}, inputs=inputs)
    outcome = run(job)
    assert queues.sent == [ModelTrained(job_id=job.id, model=outcome.artifacts["model"], catalog=inputs["catalog"], promote="if-not-worse")]
    with pytest.raises(BadData, match="if-not-worse"):
        run(make_job("train", recipe="tiny", config={"promote": "yes"}, inputs=inputs))
    with pytest.raises(BadData, match="only generators and retrievers"):
        run(make_job("train", recipe="sasrec", config={"promote": "if-not-worse"}, inputs=inputs))
