"""What a careless or hostile client sends: refused by name or answered honestly, and nobody else notices."""

import asyncio
import threading

import numpy as np

from semantide.shared.contracts import Interaction
from semantide.shared.history import Histories

from .world import post, storm, wait_until

REFUSED = [
    {"history": ["i1"], "beam_width": 0},
    {"history": ["i1"], "beam_width": -1},
    {"history": ["i1"], "beam_width": 10**30},
    {"history": ["i1"], "beam_width": 2.5},
    {"history": ["i1"], "n": -5},
    {"history": ["i1"], "n": 10**400},
    {"history": ["i1"], "n": None},
    {"history": []},
    {"history": "i1"},
    {"history": ["i1", ""]},
    {"history": ["i1", "a\nb"]},
    {"history": ["x" * 257]},
    {"history": [{"item": "i1", "time": "yesterday"}]},
    {"history": [{"item": "i1", "price": 3}]},
    {"history": ["i1"] * 10_001},
    {"user": "a\0b"},
    {"user": 7},
    {"history": ["i1"], "exclude_ids": ["x"] * 10_001},
    {"history": ["i1"], "exclude_ids": [None]},
    {"history": ["i1"], "variety": float("inf")},
    {"history": ["i1"], "categories_any": ["c"] * 101},
    {"history": ["i1"], "variant": ""},
    {"history": ["i1"], "depth": 5},
    {"cursor": "i1", "history": ["i1"]},
    {"user": "\ud800"},
    {"history": ["i1", "a\udfff"]},
    {"history": ["i1"], "\ud83d": 1},
    [],
    "recommend",
    None,
]

SHORT = [
    {"history": ["nowhere"] * 10_000, "n": 3},
    {"history": [f"i{row % 200}" for row in range(10_000)], "n": 5},
    {"history": ["i1"], "beam_width": 4096, "n": 1000},
    {"history": ["i1"], "exclude_ids": [f"x{number}" for number in range(10_000)], "n": 10},
    {"history": ["i1"], "exclude_ids": [f"i{row}" for row in range(200)] + ["x"] * 9_800, "n": 10},
    {"history": ["i1"], "exclude_ids": [f"i{row}" for row in range(199)], "n": 10},
    {"user": "nobody", "exclude_seen": True, "categories_all": ["red", "green", "blue"], "n": 10},
]
LENGTHS = [3, 5, 200, 10, 0, 1, 0]


def test_bad_requests_among_good_ones_disturb_nobody(server):
    rng = np.random.default_rng(0)
    histories = [[f"i{row}" for row in rng.integers(0, 200, 5)] for _ in range(6)]
    alone = [server.items(history=history) for history in histories]
    bodies: list = []
    for number in range(5):
        bodies += [*REFUSED, *SHORT, *({"history": history} for history in histories)]
        if number == 0:
            good = range(len(REFUSED) + len(SHORT), len(bodies))
    period = len(bodies) // 5
    for reply in asyncio.run(storm(server.url, bodies)):
        place = reply.number % period
        if place < len(REFUSED):
            assert reply.status == 422, (bodies[reply.number], reply)
            assert reply.body["error"]["message"]
        elif place in good:
            assert reply.status == 200 and [hit["item"] for hit in reply.body["items"]] == alone[place - good.start]
        else:
            wanted = LENGTHS[place - len(REFUSED)]
            assert reply.status == 200 and len(reply.body["items"]) == wanted
            assert (reply.body["short_reason"] is None) == (wanted == bodies[reply.number]["n"])


def test_a_history_longer_than_the_context_counts_by_its_end(server, world):
    long = [f"i{row % 200}" for row in range(9_000)]
    body = server.recommend(history=long).json()
    read = body["history_items"]
    assert 15 < read <= 20  # a full window is cut somewhere in its oldest quarter
    assert body["items"] == server.recommend(history=long[-read:]).json()["items"]
    Histories(world.room.broker, 10_000, 3600).append([Interaction(user="old", item=item, time=place) for place, item in enumerate(long)])
    assert server.recommend(user="old").json()["items"] == body["items"]


def test_a_damaged_promotion_under_load_changes_no_answer(server, world):
    damaged = world.candidate(1)
    path = world.room.store.get(damaged) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = server.items(history=["i1"])

    async def both():
        requests = asyncio.create_task(storm(server.url, [{"history": ["i1"]}] * 100, spread_seconds=0.5))
        refused = [await post(server.url, "/v1/serving/promote", {"model": damaged}) for _ in range(3)]
        return await requests, refused

    replies, refused = asyncio.run(both())
    assert [status for status, _ in refused] == [409] * 3
    assert all(reply.status == 200 and [hit["item"] for hit in reply.body["items"]] == before for reply in replies)


def test_clients_that_leave_take_nothing_with_them(server):
    before = threading.active_count()

    async def leave() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        for number in range(40):
            _, writer = await asyncio.open_connection(host, int(port))
            text = b'{"history": ["i1"], "beam_width": 4096, "n": 200}'
            head = (
                f"POST /v1/recommendations HTTP/1.1\r\nHost: x\r\nX-API-Key: test-key\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            )
            writer.write(head.encode() + (text if number % 2 else text[:10]))
            await writer.drain()
            writer.transport.abort()

    asyncio.run(leave())
    assert len(server.items(history=["i1"])) == 10
    wait_until(lambda: server.service.scheduler.depth() + server.service.scheduler.running() == 0 == server.service.pool.in_use_bytes)
    assert threading.active_count() <= before + 40  # the web framework's own pool, never a thread a client
