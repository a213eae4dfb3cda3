"""The align job from artifact to artifact: what it keeps, what it refuses, and what it sends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.training import alignment_job
from semantide.services.training.alignment_job import align
from semantide.services.training.alignment_recipes import AlignConfig
from semantide.services.training.job import run
from semantide.services.training.world import World
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import ModelTrained
from semantide.shared.errors import BadData, Conflict, JobCancelled
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.models.generator import Generator
from semantide.shared.rollouts import Rollouts, Scores

MakeJob = Callable[..., JobContext]
TRAINED = {"epochs": 3, "items_per_batch": 64, "warmup_steps": 5, "learning_rate": 1e-2, "valid_beam_width": 20}
SHORT = {"steps": 4, "prompts": 16, "group": 6, "beams": 2, "evaluate_every": 2, "held_out_users": 40, "probes": 30, "learning_rate": 2e-3, "guard_loss": 1.0}


class NextOnTheRing:
    """Prefers what lies just ahead of the last item, as the ring has it; ``worst`` prefers what lies farthest."""

    def __init__(self, worst: bool = False) -> None:
        self.worst = worst

    def score(self, rollouts: Rollouts) -> Scores:
        last = np.array([rollouts.history(group)[-1] for group in range(len(rollouts))])
        ahead = (rollouts.items_BG - last[:, None]) % 60
        valid = rollouts.items_BG >= 0
        preference = np.where(valid, ahead / 60 if self.worst else 1 / np.maximum(ahead, 1), 0).astype(np.float32)
        return Scores(preference, preference, valid, valid)


def scorer(ref: str) -> NextOnTheRing:
    return NextOnTheRing(worst=ref.endswith("b" * 64))


@pytest.fixture
def trained(make_job: MakeJob, inputs: dict[str, str]) -> dict[str, str]:
    model = run(make_job("train", recipe="tiny", config=TRAINED, inputs=inputs)).artifacts["model"]
    return {**inputs, "model": model, "reward": f"rewards/sha256-{'a' * 64}"}


@pytest.fixture
def alone(settings: Any) -> None:
    """Nobody is asked for scores."""
    settings.reward_wait_seconds = 0.0


@pytest.mark.usefixtures("alone")
def test_a_generator_is_aligned_and_stored_with_all_that_serving_needs(
    make_job: MakeJob, trained: dict[str, str], store: ArtifactStore, queues: Any, broker: Any
) -> None:
    sent = len(queues.sent)
    job = make_job(
        "align",
        recipe="grpo-sr",
        config={**SHORT, "steps": 16, "evaluate_every": 8, "learning_rate": 1e-2, "promote": True},
        inputs={**trained, "judge": f"rewards/sha256-{'b' * 64}"},
    )
    outcome = align(job, scorer)
    ref, result = outcome.artifacts["model"], outcome.result
    json.dumps(result)
    assert result["kept_step"] in (8, 16) and not result["stopped"]
    assert result["valid_after"]["reward"] > result["valid_before"]["reward"]
    first, last = result["policy"]["first"], result["policy"]["last"]
    assert {"reward", "reward_spread", "kl", "entropy", "gate_rate", "popularity"} <= first.keys() == last.keys()
    assert first["kl"] == pytest.approx(0, abs=1e-6) and last["kl"] > 0
    assert (
        {"hr@10", "hr@50", "ndcg@10", "ndcg@50", "popularity", "invalid_share", "judge", "gate_rate"} <= set(result["test_before"]) == set(result["test_after"])
    )
    assert queues.sent[sent:] == [ModelTrained(job_id=job.id, model=ref, catalog=trained["catalog"], promote=True)]
    card = json.loads((store.get(ref) / "semantide.json").read_text())
    before = json.loads((store.get(trained["model"]) / "semantide.json").read_text())
    assert {name: card[name] for name in ("model_type", "max_items", "tokenizer_digest", "level_sizes", "catalog")} == {
        name: before[name] for name in ("model_type", "max_items", "tokenizer_digest", "level_sizes", "catalog")
    }
    assert (card["aligned_from"], card["alignment"]["temperature"], card["alignment"]["group"]) == (trained["model"], 1.0, 6)
    assert card["alignment"]["clicked_from"] == before["config"]["pages"]["clicked_from"]
    assert Generator.from_pretrained(store.get(ref)).config.level_sizes == (8, 8)
    evaluated = run(make_job("evaluate", config={"ks": [10], "beam_width": 20}, inputs={**trained, "model": ref})).result
    assert {row["model"] for row in evaluated["rows"]} == {"popularity", "generator"}
    rows = Jobs(broker).metrics(job.id)
    assert any("kl" in row for row in rows) and any("held_out_hr@50" in row for row in rows)
    assert Jobs(broker).get(job.id).total > 0


@pytest.mark.usefixtures("alone")
def test_a_job_that_was_cut_off_makes_the_same_model(make_job: MakeJob, trained: dict[str, str]) -> None:
    outcome = align(make_job("align", config=SHORT, inputs=trained, seed=4), scorer)
    whole = outcome.artifacts
    assert outcome.result["judge"] is None and "no independent judge was given" in outcome.result["warnings"][0]
    job = make_job("align", config=SHORT, inputs=trained, seed=4)
    asked = [0]
    earlier: list[Path] = []

    def check() -> None:
        asked[0] += 1
        if asked[0] == 6:
            raise JobCancelled("asked to stop")

    job.check_cancelled = check  # type: ignore[method-assign]
    with pytest.raises(JobCancelled):
        align(job, scorer)
    # A run that an earlier version began knows nothing of what has come since.
    for path in job.workdir.rglob("*.json"):
        kept = json.loads(path.read_text())
        if isinstance(kept, dict) and "steps" in (kept.get("config") or {}):
            for name in ("weighing", "clicked_from"):
                del kept["config"][name]
            path.write_text(json.dumps(kept))
            earlier.append(path)
    assert align(job, scorer).artifacts == whole and earlier


@pytest.mark.usefixtures("alone")
def test_where_the_guard_stops_the_start_comes_back_and_nothing_is_promoted(make_job: MakeJob, trained: dict[str, str], queues: Any) -> None:
    sent = len(queues.sent)
    worst = {**trained, "reward": f"rewards/sha256-{'b' * 64}", "judge": f"rewards/sha256-{'a' * 64}"}
    config = {**SHORT, "steps": 30, "evaluate_every": 10, "learning_rate": 2e-2, "promote": True, "probes": 40, "positive_reward": 0.0}
    outcome = align(make_job("align", recipe="grpo", config=config, inputs=worst), scorer)
    assert "independent judge fell" in outcome.result["stopped"]
    assert outcome.artifacts["model"] == trained["model"] and len(queues.sent) == sent
    assert outcome.result["judge"] == worst["judge"] and outcome.result["warnings"] == []
    assert outcome.result["test_after"] == outcome.result["test_before"]


@pytest.mark.usefixtures("alone")
def test_a_judge_that_few_users_ask_and_the_model_s_own_threshold_are_told(
    make_job: MakeJob, trained: dict[str, str], store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment_job, "_LEAST_JUDGED", 100)
    folder = tmp_path / "stricter"
    shutil.copytree(store.get(trained["model"]), folder, ignore=shutil.ignore_patterns("manifest.json"))
    card = json.loads((folder / "semantide.json").read_text())
    card["config"]["pages"]["clicked_from"] = 2.5
    (folder / "semantide.json").write_text(json.dumps(card))
    inputs = {**trained, "model": store.put("models", folder, inputs=trained), "judge": f"rewards/sha256-{'b' * 64}"}
    for config, threshold in (({}, 2.5), ({"clicked_from": 1.5}, 1.5)):
        asked: dict[str, Any] = {**SHORT, "steps": 1, "probes": 200, "held_out_users": 0, **config}
        told: list[AlignConfig] = []
        job = make_job("align", config=asked, inputs=inputs)
        monkeypatch.setattr(job, "configured", told.append)
        (warning,) = align(job, scorer).result["warnings"]
        assert "the judge was asked for 80 users" in warning and told[0].clicked_from == threshold


@pytest.mark.usefixtures("alone")
def test_what_does_not_belong_together_is_refused_by_name(make_job: MakeJob, trained: dict[str, str], store: ArtifactStore, tmp_path: Path) -> None:
    def refused(kind: type[Exception], said: str, config: dict[str, Any] | None = None, load: Any = scorer, **changes: str) -> None:
        with pytest.raises(kind, match=said):
            align(make_job("align", config={**SHORT, **(config or {})}, inputs={**trained, **changes}), load)

    refused(BadData, "promote is 'yes'", {"promote": "yes"})
    refused(ValueError, "config field 'nosuch'", {"nosuch": 1})
    refused(ValueError, "dropout is on with staleness 1 and updates 1.*give dropout false too", {"staleness": 1})
    refused(ValueError, "dropout is on with staleness 0 and updates 2", {"updates": 2})
    with pytest.raises(BadData, match="has 16 prompts for 17 processes"):
        align(make_job("align", config=SHORT, inputs=trained), scorer, World(size=17))
    refused(BadData, "the same artifact", judge=trained["reward"])
    # A judge of one user, or a few, never falls beyond noise.
    refused(ValueError, "probes is 1: give a number from 2", {"probes": 1})
    for name in ("probes", "held_out_users"):
        refused(BadData, f"{name} is 29 beside a judge.*at least 30", {name: 29}, judge=f"rewards/sha256-{'b' * 64}")
    copies = []
    for number in range(2):
        folder = tmp_path / f"weighed-{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "reward.json").write_text(json.dumps({"preference": {"click": number + 1}}))
        copies.append(store.put("rewards", folder))
    refused(BadData, "judge and reward have the same weights", reward=copies[0], judge=copies[1])
    paged = tmp_path / "paged"
    shutil.copytree(store.get(trained["dataset"]), paged, ignore=shutil.ignore_patterns("manifest.json"))
    pq.write_table(
        pa.table(
            {"user": [0], "time": [0], "items": pa.array([[1]], pa.list_(pa.int32())), "actions": [["click"]], "parts": pa.array([[0]], pa.list_(pa.int8()))}
        ),
        paged / "pages.parquet",
    )
    header = json.loads((paged / "dataset.json").read_text())
    (paged / "dataset.json").write_text(json.dumps({**header, "config": {**header.get("config", {}), "actions": {"click": 1.0}}}))
    refused(
        BadData, "no item on any page has an action of intensity 9.0 or more.*lower clicked_from", {"clicked_from": 9}, dataset=store.put("datasets", paged)
    )
    catalog = Catalog.load(store.get(trained["catalog"]))
    Catalog(catalog.item_ids, catalog.codes, catalog.level_sizes, "e" * 64).save(tmp_path / "other")
    refused(Conflict, "the model was trained for tokenizer ffffffffffff", catalog=store.put("catalogs", tmp_path / "other"))
    sasrec = run(make_job("train", recipe="sasrec", config={"epochs": 1, "items_per_batch": 64}, inputs={"dataset": trained["dataset"]})).artifacts["model"]
    refused(Conflict, "is a sasrec: only a generator can be aligned", model=sasrec)
    with pytest.raises(Conflict, match="needs the input 'reward'"):
        align(make_job("align", config=SHORT, inputs={name: ref for name, ref in trained.items() if name != "reward"}), scorer)

    class OfAnotherCatalog:
        def score(self, rollouts: Rollouts) -> Scores:
            raise Conflict("the reward model rewards/sha256-aaaa lacks 60 of the data set's 60 items: train it on this data set")

    refused(Conflict, "lacks 60 of the data set's 60 items", load=lambda ref: OfAnotherCatalog())

    class Numberless(NextOnTheRing):
        def score(self, rollouts: Rollouts) -> Scores:
            scores = super().score(rollouts)
            return replace(scores, preference_BG=np.full_like(scores.preference_BG, np.nan))

    refused(Exception, r"a preference outside \[0, 1\]", load=lambda ref: Numberless())
    judge = f"rewards/sha256-{'b' * 64}"
    # A judge that says nothing never falls: the guard would be blind and nobody would know.
    refused(Exception, r"rewards/sha256-bbb.* a preference outside \[0, 1\]", load=lambda ref: Numberless() if ref == judge else scorer(ref), judge=judge)
