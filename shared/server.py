"""The server that an application runs in: it answers whoever got through to it before it ends, and lets nobody keep a connection with half a request.

The library that parses requests limits neither how large the head of one may be nor how long it may take, and both come before anybody has shown a key.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semantide.shared.listening import EVERY, bound_socket, listening_address
from semantide.shared.telemetry import logger

HEAD_BYTES = 64 * 1024
"""Most of a request's first line and headers together, bytes."""

_HEAD_SECONDS = 20.0  # from a connection, or from the first byte of a further request on it, to the end of the head
_LAST_CALL_SECONDS = 0.5  # for the requests of connections that are through when a server ends
_DRAIN_SECONDS = 15  # for the answers
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHeads(HttpToolsProtocol):
    """One connection, whose heads are bounded in size and time; and so is the time of a body that nobody waits for any more, since its request is answered."""

    patience_seconds = _HEAD_SECONDS

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._head_bytes = self._heads = 0
        self._in_head, self._in_message = True, False
        self._deadline: asyncio.TimerHandle | None = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what belongs to a head."""
        if not self._in_message:
            self._arm()
        begun, heads = self._in_head, self._heads
        super().data_received(data)
        if self._in_head:
            # Of a block in which a head begins, behind another request, only that counts.
            self._head_bytes += len(data) if begun and heads == self._heads else 1
            if self._head_bytes > HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._arm()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._head_bytes = False, 0
        self._heads += 1
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._in_message = False
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The request is answered, and perhaps not all of it has come."""
        super().on_response_complete()
        if self._in_message and not self._in_head:
            self._arm()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on."""
        self._disarm()
        super().handle_websocket_upgrade()

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.patience_seconds, self._refuse, _TOO_SLOW)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, answer: bytes) -> None:
        self._disarm()
        if not self.transport.is_closing():
            # In the middle of another answer, or after one to the same request, it would be taken for what it is not.
            if self._in_head and self._head_bytes and (self.cycle is None or self.cycle.response_complete):
                self.transport.write(answer)
            if self.cycle is not None:
                self.cycle.disconnected = True
            self.transport.close()


class Server(uvicorn.Server):
    """Runs one application on one port. At its end whoever got through to it is answered, and whoever comes later is refused by the system, not cut off."""

    def __init__(self, app: Any, host: str, port: int, backlog: int = 2048) -> None:
        options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "timeout_graceful_shutdown": _DRAIN_SECONDS}
        super().__init__(uvicorn.Config(app, host=listening_address(host), port=port, backlog=backlog, http=BoundedHeads, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, on addresses of both kinds where all are asked for."""
        if sockets is None and self.config.host == EVERY:
            try:
                sockets = [bound_socket(EVERY, self.config.port)]
            except OSError as error:
                logger("http").error("this address and port cannot be listened on", port=self.config.port, error=str(error))
                self.should_exit = True
                return
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait to be taken, close the port, give what was taken a moment to send its request; then as usual."""
        waiting = []
        for server in self.servers:
            ports = [each.dup() for each in server.sockets]
            server.close()  # the loop takes no more, the system keeps a port as long as the copy is open
            for port in ports:
                with port, suppress(BlockingIOError):
                    while True:
                        waiting.append(port.accept()[0])
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        await asyncio.sleep(_LAST_CALL_SECONDS)
        await super().shutdown(sockets)

    def _protocol(self) -> Any:
        return self.config.http_protocol_class(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]
