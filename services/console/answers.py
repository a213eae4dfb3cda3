"""What the pages ask of the stack, and what they do when it says no."""

from __future__ import annotations

from typing import Any, Protocol

from semantide.shared.access import needed_role
from semantide.shared.api_keys import ApiKey


class Refused(Exception):
    """The stack did not do it; the message says why and what to do. ``status`` is that of HTTP, 0 where nobody answered."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Stack(Protocol):
    """The REST API of a stack, for one key's holder."""

    key: ApiKey

    async def get(self, path: str, **parameters: Any) -> Any:
        """An answer's JSON, or its text where it is none. Raises: Refused."""

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """As ``get``, with a body. Raises: Refused."""


def barred(stack: Stack, method: str, path: str) -> str:
    """Why this key's holder may not ask for that; empty where they may."""
    role = needed_role(method, path)
    return "" if stack.key.may(role) else f"This wants a key with the role {role}, and yours has the role {stack.key.role}."


async def known(stack: Stack, path: str, **parameters: Any) -> Any:
    """An answer, or None where there is nothing to tell of yet, the room is not there, or the key may not see it."""
    if barred(stack, "GET", path):
        return None
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
