"""Accepted rows reach the log once, whatever is killed, replayed or full on the way."""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semantide.services.ingestion import api, eventlog, tasks
from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.stream import GROUP, PARKED, STREAM
from semantide.shared.availability import Availability
from semantide.shared.history import Histories

NOW = int(time.time() * 1000)


def event(number: int, **fields: Any) -> dict[str, Any]:
    return {"user": f"u{number % 7}", "item": f"i{number}", "time": NOW - 1_000_000 + number, "action": "click", **fields}


@pytest.fixture
def room(make_room: Any) -> Any:
    return make_room("ingestion")


@pytest.fixture
def intake(room: Any) -> api.Intake:
    return api.Intake(room)


@pytest.fixture
def manifest(room: Any) -> Iterator[Manifest]:
    manifest = Manifest(room.settings.data_dir / "events")
    yield manifest
    manifest.close()


def stored(manifest: Manifest) -> Counter[tuple[str, str, int]]:
    tables = [read_segment(segment.path) for segment in EventLog(manifest).segments()]
    return Counter((row["user"], row["item"], row["time"]) for table in tables for row in table.to_pylist())


def drain(consumer: tasks.Consumer) -> None:
    consumer.step()
    while consumer.step():
        pass


def test_the_writers_span_is_linked_to_the_requests_that_it_serves(room: Any, intake: api.Intake, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    requests = []
    for number in range(2):
        with trace.get_tracer("test").start_as_current_span("request") as span:
            intake.interactions([event(number)])
            requests.append(span.get_span_context().trace_id)
    intake.interactions([event(2)])
    drain(tasks.Consumer(room, manifest, block_ms=10))
    written = [span for span in spans.get_finished_spans() if span.name == "write to the log"]
    assert sorted(link.context.trace_id for span in written for link in span.links) == sorted(requests)
    assert len(stored(manifest)) == 3


def test_a_log_that_cannot_be_opened_is_opened_later(room: Any, intake: api.Intake, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    intake.interactions([event(1)])
    stop, tries = threading.Event(), []

    def opening(folder: Any) -> Manifest:
        tries.append(folder)
        if len(tries) == 1:
            raise sqlite3.OperationalError("disk I/O error")
        return Manifest(folder)

    monkeypatch.setattr(tasks, "Manifest", opening)
    monkeypatch.setattr(tasks, "OPEN_AGAIN_SECONDS", 0.05)
    thread = threading.Thread(target=tasks.background, args=(room, stop))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not stored(manifest):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join(60)
    assert len(tries) == 2


def test_every_accepted_event_is_stored_once(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    accepted, bad = intake.interactions([event(number) for number in range(50)])
    assert (accepted, bad) == (50, [])
    intake.interactions([event(number) for number in range(25, 75)])
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert stored(manifest) == Counter({(f"u{n % 7}", f"i{n}", NOW - 1_000_000 + n): 1 for n in range(75)})
    assert broker.xlen(STREAM) == 0
    assert manifest.counter("duplicates") == 25


def test_given_event_id_decides_what_is_one_event(room: Any, intake: api.Intake, manifest: Manifest) -> None:
    intake.interactions([event(1, event_id="a"), event(1, event_id="b"), event(2, event_id="a")])
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert sorted(row[1] for row in stored(manifest).elements()) == ["i1", "i1"]


@pytest.mark.parametrize("where", ["before_write", "after_commit", "before_acknowledgement"])
def test_a_killed_writer_loses_and_doubles_nothing(
    room: Any, intake: api.Intake, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, where: str, broker: Any
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    intake.interactions([event(number) for number in range(20)])
    first = tasks.Consumer(room, manifest, block_ms=1)
    first.step()
    with monkeypatch.context() as patch:
        intake.interactions([event(number) for number in range(10, 40)])
        if where == "before_write":
            patch.setattr(first._writer, "write", die)
        elif where == "after_commit":
            real = first._writer.write
            patch.setattr(first._writer, "write", lambda entries: (real(entries), die())[1])
        else:
            patch.setattr(first, "_append_histories", die)
        with pytest.raises(Killed):
            first.step()
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert stored(manifest) == Counter({(f"u{n % 7}", f"i{n}", NOW - 1_000_000 + n): 1 for n in range(40)})
    history = Histories(broker, 200, 1000)
    assert sum(len(history.get(f"u{user}")) for user in range(7)) == 40
    assert broker.xpending(STREAM, GROUP)["pending"] == 0
    assert manifest.connection.execute("SELECT count(*) FROM entries").fetchone()[0] == 0


def test_a_full_disk_keeps_the_batches_and_resumes(room: Any, intake: api.Intake, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, broker: Any) -> None:
    intake.interactions([event(number) for number in range(20)])
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    real = eventlog.write_durably

    def full(table: pa.Table, path: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(eventlog, "write_durably", full)
    consumer.step()
    with pytest.raises(OSError, match="No space"):
        consumer.step()
    assert broker.xlen(STREAM) == 1
    assert not list(manifest.segments.iterdir())
    monkeypatch.setattr(eventlog, "write_durably", real)
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert sum(stored(manifest).values()) == 20


def test_little_free_disk_stops_before_it_is_full(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    intake.interactions([event(1)])
    with pytest.raises(OSError, match="bytes are free"):
        drain(tasks.Consumer(room, manifest, min_free_bytes=1 << 60, block_ms=1))
    assert broker.xlen(STREAM) == 1


def test_background_writes_recovers_and_stops(room: Any, intake: api.Intake, broker: Any, manifest: Manifest) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=tasks.background, args=(room, stop))
    thread.start()
    try:
        intake.interactions([event(1)])
        wait_for(lambda: broker.xlen(STREAM) == 0)
        # The broker forgot everything: the group is made anew.
        broker.flushall()
        intake.interactions([event(2)])
        wait_for(lambda: broker.xlen(STREAM) == 0)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert sum(stored(manifest).values()) == 2


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_an_unreadable_batch_is_parked_and_holds_up_nothing(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    broker.xadd(STREAM, {"kind": "interactions", "rows": 1, "data": b"junk"})
    broker.xadd(STREAM, {"kind": "strangers", "data": b""})
    intake.interactions([event(1)])
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert sum(stored(manifest).values()) == 1
    letters = [json.loads(letter) for letter in broker.lrange(PARKED, 0, -1)]
    assert ["cannot be read" in letters[0]["error"], "strangers" in letters[1]["error"]] == [True, True]
    assert broker.xlen(STREAM) == 0


def test_backlog_beyond_the_limit_is_refused(make_room: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(settings, "max_backlog_bytes", 2000)
    intake = api.Intake(make_room("ingestion"))
    intake.interactions([event(number) for number in range(300)])
    with pytest.raises(api.TransientError, match="wait for the event log"):
        intake.interactions([event(1)])


def test_small_segments_are_merged_and_orphans_swept(room: Any, intake: api.Intake, manifest: Manifest) -> None:
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    consumer.step()
    for number in range(6):
        intake.interactions([event(number)])
        consumer.step()
    log = EventLog(manifest)
    before = stored(manifest)
    assert len(log.segments()) == 6
    assert log.merge_small(at_least=3) == 6
    (manifest.segments / "orphan.parquet").write_bytes(b"x")
    assert len(log.segments()) == 1
    assert stored(manifest) == before
    assert log.sweep() == 1, "the merged files stay for readers that hold their names"
    assert log.sweep(now=time.time() + 7200) == 6
    assert stored(manifest) == before


def test_history_holds_what_the_user_did_not_what_was_shown(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    intake.interactions([event(7, action="exposure"), event(14, action="like"), event(0, action="click")])
    drain(tasks.Consumer(room, manifest, block_ms=1))
    assert [(entry.item, entry.action) for entry in Histories(broker, 200, 1000).get("u0")] == [("i0", "click"), ("i14", "like")]


def announce(consumer: tasks.Consumer, room: Any) -> list[dict[str, Any]]:
    sent: list[Any] = []
    object.__setattr__(room.queues, "send", sent.append)
    assert consumer.announce(at_once=True)
    return list(pq.read_table(room.store.get(sent[0].items) / "items.parquet").to_pylist())


def test_item_fields_left_out_keep_their_value(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    intake.items([{"id": "a", "title": "Lamp", "categories": ["home"], "embedding": [1.0, 2.0]}, {"id": "b"}])
    intake.items([{"id": "a", "available": False}])
    assert Availability(broker).unavailable() == {"a"}
    drain(consumer)
    first, second = announce(consumer, room)
    assert first == {
        "item": "a", "title": "Lamp", "text": "", "categories": ["home"], "attributes": "{}", "available": False, "deleted": False, "embedding": [1.0, 2.0],
    }  # fmt: skip
    assert (second["item"], second["title"], second["embedding"], second["available"]) == ("b", "", None, True)
    assert not consumer.announce(at_once=True), "nothing changed since"
    assert Availability(broker).unavailable() == {"a"}


def test_deleted_item_leaves_at_once_and_comes_back_when_sent_again(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    intake.items([{"id": "a", "title": "Lamp"}])
    intake.items([{"id": "a", "deleted": True}])
    assert Availability(broker).unavailable() == {"a"}
    drain(consumer)
    assert announce(consumer, room)[0]["deleted"] is True
    intake.items([{"id": "a"}])
    drain(consumer)
    assert announce(consumer, room)[0]["deleted"] is False
    assert Availability(broker).unavailable() == set()


def test_embedding_length_is_fixed_by_the_first_until_all_are_cleared(room: Any, intake: api.Intake, manifest: Manifest) -> None:
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    accepted, bad = intake.items([{"id": "a", "embedding": [1.0, 2.0]}, {"id": "b", "embedding": [1.0]}])
    assert (accepted, bad[0].field, "2 numbers" in bad[0].reason) == (1, "embedding", True)
    drain(consumer)
    intake.items([{"id": "a", "embedding": []}])
    drain(consumer)
    object.__setattr__(room.queues, "send", lambda message: None)
    consumer.announce(at_once=True)
    assert intake.items([{"id": "b", "embedding": [1.0, 2.0, 3.0]}]) == (1, [])


def test_steady_changes_are_told_together(room: Any, intake: api.Intake, manifest: Manifest) -> None:
    sent: list[Any] = []
    object.__setattr__(room.queues, "send", sent.append)
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    every, begin = room.settings.item_changes_seconds, time.monotonic() + 1000
    for number in range(int(3 * every)):
        intake.items([{"id": f"i{number}"}])
        drain(consumer)
        for part in (0.3, 0.6, 0.9):
            consumer.announce(now=begin + number + part)
    assert 2 <= len(sent) <= 4, "the first after a moment, then one each interval"
    consumer.announce(at_once=True)
    assert sum(pq.read_table(room.store.get(message.items) / "items.parquet").num_rows for message in sent) == int(3 * every)


def test_interactions_that_never_stop_do_not_hold_up_new_items(room: Any, intake: api.Intake, manifest: Manifest, broker: Any) -> None:
    sent: list[Any] = []
    object.__setattr__(room.queues, "send", sent.append)
    consumer = tasks.Consumer(room, manifest, block_ms=1)
    intake.items([{"id": "a", "available": True}])
    drain(consumer)
    intake.items([{"id": "a", "available": False}])
    assert not consumer.announce(at_once=True), "the log does not know yet what was told"
    assert Availability(broker).unavailable() == {"a"} and room.store.list("items") == []
    drain(consumer)
    for number in range(3 * tasks.ENTRIES_PER_READ):
        intake.interactions([event(number)])
    assert consumer.announce(at_once=True) and len(sent) == 1
    assert Availability(broker).unavailable() == {"a"}
