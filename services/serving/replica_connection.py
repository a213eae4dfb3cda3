"""HTTP/1.1 to a replica: connections that are kept, one request at a time on each, and a clear word when the other side is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authorization", b"proxy-authenticate", b"expect")
_CONNECT_SECONDS = 1.0
_IDLE_KEPT = 64


class ReplicaGone(Exception):
    """The replica cannot be reached, or (``had_request``) left before its answer was whole."""

    def __init__(self, message: str, *, had_request: bool = False) -> None:
        super().__init__(message)
        self.had_request = had_request


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """A header's value; names are in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Reply:
        if not self.open:
            raise ReplicaGone("the connection was closed")
        assert self._transport is not None and self._answer is None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        except BaseException:
            # Given up, or broken: nobody may read what is left of this answer.
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ReplicaGone(f"it does not speak HTTP/1.1 ({error})", had_request=True))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ReplicaGone(str(error or "it closed the connection"), had_request=True))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # What the parser tells.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = int(self._parser.get_status_code())
        if status < 200:  # an interim answer
            self._begin()
            return
        reply = Reply(status, [pair for pair in self._headers if pair[0] not in (*_HOP_BY_HOP, b"content-length")], b"".join(self._body))
        if not self._parser.should_keep_alive():
            self.close()
        self._begin()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)


class ReplicaConnections:
    """Connections to one replica, at ``host:port``."""

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._idle: list[_Connection] = []
        self._closed = False

    async def ask(self, method: str, target: bytes, headers: Headers, body: bytes, *, repeatable: bool = True) -> Reply:
        """Send one request, again on a new connection where a kept one turns out to be closed and the request may be repeated; its answer.

        Raises: ReplicaGone.
        """
        lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\ncontent-length: %d\r\n" % (method.encode(), target, self.address.encode(), len(body))]
        lines += [b"%s: %s\r\n" % (name, value) for name, value in headers if name.lower() not in (*_HOP_BY_HOP, b"host", b"content-length")]
        request = b"".join([*lines, b"\r\n", body])
        had = False
        while repeatable and (kept := self._take()) is not None:
            try:
                return self._kept(kept, await kept.ask(request))
            except ReplicaGone as gone:
                had |= gone.had_request
        fresh = await self._connect(had)
        return self._kept(fresh, await fresh.ask(request))

    def close(self) -> None:
        """Close what is idle; what is busy is closed after its answer."""
        self._closed = True
        while (connection := self._take()) is not None:
            connection.close()

    def _take(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    def _kept(self, connection: _Connection, reply: Reply) -> Reply:
        if connection.open:
            if len(self._idle) < _IDLE_KEPT and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
        return reply

    async def _connect(self, had_request: bool) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise ReplicaGone(f"{self.address} cannot be reached ({type(error).__name__}: {error})", had_request=had_request) from error
        return connection
