"""What this room's routes answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class UserExport(BaseModel):
    """All that is stored of a user. Times are milliseconds since 1970-01-01 UTC."""

    user: str
    events: list[dict[str, Any]]
    history: list[dict[str, Any]]
    datasets: list[str]


class Deletion(BaseModel):
    """A user who was forgotten. ``digest`` tells nobody who it was; ``swept`` is when the last trace was gone, null until then.

    ``found`` counts what was taken away, names the artifacts ``removed``, and those that ``saw`` the user's events: models, catalogs and others that were made of the removed ones.
    """

    digest: str
    since: int
    accept: Literal["never", "later"]
    job: str | None = None
    swept: int | None = None
    found: dict[str, Any] = {}


class RefusedRow(BaseModel):
    """A row that was not taken: its place in the batch, and why."""

    index: int
    field: str
    value: str
    reason: str
    remedy: str = ""


class IntakeAnswer(BaseModel):
    """What became of a batch; what was accepted is on disk."""

    accepted: int
    rejected: int
    errors: list[RefusedRow]
