"""What both clients have in common: where the stack is, which key opens it, and how an answer becomes a value or an error."""

from __future__ import annotations

import os
import random
from typing import Any

import httpx

from semantide.client.calls import Call
from semantide.client.refusal import StackError, Unreachable
from semantide.client.retries import Retries

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class Connection:
    """The stack's address and key, and the patience with it."""

    def __init__(self, url: str | None, key: str | None, timeout_seconds: float, retries: Retries) -> None:
        found = url or os.environ.get("SEMANTIDE_URL", "")
        if not found:
            raise ValueError("no address of a stack: Client('http://host:8000', key='...'), or set SEMANTIDE_URL and SEMANTIDE_API_KEY")
        self.url, self.retries, self.chance = found.rstrip("/"), retries, random.Random()
        # Keys are ASCII; what else somebody wrote must fail as a wrong key does, not as a header that cannot be sent.
        given = key if key is not None else os.environ.get("SEMANTIDE_API_KEY", "")
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {given.encode('ascii', 'replace').decode()}"},
            "timeout": httpx.Timeout(timeout_seconds, connect=min(5.0, timeout_seconds)),
        }

    @staticmethod
    def request(call: Call, content: Any) -> dict[str, Any]:
        """How httpx is asked for it."""
        options: dict[str, Any] = {"headers": dict(call.headers)}
        if call.parameters:
            options["params"] = dict(call.parameters)
        if call.body is not None:
            options["json"] = call.body
        if call.timeout_seconds is not None:
            options["timeout"] = call.timeout_seconds
        if content is not None:
            options |= {"content": content, "timeout": None}  # a large file takes as long as it takes
        return options

    def after_silence(self, call: Call, error: httpx.HTTPError, attempt: int) -> float:
        """Seconds until the next attempt.

        Raises: Unreachable where there is none.
        """
        pause = self.retries.after_silence(attempt, repeatable=call.repeatable, sent=not isinstance(error, _NEVER_SENT), chance=self.chance)
        if pause is None:
            raise Unreachable(f"{self.url} does not answer ({type(error).__name__}: {error}): is the stack up? (`semantide status`)") from error
        return pause

    def after_answer(self, call: Call, answer: httpx.Response, attempt: int) -> float | None:
        """Seconds until the next attempt; None where the answer stands."""
        if answer.is_success:
            return None
        return self.retries.after_answer(answer.status_code, answer.headers, attempt, repeatable=call.repeatable, chance=self.chance)

    @staticmethod
    def value(call: Call, answer: httpx.Response, *, lost: bool) -> Any:
        """The decoded answer. ``lost`` says that an earlier attempt may have been carried out: what it removed is then gone.

        Raises: StackError.
        """
        if answer.is_success:
            if answer.headers.get("content-type", "").startswith("text/"):
                return answer.text
            return answer.json() if answer.content else None
        if lost and call.method == "DELETE" and answer.status_code == 404:
            return None
        try:
            body = answer.json()["error"]
            message, kind, details = str(body["message"]), str(body.get("type", "")), body.get("details")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StackError(f"{call.method} {call.path}: status {answer.status_code}", answer.status_code) from None
        raise StackError(message, answer.status_code, details, kind)
