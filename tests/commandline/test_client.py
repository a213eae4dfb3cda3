"""What the command line sends is what the rooms' own routes take: no process, but the real applications."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from semantide.services.commandline import (
    alignment,
    experiments,
    jobs,
    main,
    oversight,
    page_report,
    publishing,
    recommendations,
    rewards,
    scores,
    simulation,
    users,
    variants,
)
from semantide.services.commandline.client import Client, StackError
from semantide.services.ingestion import api as ingestion
from semantide.services.serving import api as serving
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair
from semantide.services.tokenization import api as tokenization
from semantide.shared import operations_api
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import CandidateJudged, JobSpec
from semantide.shared.errors import NotFound
from semantide.shared.http import build_app
from semantide.shared.jobs import JobOutcome, Jobs


@pytest.fixture
def client(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    rooms = {"ingestion": ingestion, "tokenization": tokenization, "serving": serving}
    opened = {name: make_room(name) for name in rooms}
    app = build_app(list(opened.values()), [operations_api.build(opened["ingestion"]), *(door.build(opened[name]) for name, door in rooms.items())])
    made = Client(Settings(url="http://testserver", api_keys="test-key"))
    made._http = TestClient(app, headers={"X-API-Key": "test-key"})
    for module in (alignment, experiments, main, jobs, page_report, publishing, oversight, recommendations, rewards, scores, simulation, users, variants):
        monkeypatch.setattr(module, "Client", lambda settings: made)
    yield made
    made._http.close()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments))


@pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument with the TestClient")
def test_a_file_out_of_the_stacks_reach_is_uploaded_under_a_name_of_its_own(
    client: Client, tmp_path_factory: pytest.TempPathFactory, settings: Settings
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "my events (é).csv"
    outside.write_text("user,item,time\nu,i,1700000000000\n")
    with pytest.raises(StackError) as refused:
        client.post("/v1/imports", {"path": str(outside)})
    assert refused.value.status == 403
    outcome = invoke("ingest", str(outside), "--no-wait")
    assert outcome.exit_code == 0, outcome.output
    (job,) = client.get("/v1/jobs", kind="import")
    path = Path(job["spec"]["config"]["path"])
    assert path.read_text() == outside.read_text() and path.suffix == ".csv" and path.is_relative_to(settings.data_dir / "uploads")
    client.call("DELETE", f"/v1/uploads/{path.relative_to(settings.data_dir.resolve() / 'uploads')}")
    assert not path.parent.exists()


@pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument with the TestClient")
def test_a_folder_out_of_the_stacks_reach_is_uploaded_as_it_is(client: Client, tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    outside = tmp_path_factory.mktemp("outside")
    texts = {"items.jsonl": '{"id": "i"}\n', "logs/2024 (é)/a.csv": "user,item,time\nu,i,1700000000000\n", ".hidden/b.csv": "user"}
    for name, text in texts.items():
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text(text)
    outcome = invoke("ingest", str(outside), "--no-wait")
    assert outcome.exit_code == 0, outcome.output
    (job,) = client.get("/v1/jobs", kind="import")
    place, uploads = Path(job["spec"]["config"]["path"]), settings.data_dir.resolve() / "uploads"
    assert place.parent == uploads
    found = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
    assert found == {"items.jsonl": texts["items.jsonl"], "logs/2024____/a.csv": texts["logs/2024 (é)/a.csv"]}
    for name in found:
        client.call("DELETE", f"/v1/uploads/{place.name}/{name}")
    assert not place.exists() and uploads.is_dir()
    empty = tmp_path_factory.mktemp("empty")
    assert "holds no files" in str(invoke("ingest", str(empty), "--no-wait").exception)


@pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument with the TestClient")
def test_a_jobs_report_is_written_as_a_page(client: Client, tmp_path: Path) -> None:
    job = client.post("/v1/jobs", JobSpec(kind="train", recipe="tiny").model_dump(mode="json"))
    path = tmp_path / "report.html"
    assert invoke("report", job["id"], "--output", str(path)).exit_code == 0
    assert path.read_text().startswith("<!doctype html>") and job["id"] in path.read_text()
    assert invoke("report", job["id"], "-o", "-").output == path.read_text()
    assert invoke("report", "nope").exit_code != 0


def test_an_experiment_without_requests_says_what_to_do(client: Client) -> None:
    outcome = invoke("experiment", "--days", "3")
    assert outcome.exit_code == 0 and "0 requests of 0 users" in outcome.output and "semantide variants set" in outcome.output.replace("\n", " ")
    assert '"variants": []' in invoke("experiment", "--json").output
    assert isinstance(invoke("experiment", "--before-days", "-1").exception, StackError)
    for wrong in ("nan", "inf", "0", "-1", "1e9"):
        refused = invoke("experiment", "--days", wrong).exception
        assert isinstance(refused, ValueError) and "give a number of days" in str(refused)


def test_decisions_show_figures_and_a_promotion_asks_for_what_is_there(client: Client, broker: Any) -> None:
    model, against, catalog = (f"{kind}/sha256-{number:064x}" for kind, number in (("models", 1), ("models", 2), ("catalogs", 1)))
    figures = {"hr@50": {"live": 0.2, "candidate": 0.1, "difference": -0.1, "low": -0.12, "bound": -0.004}}
    verdict = CandidateJudged(job_id="evaluate-1", model=model, catalog=catalog, against=against, not_worse=False, reason="lost", cases=9, figures=figures)
    registry = Registry(broker)
    registry.promote(Pair(model=against, catalog=catalog), reason="first")
    registry.register(Candidate(model=model, catalog=catalog))
    registry.judging(model, "evaluate-1")
    registry.judged(verdict)
    output = invoke("decisions").output
    assert "hold" in output and "hr@50 0.2000 to 0.1000 (-0.1200)" in output and "first" in output
    assert isinstance(invoke("promote", "--model", model, "--if-not-worse").exception, StackError)


def test_align_takes_the_newest_generator_and_reward_and_shows_what_became_of_them(
    client: Client, broker: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(invoke("align", "--no-wait").exception, NotFound)
    store = ArtifactStore(settings.artifacts_root)

    def put(kind: str, name: str, **inputs: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "semantide.json").write_text(f'{{"name": "{name}"}}')
        return store.put(kind, tmp_path / name, inputs=inputs)

    dataset, catalog, reward, judge = (put(kind, name) for kind, name in (("datasets", "d"), ("catalogs", "c"), ("rewards", "r"), ("rewards", "j")))
    model = put("models", "m", dataset=dataset, catalog=catalog)
    records = Jobs(broker)
    for kind, made in (("train", {"model": model}), ("reward", {"reward": reward})):
        records.end(records.submit(JobSpec(kind=kind)), "succeeded", outcome=JobOutcome(made))
    outcome = invoke("align", "--judge", judge, "--if-not-worse", "--set", "steps=5", "--no-wait")
    assert outcome.exit_code == 0, outcome.output
    (job,) = client.get("/v1/jobs", kind="align")
    assert job["spec"]["inputs"] == {"dataset": dataset, "catalog": catalog, "model": model, "reward": reward, "judge": judge}
    assert job["spec"]["recipe"] == "grpo-sr" and job["spec"]["config"] == {"steps": 5, "promote": "if-not-worse"}
    figures = {"hr@50": 0.25, "reward": 0.5}
    result = {name: figures for name in ("valid_before", "valid_after", "test_before", "test_after")}
    result |= {"policy": {"first": {"entropy": 3.5}, "last": {"entropy": 3.25, "kl": 0.125}}, "warnings": ["no independent judge"]}
    result |= {"stopped": "step 4: HR@50 fell", "kept_step": 2, "steps": 4, "skipped_groups": 7, "beam_width": 50, "exclude_seen": True}
    monkeypatch.setattr(alignment, "run_kind", lambda *arguments, **options: records.get(job["id"]).model_copy(update={"result": result}))
    output = " ".join(invoke("align").output.split())
    for text in (
        "stopped it at step 4: HR@50 fell",
        "the weights of step 2 of 4 are kept; 7 groups",
        "items that a user has seen are left out",
        "0.2500",
        "entropy 3.5000 3.2500",
        "kl 0.0000 0.1250",
        "no independent judge",
    ):
        assert text in output


def test_two_models_are_judged_within_the_bounds_of_the_deployment(client: Client, settings: Settings, tmp_path: Path) -> None:
    store = ArtifactStore(settings.artifacts_root)

    def stored(kind: str, content: str, **more: Any) -> str:
        folder = tmp_path / kind / content
        folder.mkdir(parents=True)
        (folder / "content").write_text(content)
        return store.put(kind, folder, **more)

    made_from = {"dataset": stored("datasets", "a"), "catalog": stored("catalogs", "a")}
    model, other = stored("models", "a", inputs=made_from), stored("models", "b")
    assert invoke("evaluate", "--model", model, "--against", other, "--no-wait").exit_code == 0
    assert invoke("evaluate", "--model", model, "--against", other, "--set", 'bounds={"hr@10": 0.1}', "--no-wait").exit_code == 0
    specs = [job["spec"] for job in client.get("/v1/jobs", kind="evaluate")]
    assert all(spec["inputs"] == {**made_from, "model": model, "live": other} for spec in specs)
    assert {tuple(spec["config"]["bounds"]) for spec in specs} == {tuple(Settings().promotion_bounds), ("hr@10",)}


def test_the_log_is_asked_of_models_and_its_answer_shown(
    client: Client, settings: Settings, broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "content").write_text("some")
    model, dataset, catalog = (ArtifactStore(settings.artifacts_root).put(kind, tmp_path / "some") for kind in ("models", "datasets", "catalogs"))
    arguments = ["evaluate", "--model", model, "--dataset", dataset, "--catalog", catalog, "--logged", "pages"]
    assert invoke(*arguments, "--against", model, "--no-wait").exit_code == 0
    (job,) = client.get("/v1/jobs", kind="evaluate")
    assert job["spec"]["config"] == {"logged": "pages"} and job["spec"]["inputs"]["live"] == model  # both are asked, neither is judged
    known, unknown = {"value": 0.25, "low": 0.2, "high": 0.3}, {"value": None, "low": None, "high": None}
    kinds = {name: {**known, "lift": {**known, "beyond_noise": True}} for name in ("ips", "snips", "doubly_robust")}
    row = {
        "model": "generator",
        "exclude_seen": True,
        "agrees": 0.1,
        "users": 7,
        "pages": 8,
        "places": 90,
        "mean_weight": {**known, "value": 0.4},
        "effective": 31.0,
    }
    row |= {
        "covered": False,
        "tells": False,
        "clicks": {"log": known, **kinds},
        "orders": {"log": unknown, **{name: {**one, **unknown} for name, one in kinds.items()}},
    }
    ended = Jobs(broker).get(job["id"]).model_copy(update={"result": {"logged": "pages", "estimates": [row]}})
    monkeypatch.setattr(main, "run_kind", lambda *arguments, **options: ended)
    output = " ".join(invoke(*arguments).output.split())
    for text in (
        "the log earned 0.2500 (0.2000 to 0.3000) at 90 places of 8 pages of 7 people",
        "doubly robust",
        "too few to tell",
        "worth 31 decisions",
        "SNIPS is about that part",
    ):
        assert text in output


def test_simulated_people_write_a_log_and_visit_recommenders(tmp_path: Path) -> None:
    small = ["--users", "20", "--items", "40", "--topics", "3", "--sessions", "2", "--form", "jsonl", "--seed", "3"]
    outcome = invoke("simulate", str(tmp_path / "sim"), *small)
    assert outcome.exit_code == 0 and "semantide ingest" in outcome.output and (tmp_path / "sim" / "interactions.jsonl").exists()
    outcome = invoke("abtest", str(tmp_path / "sim"), "popular", "chance", "oracle", "--users", "10", "--visits", "1")
    assert outcome.exit_code == 0 and all(name in outcome.output for name in ("popular", "chance", "oracle", "clicks a visit"))
    found = json.loads(
        invoke("abtest", str(tmp_path / "sim"), "popular", "chance", "--users", "1", "--visits", "1", "--json").output, parse_constant=pytest.fail
    )
    assert found["base"] == "popular" and found["recommenders"][1]["clicks_lift_low"] is None  # one person tells nothing, and JSON has no infinity
    assert "too few to tell" in invoke("abtest", str(tmp_path / "sim"), "popular", "--users", "1", "--visits", "1").output
    assert "twice" in str(invoke("abtest", str(tmp_path / "sim"), "popular", "popular").exception)
    assert isinstance(invoke("abtest", str(tmp_path), "popular").exception, ValueError)


def test_recommend_sends_what_serving_takes(client: Client) -> None:
    arguments = ["--item", "a", "--item", "b", "--n", "3", "--beam-width", "20", "--exclude-seen", "--exclude", "c", "--category", "x", "--every-category", "y"]
    outcome = invoke("recommend", *arguments)
    # Past every check of the request, to the one thing that is missing here.
    assert isinstance(outcome.exception, StackError) and outcome.exception.status == 503 and "no model is live" in str(outcome.exception)


def test_score_sends_what_serving_takes_and_shows_what_comes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no model is live" in str(invoke("score", "x", "y", "--item", "a", "--conditional-scores", "--split-by", "s", "--variant", "live").exception)
    assert "say for whom" in str(invoke("score", "x").exception)
    assert invoke("score", "--user", "a").exit_code == 2  # no item
    answer = {"items": [{"item": "x", "score": -3.25, "codes": [1, 2], "level_log_probabilities": [-1.0, -2.25]}], "variant": None}
    monkeypatch.setattr(client, "post", lambda path, body: answer if (path, body) == ("/v1/scores", {"items": ["x"], "user": "a"}) else None)
    shown = invoke("score", "x", "--user", "a").output
    assert "-3.25" in shown and "1 2" in shown and "-1.00 -2.25" in shown
    assert json.loads(invoke("score", "x", "--user", "a", "--json").output) == answer


def test_what_is_missing_is_named(client: Client) -> None:
    with pytest.raises(NotFound, match="semantide tokenize"):
        client.current_catalog()
    assert isinstance(invoke("rollback").exception, StackError)
    with pytest.raises(StackError, match="is not in") as refused:
        client.promote(f"models/sha256-{'0' * 64}")
    assert refused.value.status == 404


def test_status_and_lists_read_the_real_answers(client: Client) -> None:
    assert "none yet" in invoke("status").output
    assert invoke("jobs", "list").exit_code == 0
    assert invoke("artifacts").output == ""
    assert "0 messages" in invoke("requeue", "semantide.serving.ModelTrained").output
    assert "name one of" in str(invoke("requeue", "semantide.nowhere").exception)


def test_rejected_rows_are_shown_and_set_the_exit_status(client: Client, broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejects = [{"row": 7, "field": "time", "value": "3", "reason": "time is in seconds", "remedy": "send milliseconds", "file": "a.csv"}]
    result = {"rows": 2, "rejected": 1, "reject_file": "/data/rejects.jsonl", "rejects": rejects}
    jobs = Jobs(broker)
    record = jobs.submit(JobSpec(kind="import"))
    jobs.end(record, "succeeded", outcome=JobOutcome(result=result))
    monkeypatch.setattr(main, "finish_job", lambda *arguments, **options: jobs.get(record.id))
    file = tmp_path / "a.csv"
    file.touch()
    outcome = invoke("ingest", str(file))
    assert outcome.exit_code == 1
    assert "a.csv row 7, field time, value '3': time is in seconds; send milliseconds" in outcome.output and record.id in outcome.output


def test_recommend_takes_its_new_options_to_the_stack(client: Client) -> None:
    first = ["recommend", "--user", "a", "--depth", "20", "--explain", "--no-explore", "--variant", "live"]
    assert "no model is live" in str(invoke(*first).exception)
    assert "no model is live" in str(invoke("recommend", "--item", "a", "--split-by", "session").exception)
    assert "none of ours" in str(invoke("recommend", "--cursor", "nonsense").exception)
    assert "given together with" in str(invoke("recommend", "--cursor", "nonsense", "--user", "a").exception)
    assert "say for whom" in str(invoke("recommend").exception)


def test_an_answer_is_shown_with_what_was_asked_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    near = [{"item": "b", "title": "Bee", "similarity": 0.5}]
    item = {"item": "a", "score": -1.5, "title": "Ay", "codes": [3, 4], "explored": True}
    item["explanation"] = {"level_log_probabilities": [-1.0, -0.5], "nearest_history": near}
    answer = {"items": [item], "variant": "b", "cursor": "AAAA", "short_reason": None}
    monkeypatch.setattr(client, "post", lambda path, body: answer)
    output = invoke("recommend", "--user", "u", "--explain").output
    for text in ("for u, variant b", "Ay (new)", "3 4", "-1.00 -0.50", "Bee (0.50)", "semantide recommend --cursor AAAA"):
        assert text in output


def test_variants_are_set_changed_and_removed_one_by_one(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    models, catalog = [f"models/sha256-{digit * 64}" for digit in "123"], f"catalogs/sha256-{'4' * 64}"
    assert "no model is live" in str(invoke("variants", "set", "b", "--model", models[0], "--share", "0.1", "--force", "--catalog", catalog).exception)
    assert "no candidate" in str(invoke("variants", "set", "b", "--model", models[0], "--share", "0.1", "--catalog", catalog).exception)
    assert invoke("variants", "list").exit_code == 0

    def shown(name: str, model: str, share: float) -> dict[str, Any]:
        return {"name": name, "model": model, "catalog": catalog, "share": share, "loaded": name != "c", "error": "broken" if name == "c" else None}

    present = {"salt": "", "variants": [shown("live", models[0], 0.7), shown("b", models[1], 0.2), shown("c", models[2], 0.1)]}
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "call", lambda method, path, **options: sent.append(options["json"]) or present if method == "PUT" else present)
    output = invoke("variants", "set", "b", "--model", models[2], "--share", "0.3").output
    assert "70.00%" in output and "broken" in output
    assert [(one["name"], one["model"], one["share"]) for one in sent[-1]["variants"]] == [("c", models[2], 0.1), ("b", models[2], 0.3)]
    invoke("variants", "remove", "c")
    assert [one["name"] for one in sent[-1]["variants"]] == ["b"]
    invoke("variants", "end")
    assert sent[-1]["variants"] == []
    assert "no variant 'z'" in str(invoke("variants", "remove", "z").exception)


def test_negatives_and_what_trains_on_them_name_their_inputs(client: Client, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "file").write_text("")
    ref = {kind: ArtifactStore(settings.artifacts_root).put(kind, tmp_path / "artifact") for kind in ("datasets", "catalogs", "models", "beams")}
    outcome = invoke("negatives", "--dataset", ref["datasets"], "--model", ref["models"], "--set", "width=30", "--no-wait")
    assert outcome.exit_code == 0, outcome.output
    trained = invoke("train", "--recipe", "tiny", "--dataset", ref["datasets"], "--catalog", ref["catalogs"], "--beams", ref["beams"], "--no-wait")
    assert trained.exit_code == 0, trained.output
    (train,), (negatives,) = (client.get("/v1/jobs", kind=kind) for kind in ("train", "negatives"))
    assert negatives["spec"]["inputs"] == {"dataset": ref["datasets"], "model": ref["models"]} and negatives["spec"]["config"] == {"width": 30}
    assert train["spec"]["inputs"] == {"dataset": ref["datasets"], "catalog": ref["catalogs"], "beams": ref["beams"]}


def test_a_reward_names_its_inputs_and_shows_what_its_signals_are_worth(
    client: Client, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "file").write_text("")
    ref = {kind: ArtifactStore(settings.artifacts_root).put(kind, tmp_path / "artifact") for kind in ("datasets", "models", "rewards")}
    trained = invoke("reward", "--dataset", ref["datasets"], "--retriever", ref["models"], "--set", 'preference={"click": 1}', "--no-wait")
    assert trained.exit_code == 0, trained.output
    weighed = invoke("reward", "--weigh", ref["rewards"], "--set", 'preference={"click": 2}', "--no-wait")
    assert weighed.exit_code == 0, weighed.output
    jobs = client.get("/v1/jobs", kind="reward")
    assert sorted(map(str, (job["spec"]["inputs"] for job in jobs))) == sorted(
        map(str, ({"dataset": ref["datasets"], "retriever": ref["models"]}, {"reward": ref["rewards"]}))
    )
    assert {job["spec"]["config"]["preference"]["click"] for job in jobs} == {1, 2}
    assert "trains nothing" in str(invoke("reward", "--weigh", ref["rewards"], "--dataset", ref["datasets"]).exception)
    figures = {"rate": 0.4, "auc": None, "calibration_error": 0.01, "calibration_error_placed": 0.02, "calibration": "platt", "shown": {"auc": 0.7123}}
    result = {"signals": {"click": figures}, "preference": {"click": 2.0}, "measured_on": "test", "gate": {"positives_pass": 0.95, "others_pass": 0.4}}
    for share in (1.0, 0.125):
        rewards._show({**result, "debiased": {"effective_share": share}})
        shown = " ".join(capsys.readouterr().out.split())
        assert "click" in shown and "40.00%" in shown and "95.0%" in shown
        assert ("12.5% of them" in shown and "click 0.7123" in shown) == (share < 1)


def test_a_user_is_exported_and_forgotten(client: Client, broker: Any, tmp_path: Path) -> None:
    client.send_interactions([{"user": "a/b", "item": "i", "time": 1_700_000_000_000}], progress=False)
    outcome = invoke("users", "export", "a/b", "-o", str(tmp_path / "all.json"))
    assert outcome.exit_code == 0 and '"user": "a/b"' in (tmp_path / "all.json").read_text()
    assert invoke("users", "delete", "a/b", "--accept-later", "--no-wait").exit_code == 0
    (job,) = client.jobs("forget")
    assert job.state == "queued" and job.spec.config == {}
    listed = invoke("users", "deletions")
    assert listed.exit_code == 0 and "not yet" in listed.output and "later" in listed.output and "a/b" not in listed.output
    audited = invoke("audit")
    assert "DELETE" in audited.output and "/v1/users/{user}" in audited.output.replace("\n", "") and "a/b" not in audited.output
    assert '"outcome": 202' in invoke("audit", "--json").output
