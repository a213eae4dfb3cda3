"""No secret of a deployment is ever said: not in a log line, a span, an error answer, a job's record or an artifact."""

import io
import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from semantide.shared import operations_api
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import NotFound, TransientError
from semantide.shared.http import APIRouter, build_app
from semantide.shared.job_process import run_job
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.redaction import RedactedLines, RedactedSpans, Redaction

SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",:/@?#[]"), min_size=8, max_size=40).filter(
    lambda text: not text.isdigit() and "%" not in text
)


def deployment(key: str, password: str, **more: Any) -> Settings:
    return Settings(api_keys=f"shop@read:{key}", redis_url=f"redis://:{quote(password, safe='')}@host:1/0", artifacts_url="s3://bucket/x", **more)


@settings(max_examples=50)
@given(key=SECRETS, password=SECRETS, around=st.text(max_size=20))
def test_whatever_is_said_in_whatever_form_has_no_secret_in_it(key: str, password: str, around: str) -> None:
    redaction = Redaction.of(deployment(key, password))
    for secret in (key, password):
        for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            assert secret not in redaction.text(f"{around.replace(secret, '')} {form} end").replace("***", "\0")
    plain = "imported 500 rows of redis://host:1/0"
    if key not in plain and password not in plain:
        assert redaction.text(plain) == plain


@settings(max_examples=25)
@given(key=SECRETS, password=SECRETS)
def test_log_lines_and_spans_have_none(key: str, password: str) -> None:
    redaction = Redaction.of(deployment(key, password))
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(RedactedLines(logging.Formatter("%(message)s"), redaction))
    try:
        raise TransientError(f"cannot reach redis://:{password}@host with {key!r}")
    except TransientError:
        handler.emit(logging.makeLogRecord({"msg": f"key {key}", "exc_info": __import__("sys").exc_info()}))
    assert key not in out.getvalue().replace("***", "\0") and password not in out.getvalue().replace("***", "\0")

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(RedactedSpans(kept, redaction)))
    with provider.get_tracer("test").start_as_current_span(f"GET {key}", attributes={"url": f"redis://:{password}@h", "many": [key, "a"], "number": 5}) as span:
        span.add_event("said", {"text": password})
        span.set_attribute("http.target", "/v1/users/anna@example/history?x=1")
        span.set_status(Status(StatusCode.ERROR, f"bad {key}"))
    (found,) = kept.get_finished_spans()
    text = found.to_json().replace("***", "\0")
    assert json.dumps(key)[1:-1] not in text and json.dumps(password)[1:-1] not in text and "anna" not in text
    assert found.attributes is not None and found.attributes["number"] == 5 and found.attributes["http.target"] == "/v1/users/{user}?x=1"


@settings(max_examples=6, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=SECRETS, password=SECRETS)
def test_error_answers_records_and_artifacts_have_none(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, key: str, password: str) -> None:
    room = make_room("serving")
    room.broker.flushall()
    room.settings.api_keys, room.settings.otlp_endpoint = f"admin:{key}", f"http://me:{quote(password, safe='')}@host:4318"
    router = APIRouter()
    errors = [NotFound, TransientError, ValueError]

    @router.get("/v1/raise/{number}")
    def fail(number: int) -> None:
        raise errors[number](f"{key} and {password} are wrong")

    client = TestClient(build_app([room], [router, operations_api.build(room)]), headers={"X-API-Key": key.encode()}, raise_server_exceptions=False)
    for number in range(len(errors)):
        said = client.get(f"/v1/raise/{number}").json()["error"]["message"]
        assert said.endswith("are wrong") and key not in said.replace("***", "\0") and password not in said.replace("***", "\0")

    def work(job: JobContext) -> JobOutcome:
        (job.workdir / "made").mkdir(exist_ok=True)
        (job.workdir / "made" / "file").write_text("x")
        job.store.put("models", job.workdir / "made", config=job.spec.config)
        raise ValueError(f"s3://me:{password}@host/x with {key} does not answer")

    monkeypatch.setattr("signal.signal", lambda *_: None)
    record = Jobs(room.broker).submit(JobSpec(kind="train", config={"steps": 5}))
    assert run_job(record.id, work, room.settings, room.store, room.broker, room.queues) == 0
    ended = Jobs(room.broker).get(record.id)
    assert ended.state == "failed" and "does not answer" in (ended.error or "")
    kept = ended.model_dump_json() + "".join(path.read_text() for path in room.settings.data_dir.rglob("*.json"))
    assert json.dumps(key)[1:-1] not in kept.replace("***", "\0") and json.dumps(password)[1:-1] not in kept.replace("***", "\0")


def test_an_api_key_that_a_stack_made_for_itself_is_a_secret_too(tmp_path: Any) -> None:
    (tmp_path / "api_key").write_text("made-by-the-stack")
    assert Redaction.of(Settings(data_dir=tmp_path, api_keys="")).text("x made-by-the-stack y") == "x *** y"
    assert Redaction.of(Settings(data_dir=tmp_path / "none", api_keys="")).text("x") == "x"
