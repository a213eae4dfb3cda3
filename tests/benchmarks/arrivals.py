"""Requests to an HTTP service as strangers send them: at random moments, whether or not the service keeps up.

Arrivals are a Poisson process (exponential gaps, seeded), and each latency counts from the moment that the request was due: a service that falls behind
cannot slow its own clients down. Connections are kept, and a new one is opened when all are busy.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reply:
    """Answer to request ``number`` of a storm; ``seconds`` from when it was due."""

    number: int
    status: int
    data: bytes
    seconds: float

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that came back."""
        found: dict[str, Any] = json.loads(self.data)
        return found

    @property
    def full(self) -> bool:
        """Whether it was answered as asked: 200, and with all the beams."""
        return self.status == 200 and b'"narrowed":true' not in self.data


class Client:
    """Kept connections to one address. Use as an async context manager."""

    def __init__(self, url: str, key: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._head = f"Host: {host}\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def send(self, method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
        """One request; status and body."""
        message = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        while self._idle:
            kept = self._idle.pop()
            try:
                return await self._exchange(kept, message)
            except (asyncio.IncompleteReadError, ConnectionError):
                kept[1].close()  # the server ended an idle connection: try the next
        return await self._exchange(await self._open(), message)

    async def post(self, path: str, body: Any) -> Any:
        """A request that must succeed; the parsed answer.

        Raises: RuntimeError with what came back instead.
        """
        status, data = await self.send("POST", path, json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {data.decode()[:500]}")
        return json.loads(data)

    async def abandon(self, path: str, data: bytes, after_seconds: float) -> None:
        """Send a request and hang up while it is worked on."""
        _, writer = await self._open()
        writer.write(f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.sleep(after_seconds)
        writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._address, limit=1 << 20)

    async def _exchange(self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], message: bytes) -> tuple[int, bytes]:
        reader, writer = connection
        writer.write(message)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        data = await reader.readexactly(length)
        if b"connection: close" in head:
            writer.close()
        else:
            self._idle.append(connection)
        return int(head.split(b" ", 2)[1]), data


async def storm(
    client: Client,
    bodies: Sequence[bytes],
    rate: float,
    *,
    seed: int,
    path: str = "/v1/recommendations",
    before: Callable[[int], Awaitable[None]] | None = None,
    lost: Callable[[list[Reply]], bool] | None = None,
) -> list[Reply]:
    """Send the bodies at ``rate`` requests a second on average; all replies, in the order they came.

    ``before`` runs as a request becomes due. Once ``lost`` says so of the replies so far, nothing more is sent.
    """
    due = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(bodies)))
    replies: list[Reply] = []
    begin = time.perf_counter()

    async def one(number: int) -> None:
        if before is not None:
            await before(number)
        try:
            status, data = await client.send("POST", path, bodies[number])
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status, data = 0, repr(error).encode()
        replies.append(Reply(number, status, data, time.perf_counter() - begin - due[number]))

    tasks = []
    for number in range(len(bodies)):
        if (wait := begin + due[number] - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        if lost is not None and lost(replies):
            break
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return replies


class Bisection:
    """The highest rate at which something holds, found by rates tried one at a time: up by ``factor`` until one fails, then between."""

    def __init__(self, start: float, *, floor: float, factor: float = 1.5, precision: float = 1.06) -> None:
        self._try, self._floor, self._factor, self._precision = max(start, floor), floor, factor, precision
        self.passed, self.failed = 0.0, math.inf

    def next(self) -> float | None:
        """The rate to try; None when the answer is known."""
        if self.failed <= self._floor or (self.passed and self.failed / self.passed <= self._precision):
            return None
        return self._try

    def tell(self, held: bool) -> None:
        """What the last rate gave."""
        if held:
            self.passed = self._try
        else:
            self.failed = self._try
        if math.isinf(self.failed):
            self._try = self.passed * self._factor
        elif not self.passed:
            self._try = max(self.failed / self._factor, self._floor)
        else:
            self._try = math.sqrt(self.passed * self.failed)


def percentile_ms(replies: Sequence[Reply], share: float) -> float:
    """Latency that this share of requests stays below, ms; what was not answered in full never came."""
    if not replies:
        return math.nan
    return float(np.percentile([reply.seconds * 1e3 if reply.full else math.inf for reply in replies], share, method="inverted_cdf"))
