"""The client that waits and the one that awaits do the same."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.client import Client, Progress, StackError, Unreachable
from semantide.client.answers import Live
from semantide.client.calls import batches
from semantide.services.serving.contract import LiveAnswer
from semantide.shared.contracts import Interaction, JobRecord, JobSpec

RECORD = JobRecord(id="train-1", spec=JobSpec(kind="train"), state="succeeded")


def test_it_loads_no_part_of_a_stack() -> None:
    code = "import sys, semantide.client; print(*sorted({name.partition('.')[0] for name in sys.modules}), *(n for n in sys.modules if n.startswith('semantide.')))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {
        "torch",
        "numpy",
        "pyarrow",
        "redis",
        "celery",
        "fastapi",
        "starlette",
        "typer",
        "structlog",
        "opentelemetry",
        "pydantic_settings",
    }
    assert {name for name in loaded if name.startswith("semantide.") and not name.startswith("semantide.client")} == {
        "semantide.shared",
        "semantide.shared.contracts",
        "semantide.shared.errors",
        "semantide.shared.recommendation",
        "semantide.shared.scores",
    }


def test_what_the_client_reads_of_what_is_live_is_what_serving_says() -> None:
    assert set(Live.model_fields) == set(LiveAnswer.model_fields) - {"following"}


def test_scores_are_asked_for_once_more_where_the_answer_is_lost(both: Callable[..., Any]) -> None:
    answer = {
        "items": [{"item": "x", "score": -2.0, "codes": [3], "level_log_probabilities": [-2.0], "newer": 1}],
        "model": f"models/sha256-{0:064x}",
        "catalog": f"catalogs/sha256-{0:064x}",
        "based_on": "history",
        "history_items": 2,
        "unknown_history_items": 0,
        "timing": {"queue_ms": 0, "search_ms": 1, "total_ms": 1},
    }

    def lost_once(request: httpx.Request, number: int) -> httpx.Response:
        if number == 0:
            raise httpx.ReadError("lost")
        return httpx.Response(200, json=answer)

    client = both(lost_once)
    found = client.score(["x"], "ann", conditional_scores=True)
    assert [(each.item, each.score) for each in found.items] == [("x", -2.0)] and found.history_items == 2
    assert json.loads(client.requests[-1].content) == {"items": ["x"], "user": "ann", "conditional_scores": True} and len(client.requests) == 2
    with pytest.raises(ValueError, match="items"):
        client.score([], "ann")


@pytest.mark.parametrize(("status", "headers"), [(503, {"Retry-After": "0"}), (429, {}), (502, {})])
def test_a_passing_refusal_is_waited_out(both: Callable[..., Any], status: int, headers: dict[str, str]) -> None:
    client = both(lambda request, number: httpx.Response(status, headers=headers) if number < 2 else httpx.Response(200, json=["models/x"]))
    assert client.artifacts() == ["models/x"] and len(client.requests) == 3


def test_what_is_not_safe_to_repeat_is_not(both: Callable[..., Any]) -> None:
    error = {"error": {"type": "TransientError", "message": "try again"}}
    client = both(lambda request, number: httpx.Response(503, json=error))
    with pytest.raises(StackError, match="try again") as refused:
        client.cancel("train-1")
    assert refused.value.status == 503 and refused.value.kind == "TransientError" and len(client.requests) == 1

    def lost(request: httpx.Request, number: int) -> httpx.Response:
        raise httpx.ReadTimeout("lost")

    client = both(lost)
    with pytest.raises(Unreachable, match="is the stack up"):
        client.resume("train-1")
    assert len(client.requests) == 1

    def never_sent(request: httpx.Request, number: int) -> httpx.Response:
        if number < 2:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=RECORD.model_dump(mode="json"))

    client = both(never_sent)
    assert client.cancel("train-1") == RECORD and len(client.requests) == 3


def test_a_job_whose_answer_is_lost_is_submitted_under_the_same_key(both: Callable[..., Any]) -> None:
    def lost_once(request: httpx.Request, number: int) -> httpx.Response:
        if number == 0:
            raise httpx.ReadError("lost")
        return httpx.Response(202, json={**RECORD.model_dump(mode="json"), "of_a_newer_stack": 1})

    client = both(lost_once)
    assert client.submit(RECORD.spec) == RECORD
    keys = {request.headers["Idempotency-Key"] for request in client.requests}
    assert len(client.requests) == 2 and len(keys) == 1


def test_what_a_lost_request_has_removed_is_gone(both: Callable[..., Any]) -> None:
    def lost_once(request: httpx.Request, number: int) -> httpx.Response:
        if number == 0:
            raise httpx.ReadError("lost")
        return httpx.Response(404, json={"error": {"type": "NotFound", "message": "no uploaded file"}})

    client = both(lost_once)
    assert client.call("DELETE", "/v1/uploads/a") is None
    with pytest.raises(StackError):
        both(lambda request, number: httpx.Response(404)).call("DELETE", "/v1/uploads/a")


@given(st.lists(st.integers(), max_size=50), st.integers(1, 9))
def test_batches_are_the_rows(rows: list[int], size: int) -> None:
    found = list(batches(rows, size))  # type: ignore[arg-type]
    assert [row for batch in found for row in batch] == rows and all(0 < len(batch) <= size for batch in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 7), st.integers(1, 7))
def test_every_row_is_sent_once_whatever_the_stack_takes_at_a_time(both: Callable[..., Any], good: list[bool], size: int, most: int) -> None:
    rows = [Interaction(user="u", item=f"i{place}", time=place) if fine else {"user": "", "item": f"i{place}"} for place, fine in enumerate(good)]
    taken: list[str] = []

    def stack(request: httpx.Request, number: int) -> httpx.Response:
        if number == 0:
            taken.clear()
        batch = json.loads(request.content)["interactions"]
        if len(batch) > most:
            return httpx.Response(413, json={"error": {"type": "TooLarge", "message": "smaller"}})
        taken.extend(row["item"] for row in batch if row["user"])
        bad = [{"index": place, "field": "user", "value": "", "reason": "empty"} for place, row in enumerate(batch) if not row["user"]]
        if len(bad) == len(batch):
            return httpx.Response(422, json={"error": {"type": "BadData", "message": "none", "details": bad}})
        return httpx.Response(202, json={"accepted": len(batch) - len(bad), "rejected": len(bad), "errors": bad})

    told: list[Progress] = []
    sent = both(stack).send_interactions(rows, batch_rows=size, progress=told.append)
    assert taken == [f"i{place}" for place, fine in enumerate(good) if fine]
    assert (sent.accepted, sent.rejected) == (sum(good), len(good) - sum(good))
    assert [error.index for error in sent.errors] == [place for place, fine in enumerate(good) if not fine]
    assert [each.done for each in told][-1:] == ([len(rows)] if rows else [])


def test_a_file_out_of_the_stacks_reach_is_sent_imported_and_taken_away(both: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"user,item,time\n" * 100_000)
    bodies: dict[str, bytes] = {}

    def stack(request: httpx.Request, number: int) -> httpx.Response:
        bodies[request.method] = request.content
        if request.method == "PUT":
            if "tried" not in bodies:
                bodies["tried"] = b""
                return httpx.Response(503, headers={"Retry-After": "0"})
            return httpx.Response(201, json={"path": f"/data/uploads/{request.url.path.rpartition('/uploads/')[2]}"})
        if request.url.path == "/v1/imports":
            path = json.loads(request.content)["path"]
            return httpx.Response(202, json=RECORD.model_dump(mode="json")) if path.startswith("/data/") else httpx.Response(403)
        return httpx.Response(204)

    told: list[Progress] = []
    with Client("http://stack", key="k") as client:
        client._http = httpx.Client(**{**client._connection.options, "transport": httpx.MockTransport(lambda request: stack(request, 0))})
        assert client.import_path(file, progress=told.append) == RECORD
    assert bodies["PUT"] == file.read_bytes() and "DELETE" in bodies and "tried" in bodies
    assert told[-1].done == told[-1].total == len(file.read_bytes())
    with pytest.raises(ValueError, match="does not exist"), Client("http://stack", key="k") as client:
        client.import_path(tmp_path / "missing")


def test_a_job_that_goes_on_is_not_waited_for_longer_than_told(both: Callable[..., Any]) -> None:
    running = RECORD.model_copy(update={"state": "running"})
    with pytest.raises(TimeoutError, match="it goes on"):
        both(lambda request, number: httpx.Response(200, json=running.model_dump(mode="json"))).wait(running, timeout_seconds=-1.0)


def test_without_an_address_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMANTIDE_URL", raising=False)
    with pytest.raises(ValueError, match="SEMANTIDE_URL"):
        Client()
