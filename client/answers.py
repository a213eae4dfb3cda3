"""What the stack answers, as a client reads it. What a newer stack says beyond these fields is passed over."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from semantide.shared.contracts import ArtifactRef


class Answer(BaseModel):
    """Base of the answers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class HistoryEvent(Answer):
    """One interaction that serving remembers; ``time`` in milliseconds since 1970-01-01 UTC."""

    item: str
    time: int
    action: str


class History(Answer):
    """What serving remembers of a user, oldest first."""

    user: str
    events: tuple[HistoryEvent, ...]


class Deletion(Answer):
    """A user who was forgotten. ``digest`` tells nobody who it was; ``swept`` is when the last trace was gone, None until ``job`` has ended; ``found`` says what was there and what ``saw`` it."""

    digest: str
    since: int
    accept: str
    job: str | None = None
    swept: int | None = None
    found: dict[str, Any] = {}


class Rejected(Answer):
    """A row that was not taken: its place among all that were sent, from 0, and why."""

    index: int
    field: str
    value: Any = None
    reason: str = ""
    remedy: str = ""


class Sent(Answer):
    """What became of rows that were sent. ``errors`` has the first thousand of those rejected."""

    accepted: int = 0
    rejected: int = 0
    errors: tuple[Rejected, ...] = ()


class Pair(Answer):
    """A generator and the catalog that it speaks."""

    model: ArtifactRef
    catalog: ArtifactRef


class Live(Answer):
    """What shall serve (``model``, ``catalog``, ``retriever``), and what the process that answered serves (``loaded_...``); ``error`` says why these differ.

    ``judging`` is the job whose verdict a promotion `if_not_worse` waits for.
    """

    model: ArtifactRef | None = None
    catalog: ArtifactRef | None = None
    loaded_model: ArtifactRef | None = None
    loaded_catalog: ArtifactRef | None = None
    retriever: ArtifactRef | None = None
    loaded_retriever: ArtifactRef | None = None
    retriever_error: str | None = None
    error: str | None = None
    version: int = 0
    previous: tuple[Pair, ...] = ()
    judging: str | None = None
