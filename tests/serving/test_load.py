"""Serving over HTTP while much happens at once: widths mix, clients leave, a request is bad, too many come, the process ends."""

import asyncio
import json
import signal
import threading

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from semantide.services.serving import engine, recommending
from semantide.services.serving.narrowing import Narrowing
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect
from semantide.shared.config import Settings
from semantide.shared.contracts import Interaction
from semantide.shared.history import Histories
from semantide.shared.queues import Queues
from semantide.shared.room import Room

from .world import Server, World, storm, wait_until


def idle(server: Server) -> None:
    """Nothing runs, waits or is held."""
    scheduler, pool = server.service.scheduler, server.service.pool
    wait_until(lambda: scheduler.running() == scheduler.depth() == pool.in_use_bytes == pool.leases == 0)


def test_widths_1_10_and_128_at_once_answer_as_if_alone(server):
    rng = np.random.default_rng(0)
    bodies = [{"history": [f"i{row}" for row in rng.integers(0, 200, 5)], "n": min(width, 20), "beam_width": width} for width in [1, 10, 128] * 20]
    expected = [server.items(**body) for body in bodies[:12]]
    server.service.narrowing._wait_seconds = 0
    replies = asyncio.run(storm(server.url, bodies))
    assert {reply.status for reply in replies} == {200}
    for body, reply in zip(bodies, replies, strict=True):
        assert len(reply.body["items"]) == body["n"] and reply.body["beam_width"] == reply.body["requested_beam_width"] == body["beam_width"]
    for reply, items in zip(replies, expected, strict=False):
        assert [hit["item"] for hit in reply.body["items"]] == items
    idle(server)


async def leave(url: str, body: dict, when: threading.Event, key: str = "test-key") -> None:
    """Send a request and close the connection without waiting for the answer."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    while not when.is_set():
        await asyncio.sleep(0.005)
    writer.close()
    await writer.wait_closed()


def test_a_client_that_leaves_mid_step_frees_its_work_and_its_memory(server, monkeypatch):
    reached, proceed, rounds = threading.Event(), threading.Event(), []
    advance = engine.Group.advance

    def held(group):
        rounds.append([request.width for request in group.requests])
        if len(rounds) == 1:
            reached.set()
            assert proceed.wait(60)
        return advance(group)

    dropped = []
    monkeypatch.setattr(engine.Group, "advance", held)
    monkeypatch.setattr(server.service.meters, "dropped", dropped.append)
    left = threading.Event()

    def client() -> None:
        asyncio.run(leave(server.url, {"history": ["i1"], "beam_width": 77}, reached))
        left.set()

    thread = threading.Thread(target=client)
    thread.start()
    assert left.wait(60) and server.service.pool.in_use_bytes > 0
    wait_until(lambda: _cancelled(server))
    proceed.set()
    thread.join(60)
    idle(server)
    assert rounds == [[77]] and dropped == ["cancelled"]
    assert server.recommend(history=["i1"]).status_code == 200


def _cancelled(server: Server) -> bool:
    """Whether the request in the worker's hands has lost its client; seen from outside as its future, which the scheduler's frames hold."""
    import gc

    from semantide.services.serving.ticket import Ticket

    return any(type(each) is Ticket and each.cancelled for each in gc.get_objects())


def test_one_bad_request_among_neighbours_fails_alone(server, monkeypatch):
    advance = engine.Group.advance

    def failing(group):
        if any(request.width == 13 for request in group.requests):
            raise RuntimeError("this request breaks the model")
        return advance(group)

    monkeypatch.setattr(engine.Group, "advance", failing)
    bodies = [{"history": ["i1"], "beam_width": 13 if number == 5 else 12} for number in range(12)]
    replies = asyncio.run(storm(server.url, bodies))
    assert [reply.status for reply in replies] == [200] * 5 + [500] + [200] * 6
    idle(server)


def test_a_request_that_cannot_be_prepared_fails_alone(server, monkeypatch):
    prepare = recommending.Recommending._prepare

    def failing(self, asked, stored):
        if asked.wish.width == 13:
            raise ValueError("`beam_width` is 13: an unlucky number")
        return prepare(self, asked, stored)

    monkeypatch.setattr(recommending.Recommending, "_prepare", failing)
    replies = asyncio.run(storm(server.url, [{"history": ["i1"], "beam_width": 13 if number == 2 else 12} for number in range(5)]))
    assert [reply.status for reply in replies] == [200, 200, 422, 200, 200]


def test_an_unreadable_stored_history_fails_its_user_alone(server, world):
    store = Histories(world.room.broker, 200, 3600)
    store.append([Interaction(user=f"u{number}", item=f"i{number}", time=1) for number in range(9)])
    world.room.broker.rpush(Histories.key("u4"), b"damaged")
    world.room.broker.set(Histories.key("of another type"), b"damaged")
    bodies = [{"user": user} for user in (*(f"u{number}" for number in range(9)), "of another type")] + [{"history": ["i1"]}]
    for _ in range(2):
        replies = asyncio.run(storm(server.url, bodies))
        assert [reply.status for reply in replies] == [200] * 4 + [500] + [200] * 4 + [500, 200]
        assert all(
            f"semantide:history:{body['user']}" in reply.body["error"]["message"] for body, reply in zip(bodies, replies, strict=True) if reply.status == 500
        )
    idle(server)


def test_explicit_histories_do_not_wait_for_a_broker_that_hangs(settings, tmp_path):
    with OwnBroker(tmp_path / "own") as own:
        alone = settings.model_copy(update={"redis_url": own.url})
        world = World(Room("serving", alone, connect(own.url), ArtifactStore(alone.artifacts_root), Queues(own.url)), tmp_path / "artifacts")
        world.catalog_ref = world.add_catalog()
        world.live(0)
        with Server(world.room) as running:
            wait_until(lambda: running.service.swapper.bundle is not None)
            expected = running.items(history=["i1"])
            assert own.process is not None
            own.process.send_signal(signal.SIGSTOP)
            try:
                replies = asyncio.run(storm(running.url, [{"user": "ann"}, {"history": ["i1"]}] * 20, spread_seconds=1.0))
            finally:
                own.process.send_signal(signal.SIGCONT)
            for reply in replies:
                assert reply.status == (200 if reply.number % 2 else 503), reply
                assert reply.status == 503 or [hit["item"] for hit in reply.body["items"]] == expected
            wait_until(lambda: running.recommend(user="ann").status_code == 200)


@pytest.fixture
def tight(world, settings: Settings) -> Room:
    """A room with memory for few beams."""
    world.live(0)
    settings = settings.model_copy(update={"serving_kv_bytes": 2 * 1024 * 1024, "serving_narrowing_seconds": 0.0})
    return Room("serving", settings, world.room.broker, world.room.store, world.room.queues)


def test_more_than_memory_holds_waits_and_more_than_it_ever_can_is_refused(tight, monkeypatch):
    with Server(tight) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        each = server.service.swapper.bundle.model.kv_bytes(4, 200)
        server.service.pool.budget_bytes = 3 * each
        replies = asyncio.run(storm(server.url, [{"history": ["i1"], "beam_width": 200} for _ in range(30)]))
        assert {reply.status for reply in replies} == {200}
        assert each <= server.service.pool.high_water_bytes <= 3 * each
        idle(server)
        server.service.pool.budget_bytes = each // 2
        refused = server.recommend(history=["i1"], beam_width=200)
        assert refused.status_code == 422 and "`beam_width` 200" in refused.text and "SEMANTIDE_SERVING_KV_BYTES" in refused.text
        assert server.recommend(history=["i1"], beam_width=20).status_code == 200
        idle(server)


def test_overload_narrows_says_so_and_recovers(server, monkeypatch):
    scheduler, advance = server.service.scheduler, engine.Group.advance
    # The wait is told by who waits, not by how fast this machine is, and nothing goes on until many do.
    monkeypatch.setattr(scheduler, "_expected_wait", lambda: 0.01 * scheduler.depth())
    server.service.narrowing.__init__(0.1)
    assert server.recommend(history=["i1"], beam_width=100).json()["narrowed"] is False
    many = threading.Event()

    def held(group):
        assert many.wait(60)
        return advance(group)

    monkeypatch.setattr(engine.Group, "advance", held)

    async def release():
        while scheduler.depth() < 60:
            await asyncio.sleep(0.001)
        many.set()

    async def crowd():
        return (await asyncio.gather(storm(server.url, [{"history": ["i1"], "beam_width": 100, "n": 30} for _ in range(120)]), release()))[0]

    replies = asyncio.run(crowd())
    assert {reply.status for reply in replies} == {200}
    assert {len(reply.body["items"]) for reply in replies} == {30}
    widths = {reply.body["beam_width"] for reply in replies}
    assert widths <= {100, 75, 50, 30} and min(widths) < 100
    assert all(reply.body["narrowed"] == (reply.body["beam_width"] < 100) and reply.body["requested_beam_width"] == 100 for reply in replies)
    idle(server)
    wait_until(lambda: server.recommend(history=["i1"], beam_width=100).json()["narrowed"] is False)


def test_the_end_of_the_process_answers_all_that_it_received(world, monkeypatch):
    world.live(0)
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        server.service.narrowing.__init__(0)
        received, goes_on, submit, advance = [], threading.Event(), server.service.scheduler.submit, engine.Group.advance
        monkeypatch.setattr(server.service.scheduler, "submit", lambda asked: received.append(asked) or submit(asked))
        monkeypatch.setattr(engine.Group, "advance", lambda group: goes_on.wait(60) and advance(group))

        async def crowd():
            sending = asyncio.create_task(storm(server.url, [{"history": [f"i{number}"], "beam_width": 150} for number in range(100)]))
            while len(received) < 100:
                await asyncio.sleep(0.001)
            server._server.should_exit = True
            goes_on.set()
            return await sending

        replies = asyncio.run(crowd())
        assert {reply.status for reply in replies} == {200} and all(len(reply.body["items"]) == 10 for reply in replies)
        server._thread.join(60)
        assert not server._thread.is_alive() and server.service.pool.in_use_bytes == 0


def test_a_returning_user_is_read_from_where_he_left_until_the_model_changes(server, world):
    def visit(*items: str) -> list[str]:
        Histories(world.room.broker, 200, 3600).append([Interaction(user="ann", item=item, time=1000 + int(item[1:]), action="click") for item in items])
        return server.items(user="ann")

    bundle = server.service.swapper.bundle
    visit(*(f"i{number}" for number in range(1, 10)))
    wait_until(lambda: bundle.prompts.use().users)  # kept once the answer is on its way
    warm = visit("i10")
    wait_until(lambda: bundle.prompts.use().hits)
    use = bundle.prompts.use()
    assert (use.users, use.hits, use.misses) == (1, 1, 1) and use.tokens_asked - use.tokens_known == 28 + 3
    assert warm == server.items(history=[f"i{number}" for number in range(1, 11)])
    server.client.post("/v1/serving/promote", json={"model": world.candidate(1)})
    assert server.service.swapper.bundle.prompts.use().users == 0
    assert visit("i11") == server.items(history=[f"i{number}" for number in range(1, 12)])


def test_every_stage_of_a_request_is_a_span(server, monkeypatch):
    from semantide.shared import telemetry

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", lambda room: provider.get_tracer(room))
    with provider.get_tracer("test").start_as_current_span("request") as parent:
        marks = server.service.submit(_wish()).result(60)[1].marks
        telemetry.stage_spans("serving", marks)
    spans = [span for span in exporter.get_finished_spans() if span.name != "request"]
    assert [span.name for span in spans] == ["queue", "assemble", "wait", "compose", "prefill", "select", "step_1", "select", "step_2", "select", "format"]
    assert all(span.parent.span_id == parent.get_span_context().span_id and span.start_time <= span.end_time for span in spans)
    assert 0 <= spans[0].start_time - parent.start_time < 5e9


def _wish():
    from semantide.services.serving.wish import Wish

    return Wish(user=None, events=(("i1", "click", None),), n=5, width=10)


def test_narrowing_can_be_switched_off():
    assert Narrowing(Settings(serving_narrowing_seconds=0).serving_narrowing_seconds).decide(100.0) == 1.0
