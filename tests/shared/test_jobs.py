"""Jobs run by real processes of a real runner: they end right whatever is killed."""

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from semantide.shared import operations_api
from semantide.shared.contracts import ENDED, JobRecord, JobSpec
from semantide.shared.errors import BrokerUnavailable, Conflict, NotFound
from semantide.shared.followed_jobs import FollowedJobs
from semantide.shared.http import build_app
from semantide.shared.job_ending import REPORT_FILE, end_job, report_of
from semantide.shared.job_process import run_job
from semantide.shared.job_runner import JobRunner
from semantide.shared.jobs import METRICS_SECONDS, JobContext, JobOutcome, Jobs, open_jobs_key
from semantide.shared.version import code_version

# A job's process with a body of the test's own: counts to `steps`, keeps its count in a checkpoint, appends each step it makes to `made`.
BODY = """
import json, os, sys, time
from semantide.shared import broker
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.errors import BadData, BrokerUnavailable
from semantide.shared.job_process import run_job
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.queues import Queues

def run(job: JobContext) -> JobOutcome:
    config = job.spec.config
    job.configured({"steps": 0, "pause": 0, **config})
    path = job.workdir / "count.json"
    count = json.loads(path.read_text()) if path.exists() else 0
    (job.workdir / "scratch").mkdir(exist_ok=True)
    job.discard(job.workdir / "scratch")
    while count < config["steps"]:
        job.check_cancelled()
        if config.get("lose_broker_at") == count and not (job.workdir / "lost").exists():
            (job.workdir / "lost").touch()
            raise BrokerUnavailable("gone for a moment")
        if config.get("fail_at") == count:
            raise BadData("row 7, field time: 3 is in seconds: give milliseconds")
        if config.get("die_at") == count:
            os._exit(3)
        count += 1
        job.metric(count, loss=1.0 / count)
        job.progress(count, config["steps"], "steps")
        temporary = path.with_suffix(".incoming")
        temporary.write_text(json.dumps(count))
        temporary.replace(path)
        time.sleep(config.get("pause", 0))
    (job.workdir / "out").mkdir(exist_ok=True)
    (job.workdir / "out" / "count").write_text(str(count))
    return JobOutcome({"thing": job.store.put("things", job.workdir / "out")}, {"count": count, "pid": os.getpid()})

settings = Settings()
client = broker.connect(settings.redis_url)
import threading, signal
def watch():
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
sys.exit(run_job(sys.argv[1], run, settings, ArtifactStore(settings.artifacts_root), client, Queues(settings.redis_url)))
"""


@pytest.fixture
def room(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    opened = make_room("training")
    monkeypatch.setenv("SEMANTIDE_DATA_DIR", str(opened.settings.data_dir))
    monkeypatch.setenv("SEMANTIDE_REDIS_URL", opened.settings.redis_url)
    return opened


@pytest.fixture
def start_runner(room: Any, tmp_path: Path) -> Iterator[Callable[[], JobRunner]]:
    script = tmp_path / "body.py"
    script.write_text(textwrap.dedent(BODY))
    runners = []

    def start() -> JobRunner:
        runner = JobRunner(room, [sys.executable, str(script)])
        runner.start()
        runners.append(runner)
        return runner

    yield start
    for runner in runners:
        runner.stop()


def wait_for(jobs: Jobs, job_id: str, condition: Callable[[JobRecord], bool], seconds: float = 240) -> JobRecord:
    deadline = time.monotonic() + seconds
    while not condition(record := jobs.get(job_id)):
        assert time.monotonic() < deadline, f"it did not happen in time: {record}"
        time.sleep(0.02)
    return record


def submit(jobs: Jobs, **config: Any) -> JobRecord:
    return jobs.submit(JobSpec(kind="train", config=config))


def process_of(room: Any, job_id: str) -> int:
    """Pid of the process that works on a job."""
    needle = job_id.encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if needle in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError(f"no process of {job_id}")


def test_a_job_succeeds_and_says_what_it_did(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    record = submit(jobs, steps=3)
    assert record.state == "queued"
    start_runner()
    record = wait_for(jobs, record.id, lambda r: r.state == "succeeded")
    assert record.result["count"] == 3
    assert record.artifacts["thing"].startswith("things/sha256-")
    assert (record.done, record.total, record.unit) == (3, 3, "steps")
    assert [row["step"] for row in jobs.metrics(record.id)] == [1, 2, 3]
    assert jobs.metrics(record.id, after=2) == [{"step": 3, "loss": 1 / 3}]
    assert jobs.recent(kind="train", state="succeeded")[0].id == record.id
    assert not (room.settings.data_dir / "jobs" / record.id / "scratch").exists()
    assert 0 < room.broker.ttl(f"{Jobs.key(record.id)}:metrics") <= METRICS_SECONDS
    with pytest.raises(Conflict, match="already succeeded"):
        jobs.cancel(record.id)
    with pytest.raises(Conflict, match="only a failed or cancelled"):
        jobs.resume(record.id)


def test_a_job_that_fails_says_why_and_can_be_resumed(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = wait_for(jobs, submit(jobs, steps=3, fail_at=1).id, lambda r: r.state == "failed")
    assert "give milliseconds" in str(record.error)
    jobs.write(record.id, spec=JobSpec(kind="train", config={"steps": 3}).model_dump(mode="json"))
    jobs.resume(record.id)
    assert wait_for(jobs, record.id, lambda r: r.state == "succeeded").result["count"] == 3


@pytest.mark.parametrize("kills", [1, 3])
def test_kill_9_of_the_jobs_process_loses_nothing(room: Any, start_runner: Any, kills: int) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = submit(jobs, steps=40, pause=0.05)
    for attempt in range(1, kills + 1):
        done = jobs.get(record.id).done
        wait_for(jobs, record.id, lambda r, a=attempt, d=done: r.attempt == a and r.done > d)  # type: ignore[misc]
        os.kill(process_of(room, record.id), signal.SIGKILL)
    record = wait_for(jobs, record.id, lambda r: r.state == "succeeded")
    assert record.result["count"] == 40 and record.attempt == kills + 1
    assert [row["step"] for row in jobs.metrics(record.id)] == list(range(1, 41))


def test_a_job_that_always_dies_fails_with_its_log(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = wait_for(jobs, submit(jobs, steps=3, die_at=0).id, lambda r: r.state == "failed")
    assert record.attempt == room.settings.job_attempts and "status 3" in str(record.error)


def test_a_lost_broker_is_no_failure_of_the_job(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = wait_for(jobs, submit(jobs, steps=3, lose_broker_at=2).id, lambda r: r.state in ("succeeded", "failed"))
    assert record.state == "succeeded" and record.attempt == 1
    assert (room.settings.data_dir / "jobs" / record.id / "lost").exists()


def test_a_room_that_cannot_be_woken_still_gets_its_job(room: Any, start_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: Any) -> None:
        raise BrokerUnavailable("message RunJob could not be queued")

    monkeypatch.setattr(room.queues, "send", away)
    jobs = Jobs(room.broker, room.queues)
    record = submit(jobs, steps=1)
    start_runner()
    assert wait_for(jobs, record.id, lambda r: r.state == "succeeded").result["count"] == 1


def test_a_job_continues_the_trace_of_who_submitted_it(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    seen = []

    def run(job: JobContext) -> JobOutcome:
        seen.append(trace.get_current_span().get_span_context())
        return JobOutcome()

    before = signal.getsignal(signal.SIGTERM)
    try:
        with trace.get_tracer("test").start_as_current_span("request") as span:
            record = Jobs(room.broker).submit(JobSpec(kind="train"))
        assert run_job(record.id, run, room.settings, room.store, room.broker, room.queues) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0].trace_id == span.get_span_context().trace_id
    assert seen[0].span_id != span.get_span_context().span_id


def test_recent_looks_past_others_and_the_newest_metrics_are_enough(room: Any) -> None:
    jobs = Jobs(room.broker)
    first = jobs.submit(JobSpec(kind="dataset"))
    for number in range(210):
        room.broker.zadd("semantide:jobs", {f"gone-{number}": first.created + 1 + number})
    assert [record.id for record in jobs.recent(kind="dataset")] == [first.id]
    for step in [*range(300), *range(250, 420)]:
        room.broker.xadd(f"{Jobs.key(first.id)}:metrics", {"row": json.dumps({"step": step})})
    assert [row["step"] for row in jobs.metrics(first.id)] == list(range(420))
    assert [row["step"] for row in jobs.metrics(first.id, after=100)] == list(range(101, 420))
    assert [row["step"] for row in jobs.metrics(first.id, after=415)] == [416, 417, 418, 419]


@pytest.mark.parametrize("unknown", [{"spec": {"kind": "polish"}}, {"spec": {"kind": "train", "shine": 3}}, {"lustre": 1}])
def test_what_a_newer_version_recorded_holds_no_other_job_up(room: Any, start_runner: Any, unknown: dict[str, Any]) -> None:
    jobs = Jobs(room.broker)
    foreign = submit(jobs, steps=1)
    jobs.write(foreign.id, **unknown)
    own = submit(jobs, steps=1)
    assert [record.id for record in jobs.recent()] == [own.id] == [record.id for record in FollowedJobs(room.broker).open_jobs("training")]
    for look in (lambda: jobs.get(foreign.id), lambda: jobs.recent(strict=True)):
        with pytest.raises(Conflict, match="another version of this software"):
            look()
    client = TestClient(build_app([room], [operations_api.build(room)]), headers={"X-API-Key": "test-key"})
    assert [each["id"] for each in client.get("/v1/jobs").json()] == [own.id]
    for path in ("", "/report", "/metrics", "/log"):
        assert client.get(f"/v1/jobs/{foreign.id}{path}").status_code == 409
    assert client.post(f"/v1/jobs/{foreign.id}/cancel").status_code == 409
    start_runner()
    assert wait_for(jobs, own.id, lambda record: record.state in ENDED).state == "succeeded"
    kept = room.broker.hgetall(Jobs.key(foreign.id))
    assert json.loads(kept[b"state"]) == "queued" and room.broker.sismember(open_jobs_key("training"), foreign.id)


def test_cancel_stops_soon_and_resume_goes_on(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = submit(jobs, steps=60, pause=0.05)
    wait_for(jobs, record.id, lambda r: r.done > 2)
    jobs.cancel(record.id)
    record = wait_for(jobs, record.id, lambda r: r.state == "cancelled", 10)
    done = json.loads((room.settings.data_dir / "jobs" / record.id / "count.json").read_text())
    assert 2 < done < 60
    jobs.resume(record.id)
    assert wait_for(jobs, record.id, lambda r: r.state == "succeeded").result["count"] == 60


@pytest.mark.parametrize(
    ("config", "state", "said"),
    [
        ({"steps": 3}, "succeeded", "made thing"),
        ({"steps": 3, "fail_at": 1}, "failed", "give milliseconds"),
        ({"steps": 3, "die_at": 0}, "failed", "status 3"),
        ({"steps": 600, "pause": 0.05}, "cancelled", "cancelled on request"),
    ],
)
def test_whoever_sees_that_a_job_ended_finds_its_report(room: Any, start_runner: Any, config: dict[str, Any], state: str, said: str) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner()
    record = submit(jobs, **config)
    if state == "cancelled":
        wait_for(jobs, record.id, lambda r: r.done > 0)
        jobs.cancel(record.id)
    record = wait_for(jobs, record.id, lambda r: r.state == state)
    folder = room.settings.data_dir / "jobs" / record.id
    text = (folder / REPORT_FILE).read_text()
    assert said in text and f"<td>{state}</td>" in text and code_version() in text and "<td>pause</td>" in text
    assert report_of(record, jobs, room.store, folder) == text
    room.broker.delete(Jobs.metrics_key(record.id))  # as after their time
    assert report_of(record, jobs, room.store, folder) == text


def test_a_report_that_cannot_be_written_takes_nothing_from_the_job(room: Any, tmp_path: Path) -> None:
    jobs = Jobs(room.broker, room.queues)
    record = submit(jobs, steps=1)
    end_job(jobs, record, room.store, tmp_path / "nowhere", "failed", error="no")
    assert jobs.get(record.id).state == "failed" and jobs.get(record.id).error == "no"
    assert "<td>failed</td>" in report_of(jobs.get(record.id), jobs, room.store, tmp_path / "nowhere")


def test_a_queued_job_is_cancelled_at_once(room: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    record = jobs.cancel(submit(jobs, steps=1).id)
    assert record.state == "cancelled"


def test_a_stopped_runner_hands_its_job_to_the_next(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    first = start_runner()
    record = submit(jobs, steps=40, pause=0.05)
    wait_for(jobs, record.id, lambda r: r.done > 2)
    first.stop()
    assert jobs.get(record.id).state == "queued"
    start_runner()
    assert wait_for(jobs, record.id, lambda r: r.state == "succeeded").result["count"] == 40


def test_two_runners_never_share_a_job(room: Any, start_runner: Any) -> None:
    jobs = Jobs(room.broker, room.queues)
    start_runner(), start_runner()
    records = [submit(jobs, steps=5, pause=0.02) for _ in range(4)]
    for record in records:
        assert wait_for(jobs, record.id, lambda r: r.state == "succeeded").attempt == 1


def test_unknown_jobs_are_named(room: Any) -> None:
    with pytest.raises(NotFound, match="no job 'nope'"):
        Jobs(room.broker).get("nope")
