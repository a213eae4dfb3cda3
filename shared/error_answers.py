"""What an answer that is an error looks like: ``{"error": {"type", "message", "details"?}}``, and which statuses any route may answer with one."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """What was wrong, with what value, and what to do; ``details`` names single fields or rows."""

    type: str
    message: str
    details: Any = None


class ErrorAnswer(BaseModel):
    """Every answer that is an error."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request is malformed",
        401: "No valid key",
        403: "The key's role does not suffice, or the place may not be read",
        404: "What was asked for does not exist",
        405: "The route knows no such method",
        408: "The body did not come in time",
        409: "The request contradicts what is there",
        413: "The body is too large",
        422: "A value cannot be used",
        429: "Too many requests: come again after Retry-After seconds",
        500: "A fault of ours; the log has its trace",
        503: "The cause may pass: come again after Retry-After seconds",
        507: "The disk has no room",
    }.items()
}
"""What any route may answer instead."""


def error_json(kind: str, message: str, details: Any = None) -> bytes:
    """The body of an error. It may quote anything that a caller sent: half of a surrogate pair, which UTF-8 cannot say, is escaped as JSON does."""
    body: dict[str, Any] = {"type": kind, "message": message}
    if details is not None:
        body["details"] = details
    return json.dumps({"error": body}, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="backslashreplace")
