"""What the pages ask of the stack, and what they do when it says no."""

from __future__ import annotations

from typing import Any, Protocol


class Refused(Exception):
    """The stack did not do it; the message says why and what to do. ``status`` is that of HTTP, 0 where nobody answered."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Stack(Protocol):
    """The REST API of a stack, for one key's holder."""

    async def get(self, path: str, **parameters: Any) -> Any:
        """An answer's JSON, or its text where it is none. Raises: Refused."""

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """As ``get``, with a body. Raises: Refused."""


async def known(stack: Stack, path: str, **parameters: Any) -> Any:
    """An answer, or None where there is nothing to tell of yet or the room is not there."""
    try:
        return await stack.get(path, **parameters)
    except Refused as refusal:
        if refusal.status in (404, 503):
            return None
        raise


async def all_of(stack: Stack, path: str, names: list[str]) -> dict[str, Any]:
    """The answers under one path for several names; those that are not known are left out."""
    found = {name: await known(stack, path.format(name)) for name in names}
    return {name: answer for name, answer in found.items() if answer is not None}
