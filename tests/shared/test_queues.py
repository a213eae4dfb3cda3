"""Queues against a real broker: delivery, retries, dead letters."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from semantide.shared import queues as queue_door
from semantide.shared.contracts import ROOMS, CatalogReady, Message, ModelTrained, RunJob
from semantide.shared.errors import NotFound, PermanentError, TransientError
from semantide.shared.queues import Queues, handler, queue_name

REF = "catalogs/sha256-" + "a" * 64


@pytest.fixture
def run_worker(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a room's handlers in a thread, by Celery's own worker."""
    from celery.contrib.testing.worker import start_worker

    monkeypatch.setattr(queue_door, "_handlers", {})
    stops = []

    def run(name: str) -> Any:
        room = make_room(name)
        room.queues.prepare(room)
        context = start_worker(room.queues.app, perform_ping_check=False, pool="solo", shutdown_timeout=10)
        context.__enter__()
        stops.append(context)
        return room

    yield run
    for context in stops:
        context.__exit__(None, None, None)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_every_message_type_has_readers_that_exist() -> None:
    types = {kind for kind in Message.__subclasses__()}
    assert types == set(queue_door.READERS)
    assert all(room in ROOMS for rooms in queue_door.READERS.values() for room in rooms)


def test_messages_arrive_whole_and_failures_are_retried_or_parked(run_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_door, "MAX_ATTEMPTS", 2)
    seen: list[Message] = []
    lock = threading.Lock()

    @handler(CatalogReady)
    def on_catalog(message: CatalogReady, room: Any) -> None:
        with lock:
            seen.append(message)
            if len(seen) == 1:
                raise TransientError("the first time never works")

    @handler(ModelTrained)
    def on_model(message: ModelTrained, room: Any) -> None:
        raise PermanentError("this model cannot be used: train it again")

    room = run_worker("serving")
    message = CatalogReady(catalog=REF)
    room.send(message)
    wait_for(lambda: len(seen) == 2)
    assert seen == [message, message]

    room.send(ModelTrained(job_id="j", model=REF.replace("catalogs", "models"), catalog=REF))
    queue = queue_name(ModelTrained, "serving")
    wait_for(lambda: bool(room.queues.dead_letters(room.broker)))
    letters = room.queues.dead_letters(room.broker)[queue]
    assert letters[0]["message"]["job_id"] == "j"
    assert "train it again" in letters[0]["error"]


def test_parked_messages_are_put_back_and_parked_again_if_they_must(run_worker: Any) -> None:
    seen: list[str] = []
    broken = {"a", "b"}

    @handler(ModelTrained)
    def on_model(message: ModelTrained, room: Any) -> None:
        seen.append(message.job_id)
        if message.job_id in broken:
            raise PermanentError("not yet")

    room = run_worker("serving")
    queue = queue_name(ModelTrained, "serving")
    for name in ("a", "b"):
        room.send(ModelTrained(job_id=name, model=REF.replace("catalogs", "models"), catalog=REF))
    wait_for(lambda: room.queues.parked(room.broker) == {queue: 2})
    broken.remove("a")
    assert room.queues.requeue(room.broker, queue) == 2
    wait_for(lambda: len(seen) == 4 and room.queues.parked(room.broker) == {queue: 1})
    assert room.queues.dead_letters(room.broker)[queue][0]["message"]["job_id"] == "b"
    assert room.queues.requeue(room.broker, queue_name(CatalogReady, "serving")) == 0
    for wrong in ("semantide.ingestion.stream", "../x"):
        with pytest.raises(NotFound, match="name one of"):
            room.queues.requeue(room.broker, wrong)


def test_a_message_reaches_its_own_queue_only(make_room: Callable[[str], Any]) -> None:
    room = make_room("serving")
    room.send(RunJob(room="training", job_id="x"))
    assert {name: depth for name, depth in room.queues.depths(room.broker).items() if depth} == {queue_name(RunJob, "training"): 1}


def test_a_lost_broker_is_a_transient_error() -> None:
    with pytest.raises(TransientError, match="could not be queued"):
        Queues("redis://127.0.0.1:1/0").send(CatalogReady(catalog=REF))


def test_the_trace_crosses_the_queue(run_worker: Any) -> None:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    CeleryInstrumentor().instrument(tracer_provider=provider)
    traces: list[int] = []

    @handler(CatalogReady)
    def on_catalog(message: CatalogReady, room: Any) -> None:
        traces.append(trace.get_current_span().get_span_context().trace_id)

    try:
        room = run_worker("serving")
        with provider.get_tracer("test").start_as_current_span("request") as span:
            room.send(CatalogReady(catalog=REF))
        wait_for(lambda: bool(traces))
        assert traces == [span.get_span_context().trace_id]
    finally:
        CeleryInstrumentor().uninstrument()
