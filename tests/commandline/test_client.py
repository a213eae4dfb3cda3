"""What the command line sends is what the rooms' own routes take: no process, but the real applications."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from semantide.services.commandline import jobs, main, page_report, recommendations, variants
from semantide.services.commandline.client import Client, StackError
from semantide.services.ingestion import api as ingestion
from semantide.services.serving import api as serving
from semantide.services.tokenization import api as tokenization
from semantide.shared import operations_api
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import NotFound
from semantide.shared.http import build_app
from semantide.shared.jobs import JobOutcome, Jobs
from semantide.shared.page_report import PageCounts


@pytest.fixture
def client(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    rooms = {"ingestion": ingestion, "tokenization": tokenization, "serving": serving}
    opened = {name: make_room(name) for name in rooms}
    app = build_app(list(opened.values()), [operations_api.build(opened["ingestion"]), *(door.build(opened[name]) for name, door in rooms.items())])
    made = Client(Settings(url="http://testserver", api_keys="test-key"))
    made._http = TestClient(app, headers={"X-API-Key": "test-key"})
    for module in (main, jobs, page_report, recommendations, variants):
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
def test_a_jobs_report_is_written_as_a_page(client: Client, tmp_path: Path) -> None:
    job = client.post("/v1/jobs", JobSpec(kind="train", recipe="tiny").model_dump(mode="json"))
    path = tmp_path / "report.html"
    assert invoke("report", job["id"], "--output", str(path)).exit_code == 0
    assert path.read_text().startswith("<!doctype html>") and job["id"] in path.read_text()
    assert invoke("report", job["id"], "-o", "-").output == path.read_text()
    assert invoke("report", "nope").exit_code != 0


def test_what_a_data_sets_pages_are_like_is_shown_with_the_verdict(client: Client, settings: Settings, tmp_path: Path) -> None:
    offsets, answers = np.array([0, 2, 4, 5]), np.array([1, 0, 2, 1, 1], np.int8)
    header = {"page_report": PageCounts.of(offsets, answers).report()}
    (tmp_path / "dataset").mkdir()
    store, path = ArtifactStore(settings.artifacts_root), tmp_path / "dataset" / "dataset.json"
    path.write_text(json.dumps(header))
    ref = store.put("datasets", tmp_path / "dataset")
    output = invoke("pages", ref).output
    for text in ("1 (33.3%)", "2 (50.0%)", "20.00%, 60.00%, 20.00%, 0.00%", "50.0% of the positives stand on a page with another one"):
        assert text in output
    assert json.loads(invoke("pages", ref, "--json").output) == {"dataset": ref, **header["page_report"]}
    assert "no dataset yet" in str(invoke("pages").exception)
    path.write_text("{}")
    assert "made before pages were counted" in str(invoke("pages", store.put("datasets", tmp_path / "dataset")).exception)


def test_recommend_sends_what_serving_takes(client: Client) -> None:
    arguments = ["--item", "a", "--item", "b", "--n", "3", "--beam-width", "20", "--exclude-seen", "--exclude", "c", "--category", "x", "--every-category", "y"]
    outcome = invoke("recommend", *arguments)
    # Past every check of the request, to the one thing that is missing here.
    assert isinstance(outcome.exception, StackError) and outcome.exception.status == 503 and "no model is live" in str(outcome.exception)


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
    monkeypatch.setattr(main, "run_job", lambda *arguments, **options: jobs.get(record.id))
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
