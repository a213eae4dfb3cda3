"""The load has to be right before a latency says anything."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .arrivals import Bisection, Client, Reply, percentile_ms, storm


@given(st.floats(0.3, 1e4), st.floats(0.3, 1e4))
def test_bisection_finds_the_limit(limit, start):
    search = Bisection(start, floor=0.25, precision=1.06)
    tried = []
    while (rate := search.next()) is not None:
        tried.append(rate)
        search.tell(rate <= limit)
    assert search.passed <= limit <= search.failed <= 1.06 * search.passed or (search.passed == 0.0 and limit < 0.26)
    assert len(tried) < 40 and all(rate >= 0.25 for rate in tried)


def test_where_nothing_holds_bisection_ends_at_the_floor():
    search = Bisection(10.0, floor=1.0)
    while search.next() is not None:
        search.tell(False)
    assert search.passed == 0.0


def test_what_is_not_answered_in_full_never_came():
    replies = [Reply(0, 200, b"{}", 0.1), Reply(1, 200, b'{"narrowed":true}', 0.1), Reply(2, 429, b"{}", 0.1)]
    assert [reply.full for reply in replies] == [True, False, False]
    assert percentile_ms(replies, 30) == pytest.approx(100.0) and percentile_ms(replies, 99) == math.inf
    assert math.isnan(percentile_ms([], 99))


def test_latency_counts_from_when_a_request_was_due():
    """A service that answers one request at a time, slower than they come: the last one's latency is the whole backlog."""
    count, service_seconds = 20, 0.02

    async def run() -> list[Reply]:
        turn = asyncio.Lock()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                async with turn:
                    await asyncio.sleep(service_seconds)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        async def serve_until_left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        server = await asyncio.start_server(serve_until_left, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", "key") as client:
            replies = await storm(client, [b"[%d]" % number for number in range(count)], 1_000.0, seed=0)
        server.close()
        return replies

    replies = asyncio.run(run())
    assert sorted(reply.number for reply in replies) == list(range(count))
    assert all(reply.status == 200 and reply.data == b"[%d]" % reply.number for reply in replies)
    last = max(replies, key=lambda reply: reply.seconds)
    assert last.seconds >= 0.8 * count * service_seconds - count / 1_000
    lost = asyncio.run(_given_up())
    assert 0 < len(lost) < 50


async def _given_up() -> list[Reply]:
    """Nobody listens: the storm ends when it is told that it is lost."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", "key") as client:
        replies = await storm(client, [b""] * 200, 500.0, seed=0, lost=lambda replies: len(replies) > 2)
    server.close()
    assert all(reply.status == 0 for reply in replies)
    return replies
