"""What the command line sends is what the rooms' own routes take: no process, but the real applications."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from semantide.services.commandline import jobs, main
from semantide.services.commandline.client import Client, StackError
from semantide.services.ingestion import api as ingestion
from semantide.services.serving import api as serving
from semantide.services.tokenization import api as tokenization
from semantide.shared import operations_api
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
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
    for module in (main, jobs):
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
