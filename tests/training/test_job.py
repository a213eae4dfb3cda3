import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from semantide.services.training import api
from semantide.services.training.alignment_recipes import ALIGN_RECIPES
from semantide.services.training.job import run
from semantide.services.training.recipes import RECIPES
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import ModelTrained
from semantide.shared.errors import BadData, Conflict, JobCancelled
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.models.generator import Generator
from semantide.shared.models.retriever import ItemVectors

from .conftest import write_dataset

MakeJob = Callable[..., JobContext]
QUICK = {
    "epochs": 6,
    "items_per_batch": 64,
    "warmup_steps": 5,
    "learning_rate": 1e-2,
    "generator": {"num_layers": 1, "hidden_size": 32, "dropout": 0.0, "embedding_dropout": 0.0},
}


def test_training_stores_a_model_with_all_it_needs_and_tells_serving(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, queues: Any) -> None:
    job = make_job("train", recipe="tiny", config={**QUICK, "promote": True}, inputs=inputs, seed=3)
    outcome = run(job)
    folder = store.get(outcome.artifacts["model"])
    assert Generator.from_pretrained(folder).vocabulary.level_sizes == (8, 8)
    card = json.loads((folder / "semantide.json").read_text())
    assert (card["catalog"], card["dataset"], card["recipe"], card["level_sizes"]) == (inputs["catalog"], inputs["dataset"], "tiny", [8, 8])
    assert card["tokenizer_digest"] == "f" * 64
    assert card["metrics"]["valid"]["ndcg@10"] > 0.4
    assert queues.sent == [ModelTrained(job_id=job.id, model=outcome.artifacts["model"], catalog=inputs["catalog"], promote=True)]
    assert store.manifest(outcome.artifacts["model"])["seed"] == 3


def test_one_seed_gives_one_digest_cancelled_in_between_or_not(make_job: MakeJob, inputs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**QUICK, "epochs": 2, "generator": {**QUICK["generator"], "dropout": 0.3}}  # type: ignore[dict-item]

    def trained(seed: int, stop_at: int | None = None) -> str:
        job = make_job("train", recipe="tiny", config=config, inputs=inputs, seed=seed)
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise JobCancelled("stop")

        monkeypatch.setattr(job, "check_cancelled", check)
        if stop_at is not None:
            with pytest.raises(JobCancelled):
                run(job)
        return run(job).artifacts["model"]

    first = trained(1)
    assert trained(1) == first
    assert trained(1, stop_at=9) == first
    assert trained(2) != first


def test_a_generator_on_merged_prompts_is_trained_resumed_measured_and_made_of_one_without(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    merger = {"enabled": True, "separator": "kept", "features": ["actions"]}
    config = {**QUICK, "generator": {**QUICK["generator"], "merger": merger, "dropout": 0.1}}  # type: ignore[dict-item]
    model = run(make_job("train", recipe="tiny", config=config, inputs=inputs, seed=3)).artifacts["model"]
    card = json.loads((store.get(model) / "semantide.json").read_text())
    assert card["merger"] == {**merger, "actions": ["click", "like"]} and card["metrics"]["valid"]["ndcg@10"] > 0.4
    again = make_job("train", recipe="tiny", config=config, inputs=inputs, seed=3)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise JobCancelled("stop")

    monkeypatch.setattr(again, "check_cancelled", check)
    with pytest.raises(JobCancelled):
        run(again)
    assert run(again).artifacts["model"] == model
    plain = run(make_job("train", recipe="tiny", config={**QUICK, "epochs": 3}, inputs=inputs)).artifacts["model"]
    further = {**QUICK, "epochs": 2, "checkpoint": plain, "generator": {"merger": {"enabled": True}}}
    merged = run(make_job("train", recipe="tiny", config=further, inputs=inputs)).artifacts["model"]
    assert Generator.from_pretrained(store.get(merged)).config.merger.enabled
    for other in (model, merged):
        rows = run(make_job("evaluate", config={"ks": [10], "beam_width": 20}, inputs={**inputs, "model": other})).result["rows"]
        recall = {(row["model"], row["exclude_seen"]): row["metrics"]["recall@10"] for row in rows}
        assert recall["generator", False] > recall["popularity", False] + 0.2


def hybrid(types: list[str], **changes: Any) -> dict[str, Any]:
    linear = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
    return {**QUICK, "generator": {**QUICK["generator"], "num_layers": len(types), "layer_types": types, "linear": linear, **changes}}  # type: ignore[dict-item]


def test_a_hybrid_on_merged_prompts_is_trained_resumed_and_measured(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hybrid(["linear_attention", "full_attention"], merger={"enabled": True}, dropout=0.1)
    model = run(make_job("train", recipe="hybrid-tiny", config=config, inputs=inputs, seed=3)).artifacts["model"]
    assert Generator.from_pretrained(store.get(model)).config.types == ("linear_attention", "full_attention")
    again = make_job("train", recipe="hybrid-tiny", config=config, inputs=inputs, seed=3)
    checks = iter(range(1000))

    def check() -> None:
        if next(checks) == 9:
            raise JobCancelled("stop")

    monkeypatch.setattr(again, "check_cancelled", check)
    with pytest.raises(JobCancelled):
        run(again)
    assert run(again).artifacts["model"] == model
    rows = run(make_job("evaluate", config={"ks": [10], "beam_width": 20}, inputs={**inputs, "model": model})).result["rows"]
    recall = {(row["model"], row["exclude_seen"]): row["metrics"]["recall@10"] for row in rows}
    assert recall["generator", False] > recall["popularity", False] + 0.2


def test_any_forms_of_layers_are_trained(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore) -> None:
    model = run(make_job("train", recipe="hybrid-tiny", config=hybrid(["kda", "mamba2", "gla", "full_attention"]), inputs=inputs)).artifacts["model"]
    assert json.loads((store.get(model) / "semantide.json").read_text())["metrics"]["valid"]["ndcg@10"] > 0.4


@pytest.mark.parametrize("merged", [False, True])
def test_a_hybrid_trained_in_bfloat16_has_nearly_the_losses_and_the_very_types_of_float32(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, merged: bool
) -> None:
    config = hybrid(["linear_attention", "kda", "full_attention"], attention_gate=True, merger={"enabled": merged})
    losses, types = [], []
    # At ten times this rate two runs part by several percent, up or down, whatever it is that differs in them.
    config |= {"epochs": 3, "learning_rate": 1e-3}
    for dtype in ("float32", "bfloat16"):
        folder = store.get(run(make_job("train", recipe="hybrid-tiny", config={**config, "dtype": dtype}, inputs=inputs, seed=1)).artifacts["model"])
        losses.append(json.loads((folder / "semantide.json").read_text())["metrics"]["loss"])
        types.append({name: tensor.dtype for name, tensor in Generator.from_pretrained(folder).state_dict().items()})
    assert losses[1] == pytest.approx(losses[0], rel=0.01) and losses[1] != losses[0]
    assert types[0] == types[1] and set(types[0].values()) == {torch.float32}


def with_pages(store: ArtifactStore, inputs: dict[str, str], folder: Path) -> dict[str, str]:
    """The ring, shown in pages of the next two or three items."""
    write_dataset(folder)
    users = pq.read_table(folder / "users.parquet").to_pylist()
    pages: dict[str, list[Any]] = {"user": [], "time": [], "items": [], "actions": [], "parts": []}
    for row, user in enumerate(users):
        begin = 0
        while begin < user["train_end"]:
            end = min(begin + 2 + (row + begin) % 2, user["train_end"])
            shown = [*user["items"][begin:end], (user["items"][begin] + 30) % 60]
            actions = [*user["actions"][begin:end], "exposure"]
            for name, value in zip(pages, (row, user["times"][begin], shown, actions, [0] * len(shown)), strict=True):
                pages[name].append(value)
            begin = end
    types = {"user": pa.int32(), "time": pa.int64(), "items": pa.list_(pa.int32()), "actions": pa.list_(pa.string()), "parts": pa.list_(pa.int8())}
    pq.write_table(pa.table({name: pa.array(values, types[name]) for name, values in pages.items()}), folder / "pages.parquet")
    (folder / "dataset.json").write_text(json.dumps({"config": {"actions": {"exposure": 0.0, "click": 1.0, "like": 3.0}}}))
    return {**inputs, "dataset": store.put("datasets", folder)}


@pytest.mark.parametrize("pages", [{"targets": "parallel", "exposed": "contrast"}, {"targets": "sequential", "exposed": "weak"}, {"targets": "point"}])
def test_training_by_pages_learns_resumes_and_says_what_the_pages_were(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: dict[str, Any]
) -> None:
    inputs = with_pages(store, inputs, tmp_path / "shown")
    config = {**QUICK, "epochs": 8, "ema": 0.5, "pages": pages}

    def trained(stop_at: int | None = None) -> JobOutcome:
        job = make_job("train", recipe="pagewise", config=config, inputs=inputs, seed=2)
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise JobCancelled("stop")

        monkeypatch.setattr(job, "check_cancelled", check)
        if stop_at is not None:
            with pytest.raises(JobCancelled):
                run(job)
        return run(job)

    whole = trained()
    assert whole.result["valid"]["ndcg@10"] > 0.3
    figures = whole.result["pages"]
    assert figures["can_pay"] and figures["trained_pages"] == figures["pages"] > 100 and figures["trained_positives"] == figures["positives"] > figures["pages"]
    assert trained(stop_at=9).artifacts == whole.artifacts
    assert Generator.from_pretrained(store.get(whole.artifacts["model"])).vocabulary.level_sizes == (8, 8)
    again = make_job("train", recipe="pagewise", config={**config, "epochs": 1, "checkpoint": whole.artifacts["model"]}, inputs=inputs)
    assert run(again).result["valid"]["ndcg@10"] > 0.3, "goes on from a model that was trained before"


def test_a_data_set_without_pages_is_refused_with_the_remedy(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="make the data set anew"):
        run(make_job("train", recipe="pagewise", config=QUICK, inputs=inputs))
    shown = with_pages(store, inputs, tmp_path / "shown")
    with pytest.raises(BadData, match="intensity 9"):
        run(make_job("train", recipe="pointwise", config={**QUICK, "pages": {"clicked_from": 9, "ordered_from": 9}}, inputs=shown))
    with pytest.raises(BadData, match="pages are for a generator"):
        run(make_job("train", recipe="sasrec", config={"pages": {"targets": "parallel"}}, inputs=shown))


def test_evaluation_puts_popularity_sasrec_and_the_generator_side_by_side(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, queues: Any) -> None:
    generator = run(make_job("train", recipe="tiny", config=QUICK, inputs=inputs)).artifacts["model"]
    sent = len(queues.sent)
    baseline = run(
        make_job("train", recipe="sasrec", config={"epochs": 6, "items_per_batch": 64, "warmup_steps": 5}, inputs={"dataset": inputs["dataset"]})
    ).artifacts["model"]
    assert len(queues.sent) == sent, "only a generator is for serving"
    job = make_job("evaluate", config={"ks": [1, 10], "beam_width": 20}, inputs={**inputs, "model": generator, "baseline": baseline})
    result = run(job).result
    assert [(row["model"], row["exclude_seen"]) for row in result["rows"]] == [
        (name, seen) for name in ("popularity", "sasrec", "generator") for seen in (False, True)
    ]
    assert {row["model"]: row["ref"] for row in result["rows"]} == {"popularity": None, "sasrec": baseline, "generator": generator}
    by_name = {(row["model"], row["exclude_seen"]): row["metrics"] for row in result["rows"]}
    assert by_name["generator", False]["recall@10"] > by_name["popularity", False]["recall@10"] + 0.2
    assert by_name["sasrec", False]["recall@10"] > by_name["popularity", False]["recall@10"]
    assert all(row["cases"] == 80 for row in result["rows"])
    assert all(0 <= row["ndcg@10"] <= row["hr@10"] == row["recall@10"] <= 1 for row in by_name.values())
    assert (result["ranking"], result["users"]) == ("full", 80)
    json.dumps(result)
    # What a killed evaluation had finished is not computed again.
    (job.workdir / "rows.json").write_text(json.dumps([{"model": "kept", "exclude_seen": False}]))
    assert run(job).result["rows"][0]["model"] == "kept"
    assert len(run(job).result["rows"]) == 6


def test_a_retriever_is_trained_without_a_catalog_measured_beside_the_others_and_offered_to_serving(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, queues: Any
) -> None:
    config = {"epochs": 8, "items_per_batch": 64, "warmup_steps": 5, "learning_rate": 1e-2, "num_negatives": 30, "promote": True}
    job = make_job("train", recipe="retriever-tiny", config=config, inputs={"dataset": inputs["dataset"]}, seed=3)
    retriever = run(job).artifacts["model"]
    assert queues.sent == [ModelTrained(job_id=job.id, model=retriever, promote=True)]
    folder = store.get(retriever)
    assert json.loads((folder / "semantide.json").read_text())["model_type"] == "retriever"
    assert ItemVectors.load(folder).item_ids == tuple(f"item-{row}" for row in range(60))
    looking = {**config, "features": ["actions"]}
    fuxi = run(make_job("train", recipe="fuxi-tiny", config=looking, inputs={"dataset": inputs["dataset"]})).artifacts["model"]
    assert json.loads((store.get(fuxi) / "config.json").read_text())["actions"] == ["click", "like"]
    result = run(make_job("evaluate", config={"ks": [10]}, inputs={"dataset": inputs["dataset"], "retriever": retriever, "model": fuxi})).result
    recall = {row["model"]: row["metrics"]["recall@10"] for row in result["rows"] if not row["exclude_seen"]}
    assert list(recall) == ["popularity", "retriever", "retriever (model)"]
    assert min(recall["retriever"], recall["retriever (model)"]) > recall["popularity"] + 0.2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep_text", [False, True])
def test_a_qwen_checkpoint_is_trained_further_and_its_shorter_weights_are_measured(
    make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path, keep_text: bool
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 7}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=50, use_sliding_window=False, **shape)).save_pretrained(tmp_path / "language")  # type: ignore[arg-type]
    config = {**QUICK, "checkpoint": str(tmp_path / "language"), "keep_text": keep_text, "learning_rate": 3e-3}
    with pytest.raises(BadData, match="outside the folders"):
        run(make_job("train", recipe="pretrained", config={**config, "checkpoint": str(Path(__file__).parent)}, inputs=inputs))
    with pytest.raises(BadData, match="--set checkpoint=FOLDER"):
        run(make_job("train", recipe="pretrained", config=QUICK, inputs=inputs))
    model = run(make_job("train", recipe="pretrained", config=config, inputs=inputs)).artifacts["model"]
    saved = Qwen2ForCausalLM.from_pretrained(store.get(model))
    assert saved.config.vocab_size == 16 + (50 if keep_text else 1)
    again = {**config, "checkpoint": model, "epochs": 1}
    further = run(make_job("train", recipe="pretrained", config=again, inputs=inputs)).artifacts["model"]
    assert further != model
    with pytest.raises(BadData, match="knows no codes yet"):
        run(make_job("train", recipe="pretrained", config={**config, "epochs": 0}, inputs=inputs))
    as_it_is = run(make_job("train", recipe="pretrained", config={**again, "epochs": 0}, inputs=inputs))
    assert (store.get(as_it_is.artifacts["model"]) / "model.safetensors").read_bytes() == (store.get(model) / "model.safetensors").read_bytes()
    assert as_it_is.result["valid"]["ndcg@10"] > 0.1
    result = run(make_job("evaluate", config={"ks": [10], "beam_width": 20, "weights": "int8"}, inputs={**inputs, "model": further})).result
    recall = {row["model"]: row["metrics"]["recall@10"] for row in result["rows"] if not row["exclude_seen"]}
    assert recall["generator"] > recall["popularity"] + 0.2
    assert abs(recall["generator (int8)"] - recall["generator"]) < 0.1


def test_a_catalog_without_the_data_sets_items_is_refused(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path) -> None:
    Catalog(("item-1", "item-2"), np.array([[0, 0], [0, 1]]), (8, 8), "e" * 64).save(tmp_path / "other")
    other = {**inputs, "catalog": store.put("catalogs", tmp_path / "other")}
    with pytest.raises(Conflict, match=r"lacks 58 of the data set's 60 items \('item-0', .*tokenize this data set"):
        run(make_job("train", recipe="tiny", inputs=other))
    with pytest.raises(Conflict, match="needs the input 'catalog'"):
        run(make_job("train", recipe="tiny", inputs={"dataset": inputs["dataset"]}))


def test_a_model_of_another_catalog_is_refused(make_job: MakeJob, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path) -> None:
    model = run(make_job("train", recipe="tiny", config={**QUICK, "epochs": 1}, inputs=inputs)).artifacts["model"]
    catalog = Catalog.load(store.get(inputs["catalog"]))
    Catalog(catalog.item_ids, catalog.codes, catalog.level_sizes, "e" * 64).save(tmp_path / "other")
    with pytest.raises(Conflict, match="the model was trained for tokenizer ffffffffffff"):
        run(make_job("evaluate", inputs={**inputs, "catalog": store.put("catalogs", tmp_path / "other"), "model": model}))


@pytest.mark.parametrize(("kind", "config"), [("train", {"epoch": 3}), ("train", {"promote": "yes"}), ("evaluate", {"ks": [0]})])
def test_a_wrong_config_is_bad_data_that_names_the_field(make_job: MakeJob, inputs: dict[str, str], kind: str, config: dict[str, Any]) -> None:
    with pytest.raises(BadData, match=next(iter(config))):
        run(make_job(kind, recipe="tiny", config=config, inputs=inputs))


def test_progress_and_metrics_reach_the_record(make_job: MakeJob, inputs: dict[str, str], broker: Any) -> None:
    job = make_job("train", recipe="tiny", config={**QUICK, "epochs": 1, "log_every": 2}, inputs=inputs)
    run(job)
    rows = Jobs(broker).metrics(job.id)
    assert {"loss", "lr", "tokens_per_second", "compute_share"} <= set(rows[0])
    assert rows[0]["mfu"] > 0 and rows[0]["flops_per_second"] > 0 and rows[0]["memory_bytes"] > 1 << 20
    assert any("valid_ndcg@10" in row for row in rows)
    assert Jobs(broker).get(job.id).total > 0


def test_models_and_recipes_can_be_read(make_job: MakeJob, make_room: Any, inputs: dict[str, str]) -> None:
    ref = run(make_job("train", recipe="tiny", config={**QUICK, "epochs": 1}, inputs=inputs)).artifacts["model"]
    app = FastAPI()
    app.include_router(api.build(make_room("training")))
    client = TestClient(app)
    assert [entry["model"] for entry in client.get("/v1/models").json()] == [ref]
    for name in (ref, ref.removeprefix("models/")):
        card = client.get(f"/v1/models/{name}").json()
        assert (card["recipe"], card["catalog"], card["config"]["epochs"]) == ("tiny", inputs["catalog"], 1)
    assert set(client.get("/v1/recipes").json()) == {*RECIPES, *ALIGN_RECIPES}
