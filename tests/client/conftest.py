"""A stack whose answers a test chooses, and both clients in front of it."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from semantide.client import AsyncClient, Client, Retries


class BothClients:
    """Calls a method of both clients and compares what comes of it; the answers are given anew to each."""

    def __init__(self, handle: Callable[[httpx.Request, int], httpx.Response], retries: Retries) -> None:
        self._handle, self._retries = handle, retries
        self.requests: list[httpx.Request] = []

    def _transport(self) -> httpx.MockTransport:
        self.requests.clear()

        def answer(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return self._handle(request, len(self.requests) - 1)

        return httpx.MockTransport(answer)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            outcomes: list[Any] = []
            told: list[list[tuple[str, str]]] = []
            for run in (self._wait, self._await):
                try:
                    outcomes.append(run(name, arguments, options))
                except Exception as error:
                    outcomes.append(error)
                told.append([(each.method, each.url.path) for each in self.requests])
            assert told[0] == told[1]
            assert repr(outcomes[0]) == repr(outcomes[1])
            if isinstance(outcomes[0], Exception):
                raise outcomes[0]
            return outcomes[0]

        return call

    def _wait(self, name: str, arguments: Any, options: Any) -> Any:
        with Client("http://stack", key="k", retries=self._retries) as client:
            client._http = httpx.Client(**{**client._connection.options, "transport": self._transport()})
            return getattr(client, name)(*arguments, **options)

    def _await(self, name: str, arguments: Any, options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient("http://stack", key="k", retries=self._retries) as client:
                client._http = httpx.AsyncClient(**{**client._connection.options, "transport": self._transport()})
                return await getattr(client, name)(*arguments, **options)

        return asyncio.run(main())


@pytest.fixture
def both() -> Callable[..., BothClients]:
    """Both clients before a function that answers a request of a given number; pauses are short."""
    return lambda handle, attempts=4: BothClients(handle, Retries(attempts=attempts, first_seconds=0, most_seconds=0, obey_seconds=60))
